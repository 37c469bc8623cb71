"""Can this host reach its peers on the data network as a job would? Runs there, standard library only.

Lines of words come, each when the one before was answered; lines go back, each a Python literal.

    <- NIC ADDRESS PORT                      our data NIC and its address, the rendezvous port
    -> {"ports": [port], "busy", "mtu"}      listening on it, unless it is busy, and on a port of the kernel's choice
    <- NODE ADDRESS PORTS NODE …             peers, each with its ports, commas between them
    -> {"seen": {node: {"dev", "src", "ports": {port: why or ""}, "mtu": why or ""}}}
    <- anything: every host has looked       -> {"over": True}, and nobody listens any more

mtu: a UDP datagram as large as the NIC's MTU with don't-fragment set must arrive and be answered: no ping, no root.
Routes are asked of the kernel itself. json, subprocess and concurrent.futures take longer to import than the looks do.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading

AT_ONCE = 16
CONNECT_S, ANSWER_S, TRIES = 3.0, 0.7, 3
IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
ETHERNET = 1500
HEADERS = 28  # bytes of IPv4 and UDP
GREETING = b"torchrack"
GETROUTE, REQUEST, NEWROUTE = 26, 1, 24  # of rtnetlink(7)
DST, OIF, PREFSRC = 1, 4, 7


def say(**fields: object) -> None:
    sys.stdout.write(f"{fields!a}\n")
    sys.stdout.flush()


class Doors:
    """A greeter on the rendezvous port, unless it is taken, and one with a UDP echo beside it on any port."""

    def __init__(self, address: str, wanted: int) -> None:
        self.greeters, self.busy = list[socket.socket](), ""
        for number in (wanted, 0):
            try:
                self.greeters.append(socket.create_server((address, number)))
            except OSError as error:
                self.busy = error.strerror or str(error)
        self.ports = [server.getsockname()[1] for server in self.greeters]
        self.echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.echo.bind((address, self.ports[-1] if self.ports else 0))
        self.closing, self.closer = os.pipe()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while True:
            ready = select.select([self.closing, *(door.fileno() for door in (self.echo, *self.greeters))], [], [])[0]
            if self.closing in ready:
                return
            for door in (door for door in (self.echo, *self.greeters) if door.fileno() in ready):
                try:
                    if door is self.echo:
                        data, peer = door.recvfrom(1 << 16)
                        door.sendto(str(len(data)).encode(), peer)
                    else:
                        with door.accept()[0] as guest:
                            guest.sendall(GREETING)
                except OSError:
                    continue  # a guest that left again

    def close(self) -> None:
        os.write(self.closer, b".")
        self.thread.join()
        for door in (self.echo, *self.greeters):
            door.close()
        os.close(self.closing)
        os.close(self.closer)


def knock(own: str, address: str, port: int) -> str:
    """ "" if the peer's greeter answers there, else why not."""
    try:
        with socket.socket() as peer:
            peer.settimeout(CONNECT_S)
            peer.bind((own, 0))
            peer.connect((address, port))
            return "" if peer.recv(len(GREETING)) == GREETING else "somebody else answers"
    except socket.timeout:  # noqa: UP041  which is not TimeoutError before Python 3.10
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
            except socket.timeout:  # noqa: UP041
                continue
            except (OSError, ValueError) as error:
                return str(error)
    return "packets of %d bytes do not arrive" % mtu


def route(address: str) -> tuple[str, str]:
    """The device and the source address that the kernel takes to it; empty where it has no route, or does not tell."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.settimeout(ANSWER_S)
            asked = struct.pack("=BBBBBBBBIHH", socket.AF_INET, 32, 0, 0, 0, 0, 0, 0, 0, 8, DST) + socket.inet_aton(
                address
            )
            kernel.send(struct.pack("=IHHII", 16 + len(asked), GETROUTE, REQUEST, 1, 0) + asked)
            data = kernel.recv(1 << 16)
        size, kind = struct.unpack_from("=IH", data)
        found, at = dict[int, bytes](), 16 + 12
        while kind == NEWROUTE and at < size:
            length, name = struct.unpack_from("=HH", data, at)
            found[name] = data[at + 4 : at + length]
            at += length + 3 & ~3
        dev = socket.if_indextoname(struct.unpack("=I", found[OIF])[0]) if OIF in found else ""
        return dev, socket.inet_ntoa(found[PREFSRC]) if PREFSRC in found else ""
    except OSError:
        return "", ""


def look(own: str, address: str, ports: list[str], mtu: int) -> dict[str, object]:
    dev, src = route(address)
    knocked = {port: knock(own, address, int(port)) for port in ports}
    size = fits(own, address, int(ports[-1]), mtu) if ports and not knocked[ports[-1]] else "not tried"
    return {"dev": dev, "src": src, "ports": knocked, "mtu": size}


def look_at(own: str, peers: list[tuple[str, str, list[str]]], mtu: int) -> dict[str, dict[str, object]]:
    """All peers, AT_ONCE at a time."""
    seen = dict[str, dict[str, object]]()

    def work() -> None:
        while peers:
            try:
                node, address, ports = peers.pop()
            except IndexError:
                return
            seen[node] = look(own, address, ports, mtu)

    threads = [threading.Thread(target=work) for _ in range(min(AT_ONCE, len(peers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def mtu_of(nic: str) -> int:
    """In bytes; Ethernet's where the host does not tell."""
    try:
        with open(f"/sys/class/net/{nic}/mtu") as file:
            return int(file.read())
    except (OSError, ValueError):
        return ETHERNET


def main() -> None:
    nic, own, port = sys.stdin.readline().split()
    doors, mtu = Doors(own, int(port)), mtu_of(nic)
    say(ports=doors.ports, busy=doors.busy, mtu=mtu)
    told = sys.stdin.readline().split()
    peers = [(told[i], told[i + 1], told[i + 2].split(",")) for i in range(0, len(told), 3)]
    say(seen=look_at(own, peers, mtu))
    sys.stdin.readline()
    doors.close()
    say(over=True)


main()
