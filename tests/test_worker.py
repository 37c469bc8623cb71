"""worker.py: several programs in one interpreter, as a host runs them."""

from __future__ import annotations

import subprocess
import sys

from torchrack.places.ssh import WORKER
from torchrack.places.talk import block, program, words

ASK = "import os, sys\nsize = int(os.read(0, 8), 16)\nprint(repr(os.read(0, size)))\n"


def work(*blocks: bytes) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-I", "-S", "-c", WORKER]
    return subprocess.run(argv, input=b"".join(blocks), capture_output=True, timeout=20, check=False)


def test_programs_run_one_after_another_each_with_its_arguments() -> None:
    tell = "import sys\nprint(sys.argv[1:])\nmine = 1\n"
    done = work(*program(tell, "a b", "ü\n'"), *program(tell), *program(tell, ""))
    assert done.stdout.decode().splitlines() == ["['a b', \"ü\\n'\"]", "[]", "['']"]
    assert done.returncode == 0 and done.stderr == b""


def test_a_program_shares_no_names_with_the_one_before() -> None:
    done = work(*program("left = 1"), *program("print('left' in globals(), __name__)"))
    assert done.stdout == b"False __main__\n"


def test_what_a_program_reads_is_not_the_next_one() -> None:
    done = work(*program(ASK), block(b"for the first"), *program(ASK), words("for", "the second"))
    assert done.stdout.decode().splitlines() == [repr(b"for the first"), repr(b"for\0the second")]


def test_an_error_ends_all_and_says_where() -> None:
    done = work(*program("1 / 0"), *program("print('never')"))
    assert done.returncode == 1 and done.stdout == b"" and b"ZeroDivisionError" in done.stderr


def test_the_end_of_stdin_ends_it_even_in_the_middle_of_a_block() -> None:
    assert work(b"").returncode == 0
    arguments, source = program("print(1)")
    assert work(arguments, source[:-1]).stdout == b""
