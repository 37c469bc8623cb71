"""python -m torchrack.diagnose PATH [--json]: the same as `torchrack diagnose`, without the rest of the CLI."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from torchrack.diagnose.decide import diagnose_folder
from torchrack.model.errors import TorchrackError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torchrack.diagnose")
    parser.add_argument("path", type=Path, help="a folder, a file, or - for stdin")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        answer = diagnose_folder(args.path)
    except TorchrackError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer.to_json(), ensure_ascii=False) if args.json else answer)
    return answer.exit_code


if __name__ == "__main__":
    sys.exit(main())
