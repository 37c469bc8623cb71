"""The error tree, caught in one place (`torchrack.cli.main`), which prints it and exits with `exit_code`.

TorchrackError                      exit code 1 unless a subclass says otherwise
├── UsageError (ValueError)         2: the request itself is wrong
│   ├── InvalidFile                 2: a file with problems, all of them listed as file:key: problem
│   └── NotFound (LookupError)      2: no lab, rack, node or run of that name
├── Lacking                         4: the environment lacks something; the hint is the command that fixes it
│   ├── NotInstalled                4
│   ├── NotRunning                  4
│   ├── NotPermitted (PermissionError)  4
│   ├── NameTaken                   4: the name belongs to something that is not ours
│   ├── Unreachable (ConnectionError)   4: a host that ssh does not get into: no answer, host key, login
│   ├── RackBusy                    4: another torchrack process works on this rack
│   └── NotEnough (OSError)         4: memory, disk, subnets or ports have run out
├── CommandFailed                   4: a command we ran failed; carries argv, exit code and the tail of its output
├── TimedOut (TimeoutError)         1: says what was awaited, what was seen, and a hint
└── Remains                         1: teardown could not remove everything; lists what is left
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence


class TorchrackError(Exception):
    """Base of all errors that torchrack raises on purpose.

    `hint` is what to type or change; it is printed last, after `fix: `.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  fix: {self.hint}"


class UsageError(TorchrackError, ValueError):
    exit_code = 2


class InvalidFile(UsageError):
    """A file that does not validate: every problem at once, each as `file:key: problem`."""

    def __init__(self, path: str, problems: Sequence[tuple[str, str]], hint: str | None = None) -> None:
        self.path, self.problems = path, tuple(problems)
        lines = [f"{path}:{key}: {problem}" for key, problem in self.problems]
        super().__init__("\n".join(lines), hint)


class NotFound(UsageError, LookupError):
    pass


class Lacking(TorchrackError):
    exit_code = 4


class NotInstalled(Lacking):
    pass


class NotRunning(Lacking):
    pass


class NotPermitted(Lacking, PermissionError):
    pass


class NameTaken(Lacking):
    pass


class Unreachable(Lacking, ConnectionError):
    """`check` is the row of preflight that this belongs to: reachable, host key or login."""

    def __init__(self, check: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.check = check


class RackBusy(Lacking):
    pass


class NotEnough(Lacking, OSError):
    pass


class CommandFailed(TorchrackError):
    """A command we ran ended with a non-zero status (`code` is None: it ran past its time limit)."""

    exit_code = 4
    TAIL_LINES = 12

    def __init__(self, argv: Sequence[str], code: int | None, output: str, hint: str | None = None) -> None:
        self.argv, self.code, self.output = tuple(argv), code, output
        ended = "did not end in time" if code is None else f"exit status {code}"
        tail = "\n".join(f"  | {line}" for line in output.strip().splitlines()[-self.TAIL_LINES :])
        super().__init__(f"{shlex.join(self.argv)}: {ended}" + (f"\n{tail}" if tail else ""), hint)


class TimedOut(TorchrackError, TimeoutError):
    pass


class Remains(TorchrackError):
    def __init__(self, what: Sequence[str], hint: str) -> None:
        self.what = tuple(what)
        super().__init__("still there: " + ", ".join(self.what), hint)
