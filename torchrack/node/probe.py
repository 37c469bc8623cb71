"""Can this host reach its peers on the data network as a job would? Runs there, standard library only.

    <- {"address", "port"}               our data address, the rendezvous port
    -> {"ports": [port], "busy": why}    listening on it (if free) and on a port of the kernel's choice, TCP and UDP
    <- {"peers": {node: {"address", "ports"}}, "mtu"}
    -> {"seen": {node: {"dev", "src", "ports": {port: why or ""}, "mtu": why or ""}}}
    <- the end of stdin: it is over

mtu: a UDP datagram as large as the NIC's MTU with don't-fragment set must arrive and be answered: no ping, no root.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

CONNECT_S, ANSWER_S, TRIES = 3.0, 0.7, 3
IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
HEADERS = 28  # bytes of IPv4 and UDP


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def greet(server: socket.socket) -> None:
    while True:
        try:
            peer, _ = server.accept()
        except OSError:
            return
        with peer:
            peer.sendall(b"torchrack")


def echo(server: socket.socket) -> None:
    while True:
        try:
            data, peer = server.recvfrom(1 << 16)
            server.sendto(str(len(data)).encode(), peer)
        except OSError:
            return


def listen(address: str, wanted: int) -> tuple[list[int], str]:
    """A greeter on the rendezvous port, unless it is taken, and one with a UDP echo beside it on any port."""
    ports, busy = [], ""
    for number in (wanted, 0):
        try:
            server = socket.create_server((address, number))
        except OSError as error:
            busy = error.strerror or str(error)
            continue
        threading.Thread(target=greet, args=(server,), daemon=True).start()
        ports.append(server.getsockname()[1])
    if ports:
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind((address, ports[-1]))
        threading.Thread(target=echo, args=(datagrams,), daemon=True).start()
    return ports, busy


def knock(own: str, address: str, port: int) -> str:
    """ "" if the peer's greeter answers there, else why not."""
    try:
        with socket.create_connection((address, port), CONNECT_S, (own, 0)) as peer:
            return "" if peer.recv(9) == b"torchrack" else "somebody else answers"
    except TimeoutError:
        return "no answer within %g s" % CONNECT_S
    except OSError as error:
        return error.strerror or str(error)


def fits(own: str, address: str, port: int, mtu: int) -> str:
    """ "" if a packet of `mtu` bytes arrives undivided, else why not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        sender.bind((own, 0))
        sender.settimeout(ANSWER_S)
        size = min(mtu, 65000) - HEADERS
        for _ in range(TRIES):
            try:
                sender.sendto(bytes(size), (address, port))
                if int(sender.recv(100)) == size:
                    return ""
            except TimeoutError:
                continue
            except (OSError, ValueError) as error:
                return str(error)
    return "packets of %d bytes do not arrive" % mtu


def route(address: str) -> tuple[str, str]:
    ip = shutil.which("ip") or "/usr/sbin/ip"
    try:
        done = subprocess.run([ip, "-j", "route", "get", address], capture_output=True, text=True, timeout=5)
        found = json.loads(done.stdout)[0]
        return found.get("dev", ""), found.get("prefsrc", "")
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return "", ""


def look(own: str, peer: dict[str, object], mtu: int) -> dict[str, object]:
    address, ports = str(peer["address"]), [int(str(port)) for port in peer["ports"]]  # type: ignore[attr-defined]
    dev, src = route(address)
    knocked = {str(port): knock(own, address, port) for port in ports}
    size = fits(own, address, ports[-1], mtu) if ports and not knocked[str(ports[-1])] else "not tried"
    return {"dev": dev, "src": src, "ports": knocked, "mtu": size}


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    own = asked["address"]
    ports, busy = listen(own, asked["port"])
    say(ports=ports, busy=busy)
    line = sys.stdin.readline()
    if line:
        asked = json.loads(line)
        peers = asked["peers"]
        with ThreadPoolExecutor(16) as pool:
            looks = {node: pool.submit(look, own, peer, asked["mtu"]) for node, peer in peers.items()}
        say(seen={node: done.result() for node, done in looks.items()})
    sys.stdin.read()


main()
