"""Can this host reach its peers on the data network as a job would? Runs there, standard library only.

    <- {"address", "port"}               our data address, the rendezvous port
    -> {"ports": [port], "busy": why}    listening on it (if free) and on a port of the kernel's choice, TCP and UDP
    <- {"peers": {node: {"address", "ports"}}, "mtu"}
    -> {"seen": {node: {"dev", "src", "ports": {port: why or ""}, "mtu": why or ""}}}
    <- the end of stdin: it is over

mtu: a UDP datagram as large as the NIC's MTU with don't-fragment set must arrive and be answered: no ping, no root.
Plain threads, as importing concurrent.futures takes longer than the looks do.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading

AT_ONCE = 16
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
        with socket.socket() as peer:
            peer.settimeout(CONNECT_S)
            peer.bind((own, 0))
            peer.connect((address, port))
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


def routes(addresses: list[str]) -> dict[str, tuple[str, str]]:
    """The device and the source address that the kernel takes to each, where it has a route and tells."""
    ip, asks = shutil.which("ip") or "/usr/sbin/ip", "".join("route get %s\n" % address for address in addresses)
    try:
        argv = [ip, "-o", "-force", "-batch", "-"]
        done = subprocess.run(argv, input=asks, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for line in done.stdout.splitlines():  # 10.0.0.6 via 10.0.0.1 dev eth0 src 10.0.0.5 …, or: local 10.0.0.5 dev lo …
        words = line.split()
        address = next((word for word in words[:2] if word in addresses), "")
        dev, src = (words[words.index(key) + 1] if key in words[:-1] else "" for key in ("dev", "src"))
        found[address] = dev, src
    return found


def look(own: str, peer: dict[str, object], mtu: int, route: tuple[str, str]) -> dict[str, object]:
    address, ports = str(peer["address"]), [int(str(port)) for port in peer["ports"]]  # type: ignore[attr-defined]
    knocked = {str(port): knock(own, address, port) for port in ports}
    size = fits(own, address, ports[-1], mtu) if ports and not knocked[str(ports[-1])] else "not tried"
    return {"dev": route[0], "src": route[1], "ports": knocked, "mtu": size}


def look_at(own: str, peers: dict[str, dict[str, object]], mtu: int) -> dict[str, dict[str, object]]:
    """All peers, AT_ONCE at a time."""
    known, todo, seen = routes([str(peer["address"]) for peer in peers.values()]), list(peers), {}

    def work() -> None:
        while todo:
            try:
                node = todo.pop()
            except IndexError:
                return
            seen[node] = look(own, peers[node], mtu, known.get(str(peers[node]["address"]), ("", "")))

    threads = [threading.Thread(target=work) for _ in range(min(AT_ONCE, len(peers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    own = asked["address"]
    ports, busy = listen(own, asked["port"])
    say(ports=ports, busy=busy)
    line = sys.stdin.readline()
    if line:
        asked = json.loads(line)
        say(seen=look_at(own, asked["peers"], asked["mtu"]))
    sys.stdin.read()


main()
