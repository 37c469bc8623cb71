"""A foreign program on a port: what a broken side of lab 06 meets. It ends with the run, or with us."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchrack.model.errors import TimedOut
from torchrack.places.base import Place
from torchrack.plan.plan import Plan

# Takes connections, says nothing and hangs up after a while, as a service does that waits for its own kind of request.
# Ends when its stdin does, so that no crash of ours leaves it listening.
_LISTENER = """
import socket, sys, threading
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
def serve():
    while True:
        connection, _ = server.accept()
        threading.Timer(float(sys.argv[3]), connection.close).start()
threading.Thread(target=serve, daemon=True).start()
sys.stdin.read()
"""
HANGS_UP_AFTER = 15.0
LISTENS_WITHIN = 10.0


@contextmanager
def occupied(plan: Plan, place: Place) -> Iterator[None]:
    """Hold the port that the job asks to be taken, if any, while the body runs."""
    wanted = plan.job.occupy
    if wanted is None:
        yield
        return
    address = plan.node(wanted.node).nics[wanted.net].address
    argv = [place.python(wanted.node), "-I", "-c", _LISTENER, address, str(wanted.port), str(HANGS_UP_AFTER)]
    with place.spawn(wanted.node, argv) as listener:
        try:
            start = time.monotonic()
            assert listener.stdout
            if listener.stdout.readline().strip() != b"listening":
                assert listener.stderr
                seen = listener.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
                raise TimedOut(f"nothing listens on {wanted.node} {address}:{wanted.port}: {seen}", "make down, again")
            assert time.monotonic() - start < LISTENS_WITHIN
            yield
        finally:
            assert listener.stdin
            listener.stdin.close()
            listener.wait()
