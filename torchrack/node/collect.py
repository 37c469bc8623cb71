"""Send what a run's ranks wrote as a tar on stdout; remove the run's folder once it was kept. Stdlib only.

`python collect.py RUN_FOLDER NODE CWD` on the node. In the tar: rank<r>/… is what rank r wrote to $OUT, NODE/… what
appeared in the working directory beside what had been put there, flight/rank<r> what the rank's flight recorder left.

    <- a JSON list of the files that were there before
    -> the line "tar" and a tar, or the line "nothing"; then the line "end"
    <- the line "kept"; else all of it stays
"""

import glob
import json
import os
import shutil
import sys


def main() -> None:
    run, node, cwd = sys.argv[1:]
    before = set(json.loads(sys.stdin.readline()))
    out = os.path.join(run, "out")
    written = any(files for _, _, files in os.walk(out))
    found = [(os.path.join(out, name), name) for name in (sorted(os.listdir(out)) if written else ())]
    for base, folders, files in os.walk(cwd):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            path = os.path.join(base, name)
            inside = os.path.relpath(path, cwd)
            if inside not in before and os.path.isfile(path):
                found.append((path, os.path.join(node, inside)))
    for path in glob.glob(f"{glob.escape(run)}/logs*/flight_*[0-9]"):  # dumps of NCCL's watchdog
        found.append((path, os.path.join("flight", os.path.basename(path).replace("flight_", "rank"))))
    send(found)
    if sys.stdin.readline() == "kept\n":
        shutil.rmtree(run, ignore_errors=True)


def send(found: "list[tuple[str, str]]") -> None:
    stdout = sys.stdout.buffer
    stdout.write(b"tar\n" if found else b"nothing\n")
    if found:
        import tarfile  # half of this script's time, and most runs write nothing

        with tarfile.open(fileobj=stdout, mode="w|") as tar:
            for path, name in found:
                tar.add(path, name)
    stdout.write(b"end\n")
    stdout.flush()


main()
