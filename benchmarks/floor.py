"""What asyncio costs alone: a client that knows its commands, parses nothing, and has one task for each connection.

``python -m benchmarks.floor MODE LOOKUPD TOPIC COUNT``, with the modes of `benchmarks.bench_ordered` that send or
receive one message at a time.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial

BODY = b"x" * 200
WARM_UP = 200
_HEADER = b'{"##trace_id":"1","##key":"key","name":"value"}'
_ID = slice(18, 34)  # of a message, after size, frame type, timestamp and attempts


class Peer(asyncio.Protocol):
    """A connection that continues a task with each read."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._waiter: asyncio.Future[bytes] | None = None
        self._data = b""
        self.send: Callable[[bytes], None] = lambda data: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            self.send = transport.write
        self.send(self._hello)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(b"")

    async def frame(self, kind: int) -> bytes:
        """Return the next frame of a type; others are left out."""
        while True:
            size = int.from_bytes(self._data[:4], "big") if len(self._data) >= 4 else 0
            if size and len(self._data) >= 4 + size:
                frame, self._data = self._data[: 4 + size], self._data[4 + size :]
                if frame[7] == kind:
                    return frame
                if frame[7] == 1 and not kind:  # the real server refuses a FIN in the first milliseconds of a channel
                    raise SystemExit(f"the server responded {frame[8:]!r}")
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


def _given(peer: Peer) -> Peer:
    return peer


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


async def measure(mode: str, lookupd: str, topic: str, count: int) -> None:
    """Publish to one partition, or consume all, one message at a time."""
    found = json.load(urllib.request.urlopen(f"http://{lookupd}/lookup?topic={topic}&access=r&metainfo=true"))  # noqa: ASYNC210
    partitions = {
        int(number): (node["broadcast_address"], node["tcp_port"])
        for number, node in found.get("data", found)["partitions"].items()
    }
    identify = {"client_id": "floor", "hostname": "floor", "feature_negotiation": False, "extend_support": False}
    hello = b"  V2IDENTIFY\n" + sized(json.dumps(identify).encode())
    if mode == "ordered":
        peers = {n: Peer(hello + f"SUB_ORDERED {topic} ch {n}\n".encode() + b"RDY 100\n") for n in partitions}
    else:
        partitions = dict([min(partitions.items())])
        peers = {n: Peer(hello) for n in partitions}
    for number, address in partitions.items():
        await asyncio.get_running_loop().create_connection(partial(_given, peers[number]), *address)
    total = WARM_UP + count
    taken, began, used = 0, 0.0, 0.0

    def took() -> bool:
        nonlocal taken, began, used
        taken += 1
        if taken == WARM_UP:
            began, used = time.perf_counter(), time.process_time()
        return taken < total

    async def consume(peer: Peer) -> None:
        while True:
            frame = await peer.frame(2)
            peer.send(b"FIN " + frame[_ID] + b"\n")
            if not took():
                return

    async def publish(number: int, peer: Peer) -> None:
        command = f"PUB_EXT {topic} {number}\n".encode() + sized(struct.pack(">H", len(_HEADER)) + _HEADER + BODY)
        await peer.frame(0)  # the response to IDENTIFY
        peer.send(command)
        while True:
            await peer.frame(0)
            if not took():
                return
            peer.send(command)

    works = [consume(peer) if mode == "ordered" else publish(number, peer) for number, peer in peers.items()]
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    print(json.dumps({"rate": count / seconds, "cpu": cpu / count * 1e6}))


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
