"""Hostile nsqd and nsqlookupd, as a program: ``python -m tests.campaigns.hostile.servers NAME``.

The program prints its port and attacks every connection until its standard input is closed; then it prints how many
connections it had and how many bytes it sent. It uses the standard library alone, so that it starts quickly and is not
slowed down by the code under test.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from struct import pack
from typing import Any, BinaryIO

_IDENTITY = {"version": "1.3.0", "max_rdy_count": 2500, "msg_timeout": 60000, "max_msg_timeout": 900000}
_ENDLESS = 1 << 30
PORTS: list[int] = []
"""Ports of this server; more than one where it plays many lookup nodes."""


def frame(kind: int, data: bytes) -> bytes:
    """Return a frame of nsqd."""
    return pack(">Ii", len(data) + 4, kind) + data


def message(number: int, body: bytes) -> bytes:
    """Return a message frame."""
    return frame(2, pack(">QH", number, 1) + b"%016x" % number + body)


class Peer:
    """One connection of the client under attack.

    Args:
        sock: the connection.
        counters: connections and bytes sent, of all peers.
    """

    def __init__(self, sock: socket.socket, counters: dict[str, int]) -> None:
        self.sock = sock
        self.reader: BinaryIO = sock.makefile("rb")
        self._counters = counters

    def send(self, data: bytes) -> None:
        """Send bytes, and count them."""
        self.sock.sendall(data)
        self._counters["sent"] += len(data)

    def handshake(self) -> None:
        """Read the magic and IDENTIFY, and answer."""
        self.reader.read(4)
        self.read_identify()
        self.send(frame(0, json.dumps(_IDENTITY).encode()))

    def read_identify(self) -> None:
        """Read IDENTIFY and its body."""
        self.reader.readline()
        self.reader.read(int.from_bytes(self.reader.read(4), "big"))

    def subscribe(self) -> None:
        """Wait for SUB, and grant it."""
        while line := self.reader.readline():
            if line.startswith(b"SUB"):
                self.send(frame(0, b"OK"))
                return

    def discard(self) -> None:
        """Read and ignore all further commands, in another thread."""

        def read() -> None:
            try:
                while self.sock.recv(1 << 20):
                    pass
            except OSError:
                return

        threading.Thread(target=read, daemon=True).start()


def ignore_rdy(peer: Peer) -> None:
    """Send messages without end, whatever RDY says."""
    peer.handshake()
    peer.subscribe()
    peer.discard()
    for start in range(0, _ENDLESS, 100):
        peer.send(b"".join(message(start + number, b"x" * 1000) for number in range(100)))


def flood_errors(peer: Peer) -> None:
    """Send error frames without end, each with a text of 100 KB."""
    peer.handshake()
    peer.discard()
    while True:
        peer.send(frame(1, b"E_INVALID " + b"x" * 100_000))


def flood_fin_failed(peer: Peer) -> None:
    """Send rejections of FIN without end."""
    peer.handshake()
    peer.discard()
    rejected = frame(1, b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight") * 1000
    while True:
        peer.send(rejected)


def flood_heartbeats(peer: Peer) -> None:
    """Send heartbeats without end, and never read the NOP that each of them requires."""
    peer.handshake()
    while True:
        peer.send(frame(0, b"_heartbeat_") * 1000)


def never_read(peer: Peer) -> None:
    """Shake hands, then neither read nor write."""
    peer.handshake()
    time.sleep(_ENDLESS)


def garbage(peer: Peer) -> None:
    """Send random bytes after the handshake."""
    peer.handshake()
    peer.discard()
    while True:
        peer.send(os.urandom(1 << 16))


def huge_frames(peer: Peer) -> None:
    """Announce a frame of 2 GiB, and send as many bytes as the client reads."""
    peer.handshake()
    peer.discard()
    peer.send(pack(">Ii", (1 << 31) - 1, 0))
    while True:
        peer.send(bytes(1 << 20))


def odd_frames(peer: Peer) -> None:
    """Send frames of sizes and types that do not exist, and messages that are too short."""
    peer.handshake()
    peer.discard()
    odd = [
        pack(">I", 0),
        pack(">I", 3) + b"abc",
        pack(">Ii", 4, 0),
        pack(">Ii", 4, -1),
        pack(">Ii", 9, 77) + b"other",
        frame(2, b"short"),
        frame(0, b"OK") * 1000,
        frame(2, bytes(26)) * 1000,
        pack(">I", 1 << 31),
    ]
    peer.send(odd[peer.sock.fileno() % len(odd)])
    time.sleep(0.1)


def flood_compressed(peer: Peer) -> None:
    """Grant deflate, then send heartbeats and spaces that deflate to a thousandth of their size."""
    peer.reader.read(4)
    peer.read_identify()
    peer.send(frame(0, json.dumps({**_IDENTITY, "deflate": True, "deflate_level": 6}).encode()))
    pack_ = zlib.compressobj(9, zlib.DEFLATED, -15)
    peer.send(pack_.compress(frame(0, b"OK")) + pack_.flush(zlib.Z_SYNC_FLUSH))
    peer.discard()
    bomb = pack_.compress(frame(1, b"E_PUB_FAILED " + bytes(15_000_000)) * 4) + pack_.flush(zlib.Z_SYNC_FLUSH)
    while True:
        peer.send(bomb)
        bomb = pack_.compress(bytes(60_000_000)) + pack_.flush(zlib.Z_SYNC_FLUSH)


def largest_frames(peer: Peer) -> None:
    """Send error frames of nearly the largest size that is accepted, one after the other."""
    peer.handshake()
    peer.discard()
    while True:
        peer.send(frame(1, b"E_PUB_FAILED " + bytes(16_000_000)))


def slow_loris(peer: Peer) -> None:
    """Send the response to IDENTIFY one byte at a time."""
    peer.reader.read(4)
    peer.read_identify()
    for byte in frame(0, json.dumps(_IDENTITY).encode()):
        peer.send(bytes((byte,)))
        time.sleep(0.1)


# Lookup nodes


def _respond(peer: Peer, body: bytes) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _requests(peer: Peer) -> Any:
    """Yield the path of each request."""
    while line := peer.reader.readline():
        while (peer.reader.readline() or b"\r\n") != b"\r\n":
            pass
        yield line.split(b" ")[1].decode().partition("?")[0]


def _producer(number: int) -> dict[str, Any]:
    return {
        "broadcast_address": f"127.1.{number >> 8}.{number & 255}",
        "hostname": f"n{number}",
        "tcp_port": 1,
        "http_port": 2,
        "version": "1.3.0",
    }


def _lookup_nodes(count: int) -> list[dict[str, Any]]:
    """List this server's own addresses, then some at which nothing listens."""
    places = [("127.0.0.1", port) for port in PORTS]
    places += [(f"127.1.{number >> 8}.{number & 255}", 1) for number in range(count - len(places))]
    return [
        {"ID": str(number), "NodeIP": host, "HttpPort": str(port), "Epoch": 1}
        for number, (host, port) in enumerate(places)
    ]


def many_nodes(count: int) -> Callable[[Peer], None]:
    """Name ``count`` lookup nodes, and as many nodes of each topic."""
    answers: dict[str, bytes] = {}

    def attack(peer: Peer) -> None:
        if not answers:
            producers = list(map(_producer, range(count)))
            answers["/listlookup"] = json.dumps({"lookupdnodes": _lookup_nodes(count), "lookupdleader": {}}).encode()
            answers["/lookup"] = json.dumps({"channels": [], "producers": producers}).encode()
            answers["/nodes"] = json.dumps({"producers": producers}).encode()
        for path in _requests(peer):
            _respond(peer, answers.get(path, b"{}"))

    return attack


def endless_body(peer: Peer) -> None:
    """Respond with a body that never ends."""
    for _ in _requests(peer):
        peer.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{")
        while True:
            peer.send(b" " * (1 << 16))


_LARGE = b'{"producers":[' + b"{}," * 5_000_000 + b"{}]}"


def large_answers(peer: Peer) -> None:
    """Name this server as 64 lookup nodes, which all respond with 15 MB of producers."""
    for path in _requests(peer):
        if path == "/listlookup":
            _respond(peer, json.dumps({"lookupdnodes": _lookup_nodes(64)}).encode())
        else:
            _respond(peer, _LARGE)


def slow_answers(peer: Peer) -> None:
    """Respond one byte at a time."""
    for _ in _requests(peer):
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            peer.send(b" ")
            time.sleep(0.1)


def wrong_json(peer: Peer) -> None:
    """Respond with JSON that has other types than expected, or that is nested too deep."""
    wrong = [
        b"[" * 100_000,
        b"7",
        b'{"channels":7,"producers":[7],"partitions":[]}',
        b'{"partitions":{"x":{}}}',
        b'{"partitions":{"0":{"broadcast_address":[],"tcp_port":{}}}}',
        b'{"status_code":{},"data":[]}',
        b'{"meta":{"partition_num":"1e9"}}',
        b"\xff\xfe",
    ]
    for number, _ in enumerate(_requests(peer)):
        _respond(peer, wrong[number % len(wrong)])


ATTACKS: dict[str, Callable[[Peer], None]] = {
    "ignore-rdy": ignore_rdy,
    "flood-errors": flood_errors,
    "flood-fin-failed": flood_fin_failed,
    "flood-heartbeats": flood_heartbeats,
    "never-read": never_read,
    "garbage": garbage,
    "huge-frames": huge_frames,
    "odd-frames": odd_frames,
    "flood-compressed": flood_compressed,
    "largest-frames": largest_frames,
    "slow-loris": slow_loris,
    "nodes-1000": many_nodes(1000),
    "nodes-8000": many_nodes(8000),
    "endless-body": endless_body,
    "large-answers": large_answers,
    "slow-answers": slow_answers,
    "wrong-json": wrong_json,
}


def main() -> None:
    """Attack every connection until standard input is closed."""
    attack = ATTACKS[sys.argv[1]]
    counters = {"connections": 0, "sent": 0}

    def serve(sock: socket.socket) -> None:
        try:
            with sock:
                attack(Peer(sock, counters))
        except OSError:
            return

    def accept(listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            counters["connections"] += 1
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    for _ in range(64 if attack in (ATTACKS["nodes-1000"], ATTACKS["nodes-8000"], large_answers) else 1):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        PORTS.append(listener.getsockname()[1])
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    sys.stdout.write(f"{PORTS[0]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.write(json.dumps(counters) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
