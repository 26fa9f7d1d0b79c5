"""One client, one kind of work, one process; prints what it cost as JSON.

``python -m benchmarks.peer CLIENT MODE COUNT ADDRESS TOPIC``. Clients: nsqext, asyncnsq, pynsq, and raw: a blocking
socket without parsing, which is the floor. Modes: pub (one in flight), pubc (64 in flight), mpub (batches of 100), sub
(a handler that does nothing, messages acknowledged), and for nsqext trace and ext (as pub, with a trace id, with two
headers). CPU is this process's, user and system.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

BODY = b"x" * 200
BATCH = [BODY] * 100
CONCURRENT = 64
MAX_IN_FLIGHT = 200
CHANNEL = "ch"
EXTRAS: dict[str, dict[str, Any]] = {"trace": {"trace_id": 7}, "ext": {"headers": {"user": "42", "kind": "a"}}}

Publish = Callable[..., Awaitable[Any]]


class Meter:
    """Measures from `begin` to `done`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """Start both clocks."""
        self._began = (time.perf_counter(), time.process_time())

    def done(self) -> NoReturn:
        """Print the result and end the process, whatever is still open."""
        seconds, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        print(json.dumps({"rate": self.count / seconds, "cpu": cpu / self.count * 1e6}), flush=True)
        os._exit(0)

    def take(self) -> bool:
        """Count a message; the first one starts the clocks. Returns whether it was the last."""
        if self.taken == 0:
            self.begin()
        self.taken += 1
        return self.taken >= self.count


async def drive(meter: Meter, mode: str, publish: Publish, publish_many: Publish) -> NoReturn:
    """Publish as the mode says."""

    async def some(count: int) -> None:
        for _ in range(count):
            await publish(BODY)

    meter.begin()
    if mode == "mpub":
        for _ in range(meter.count // len(BATCH)):
            await publish_many(BATCH)
    elif mode == "pubc":
        await asyncio.gather(*[some(meter.count // CONCURRENT) for _ in range(CONCURRENT)])
    else:
        await some(meter.count)
    meter.done()


async def run_nsqext(meter: Meter, mode: str, address: str, topic: str) -> None:
    """This package; an address with a scheme names lookup."""
    import nsqext

    where: dict[str, Any] = {"lookupd": address[7:]} if address.startswith("http://") else {"nsqd": address}
    if mode == "sub":
        consumer = nsqext.Consumer(topic, CHANNEL, max_in_flight=MAX_IN_FLIGHT, **where)

        @consumer.handler
        async def handle(_: nsqext.Message) -> None:
            if meter.take():
                meter.done()

        await consumer.run()
        return
    async with nsqext.Producer(**where) as producer:
        extra = EXTRAS.get(mode, {})
        await producer.publish(topic, BODY, **extra)
        if extra:
            await drive(meter, mode, lambda body: producer.publish(topic, body, **extra), producer.publish_many)
        await drive(
            meter, mode, lambda body: producer.publish(topic, body), lambda bodies: producer.publish_many(topic, bodies)
        )


async def run_asyncnsq(meter: Meter, mode: str, address: str, topic: str) -> None:
    """The quickest of the others."""
    import asyncnsq

    host, _, port = address.rpartition(":")
    if mode == "sub":
        reader = await asyncnsq.create_reader(nsqd_tcp_addresses=[address], max_in_flight=MAX_IN_FLIGHT)
        await reader.subscribe(topic, CHANNEL)
        async for message in reader.messages():
            last = meter.take()
            await message.fin()
            if last:
                meter.done()
        return
    writer = await asyncnsq.create_writer(host=host, port=int(port))
    await drive(meter, mode, lambda body: writer.pub(topic, body), lambda bodies: writer.mpub(topic, *bodies))


def run_pynsq(meter: Meter, mode: str, address: str, topic: str) -> None:
    """The official client for Python, on tornado."""
    import logging

    import nsq
    from tornado.ioloop import IOLoop

    logging.disable(logging.CRITICAL)
    if mode == "sub":

        def handle(_: Any) -> bool:
            if meter.take():
                IOLoop.current().call_later(0, meter.done)
            return True

        nsq.Reader(topic, CHANNEL, handle, nsqd_tcp_addresses=[address], max_in_flight=MAX_IN_FLIGHT)
        nsq.run()
        return
    writer, size = nsq.Writer([address]), len(BATCH) if mode == "mpub" else 1
    sent = acknowledged = 0

    def answered(_: Any, data: bytes) -> None:
        nonlocal acknowledged
        if data != b"OK":
            raise SystemExit(f"pynsq: {data!r}")
        acknowledged += size
        if acknowledged >= meter.count:
            meter.done()
        if sent < meter.count:
            publish()

    def publish() -> None:
        nonlocal sent
        sent += size
        if mode == "mpub":
            writer.mpub(topic, BATCH, callback=answered)
        else:
            writer.pub(topic, BODY, callback=answered)

    def start() -> None:
        meter.begin()
        for _ in range(CONCURRENT if mode == "pubc" else 1):
            publish()

    IOLoop.current().call_later(1, start)
    nsq.run()


def run_raw(meter: Meter, mode: str, address: str, topic: str) -> None:
    """A blocking socket that does no more than it must."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"  V2")
    file = sock.makefile("rb", 1 << 16)

    def frame() -> tuple[int, bytes]:
        size, kind = struct.unpack(">ii", file.read(8))
        data = file.read(size - 4)
        if kind == 1:
            raise SystemExit(f"the server refuses: {data!r}")
        return kind, data

    sized = struct.pack(">i", len(BODY)) + BODY
    if mode == "sub":
        sock.sendall(b"SUB %s %s\nRDY %d\n" % (topic.encode(), CHANNEL.encode(), MAX_IN_FLIGHT))
        finished: list[bytes] = []
        while True:
            kind, data = frame()
            if kind != 2:
                continue
            last = meter.take()
            finished.append(b"FIN " + data[10:26] + b"\n")
            if last or len(finished) >= 20:
                sock.sendall(b"".join(finished))
                finished.clear()
            if last:
                meter.done()
    if mode == "mpub":
        items = struct.pack(">i", len(BATCH)) + sized * len(BATCH)
        chunk, answers, each = b"MPUB %s\n%s%s" % (topic.encode(), struct.pack(">i", len(items)), items), 1, len(BATCH)
    else:
        answers = each = CONCURRENT if mode == "pubc" else 1
        chunk = (b"PUB %s\n" % topic.encode() + sized) * answers
    meter.begin()
    for _ in range(meter.count // each):
        sock.sendall(chunk)
        for _ in range(answers):
            frame()
    meter.done()


def main(client: str, mode: str, count: str, address: str, topic: str) -> None:
    """Run what the command line asks for."""
    meter = Meter(int(count))
    if client == "pynsq":
        run_pynsq(meter, mode, address, topic)
    elif client == "raw":
        run_raw(meter, mode, address, topic)
    else:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # asyncnsq asks for it
        run = run_nsqext if client == "nsqext" else run_asyncnsq
        loop.run_until_complete(run(meter, mode, address, topic))


if __name__ == "__main__":
    main(*sys.argv[1:])
