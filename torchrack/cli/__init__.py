"""The command line. `main` is the one place where torchrack's own errors are caught; anything else is a bug."""

from __future__ import annotations

import atexit
import errno
import gc
import signal
import sys
from types import FrameType

from torchrack.model.errors import TorchrackError


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point; exits with 0, 1, 2, 3 or 4 as DESIGN's table says."""
    # Of what imports make, a hundred thousand objects stay: looking through them for garbage, also at exit, took
    # 0.13 s of every command.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    from torchrack.cli.app import app

    signal.signal(signal.SIGTERM, _terminate)  # SIGTERM ends a run as cleanly as Ctrl-C does
    try:
        app()
    except TorchrackError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; Python would complain about the flush at exit
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: {error.strerror}: {error.filename or 'the output is cut off'}\n  fix: df -h", file=sys.stderr)
        sys.exit(4)
