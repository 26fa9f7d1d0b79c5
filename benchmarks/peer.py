"""One client, one kind of work, one process; prints the costs as JSON.

``python -m benchmarks.peer CLIENT MODE COUNT ADDRESS TOPIC [size=200] [topics=1] [connections=1] [handlers=1]
[threads=1] [tls=0]``. Clients: nsqext, blocking (nsqext.sync), uvloop (nsqext on it), asyncnsq, pynsq, gnsq (gevent),
and raw: a blocking socket without parsing, which is the floor; go-nsq is a program (`benchmarks/go_peer`). Modes:
pub (one in flight on each connection), pubc (64 in flight), mpub (batches of 100, or of 4 MB), sub (a handler that does
nothing, messages acknowledged), for nsqext headersN (one in flight, N headers) and mix (256 in flight, bodies of 100
bytes and twice ``size`` in turn), timeout (sub with `HandlerTimeout`) and result (a handler of an app whose result is
published), for blocking iterate and pubt (one in flight in each of ``threads``). With ``tls=1`` the connection is
encrypted, and the certificate is not checked. Messages alternate between the topics. CPU is user and system time of
this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, NoReturn

BODY = b"x" * 200
CONCURRENT = 64
MIXED = 256
SMALL = b"x" * 100
BATCH = 100
BATCH_BYTES = 4_000_000  # servers accept 5 MiB
MAX_IN_FLIGHT = 200
CHANNEL = "ch"
Publish = Callable[..., Awaitable[Any]]


class Work:
    """Work of a process, from its command line.

    Attributes:
        topics: names of the topics.
        body: the body of each message.
        batch: messages of a batch.
    """

    def __init__(self, client: str, mode: str, count: str, address: str, topic: str, *more: str) -> None:
        numbers = {name: int(value) for name, _, value in (word.partition("=") for word in more)}
        self.client: str = client
        self.mode: str = mode
        self.count: int = int(count)
        self.address: str = address
        self.topics: list[str] = topic_names(topic, numbers.get("topics", 1))
        self.body: bytes = b"x" * numbers.get("size", len(BODY))
        self.batch: int = max(1, min(BATCH, BATCH_BYTES // len(self.body)))
        self.connections: int = numbers.get("connections", 1)
        self.handlers: int = numbers.get("handlers", 1)
        self.threads: int = numbers.get("threads", 1)
        self.tls: ssl.SSLContext | None = unchecked_tls() if numbers.get("tls") else None
        self.taken = 0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """Start both clocks."""
        self._began = (time.perf_counter(), time.process_time())

    def done(self) -> NoReturn:
        """Print the result and exit immediately."""
        seconds, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        print(json.dumps({"rate": self.count / seconds, "cpu": cpu / self.count * 1e6}), flush=True)
        os._exit(0)

    def take(self) -> bool:
        """Count a message; the first one starts the clocks. Return whether it was the last."""
        if self.taken == 0:
            self.begin()
        self.taken += 1
        return self.taken >= self.count


def unchecked_tls() -> ssl.SSLContext:
    """Return settings of TLS that accept any certificate, as those of the Go peer do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def topic_names(topic: str, count: int) -> list[str]:
    """Return the names of a number of topics."""
    return [topic] if count == 1 else [f"{topic}_{number}" for number in range(count)]


async def drive(work: Work, publishes: Sequence[Publish], publish_many: Publish) -> NoReturn:
    """Publish according to the mode, with one publish function per connection."""

    async def some(publish: Publish, count: int) -> None:
        topics, body = cycle(work.topics), work.body
        for _ in range(count):
            await publish(next(topics), body)

    work.begin()
    if work.mode == "mpub":
        batch = [work.body] * work.batch
        for _ in range(work.count // work.batch):
            await publish_many(work.topics[0], batch)
    elif work.mode == "mix":
        bodies = cycle((SMALL, work.body * 2))

        async def mixed(count: int) -> None:
            for _ in range(count):
                await publishes[0](work.topics[0], next(bodies))

        await asyncio.gather(*[mixed(work.count // MIXED) for _ in range(MIXED)])
    elif work.mode == "pubc" or len(publishes) > 1:
        tasks = publishes if len(publishes) > 1 else [publishes[0]] * CONCURRENT
        await asyncio.gather(*[some(publish, work.count // len(tasks)) for publish in tasks])
    else:
        await some(publishes[0], work.count)
    work.done()


async def run_nsqext(work: Work) -> None:
    """Run this package; an address with a scheme is that of lookup."""
    import nsqext

    address = work.address
    where: dict[str, Any] = {"lookupd": address[7:]} if address.startswith("http://") else {"nsqd": address}
    if work.tls is not None:
        where["tls"] = work.tls
    if work.mode == "result":
        await publish_results(work, where)
        return
    if work.mode in ("sub", "timeout"):
        options: dict[str, Any] = {"concurrency": work.handlers} if work.handlers > 1 else {}
        if work.mode == "timeout":
            from nsqext.middleware import HandlerTimeout

            options["middleware"] = [HandlerTimeout(10)]
        consumer = nsqext.Consumer(
            work.topics[0], CHANNEL, max_in_flight=max(MAX_IN_FLIGHT, work.handlers), **options, **where
        )

        @consumer.handler
        async def handle(_: nsqext.Message) -> None:
            if work.take():
                work.done()

        await consumer.serve()
        return
    extra: dict[str, Any] = {}
    if work.mode.startswith("headers"):
        extra = {"headers": {f"name-{number}": f"value {number}" for number in range(int(work.mode[7:]))}}
    producers = [await nsqext.Producer(**where).start() for _ in range(work.connections)]
    for producer in producers:
        for topic in work.topics:
            await producer.publish(topic, work.body, **extra)
    publishes: list[Publish] = [producer.publish for producer in producers]
    if extra:
        publishes = [lambda topic, body: producers[0].publish(topic, body, **extra)]
    await drive(work, publishes, producers[0].publish_many)


async def publish_results(work: Work, where: dict[str, Any]) -> None:
    """Run a handler of an app, and publish each of its results."""
    import nsqext

    app = nsqext.App(**where)

    async def handle(message: nsqext.Message) -> bytes:
        if work.take():
            work.done()
        return message.body

    published = app.publisher(f"{work.topics[0]}_results#ephemeral")(handle)
    app.handler(work.topics[0], CHANNEL, max_in_flight=MAX_IN_FLIGHT)(published)
    await app.serve(signals=False)


def run_blocking(work: Work) -> None:
    """Run the blocking client of this package."""
    from nsqext import sync

    if work.mode in ("pub", "pubt", "mpub"):
        with sync.Producer(nsqd=work.address) as producer:

            def publish(count: int) -> None:
                for _ in range(count):
                    producer.publish(work.topics[0], work.body)

            publish(10)
            time.sleep(0.1)  # it opens a connection of its own
            work.begin()
            if work.mode == "mpub":
                batch = [work.body] * work.batch
                for _ in range(work.count // work.batch):
                    producer.publish_many(work.topics[0], batch)
            elif work.threads == 1:
                publish(work.count)
            else:
                with ThreadPoolExecutor(work.threads) as threads:
                    list(threads.map(publish, [work.count // work.threads] * work.threads))
            work.done()
    consumer = sync.Consumer(work.topics[0], CHANNEL, nsqd=work.address, max_in_flight=MAX_IN_FLIGHT)
    if work.mode == "iterate":
        with consumer:
            for message in consumer:
                message.finish()
                if work.take():
                    work.done()

    @consumer.handler
    def handle(_: sync.Message) -> None:
        if work.take():
            work.done()

    consumer.run()


async def run_asyncnsq(work: Work) -> None:
    """Run asyncnsq, the fastest of the other clients for Python."""
    import asyncnsq

    host, _, port = work.address.rpartition(":")
    if work.mode == "sub":
        reader = await asyncnsq.create_reader(nsqd_tcp_addresses=[work.address], max_in_flight=MAX_IN_FLIGHT)
        await reader.subscribe(work.topics[0], CHANNEL)
        async for message in reader.messages():
            last = work.take()
            await message.fin()
            if last:
                work.done()
        return
    writers = [await asyncnsq.create_writer(host=host, port=int(port)) for _ in range(work.connections)]
    for topic in work.topics:
        await writers[0].pub(topic, work.body)
    await drive(work, [writer.pub for writer in writers], lambda topic, bodies: writers[0].mpub(topic, *bodies))


def run_pynsq(work: Work) -> None:
    """Run pynsq, the official client for Python, on tornado."""
    import logging

    import nsq
    from tornado.ioloop import IOLoop

    logging.disable(logging.CRITICAL)
    if work.mode == "sub":

        def handle(_: Any) -> bool:
            if work.take():
                IOLoop.current().call_later(0, work.done)
            return True

        nsq.Reader(work.topics[0], CHANNEL, handle, nsqd_tcp_addresses=[work.address], max_in_flight=MAX_IN_FLIGHT)
        nsq.run()
        return
    writers = [nsq.Writer([work.address]) for _ in range(work.connections)]
    batch, size = [work.body] * work.batch, work.batch if work.mode == "mpub" else 1
    topics = cycle(work.topics)
    sent = acknowledged = 0

    def publish(writer: Any) -> None:
        nonlocal sent
        sent += size

        def answered(_: Any, data: bytes) -> None:
            nonlocal acknowledged
            if data != b"OK":
                raise SystemExit(f"pynsq: {data!r}")
            acknowledged += size
            if acknowledged >= work.count:
                work.done()
            if sent < work.count:
                publish(writer)

        if work.mode == "mpub":
            writer.mpub(work.topics[0], batch, callback=answered)
        else:
            writer.pub(next(topics), work.body, callback=answered)

    def start() -> None:
        work.begin()
        for writer in writers:
            for _ in range(CONCURRENT if work.mode == "pubc" else 1):
                publish(writer)

    IOLoop.current().call_later(1, start)
    nsq.run()


def run_gnsq(work: Work) -> None:
    """Run gnsq, a blocking client for gevent."""
    import gevent
    import gnsq

    if work.mode == "sub":
        consumer = gnsq.Consumer(work.topics[0], CHANNEL, [work.address], max_in_flight=MAX_IN_FLIGHT)

        @consumer.on_message.connect  # type: ignore[untyped-decorator]
        def handle(_: Any, message: Any) -> None:  # by name
            if work.take():
                gevent.spawn_later(0, work.done)  # its response is sent before

        consumer.start()
        return
    producer = gnsq.Producer([work.address])
    producer.start()
    producer.publish(work.topics[0], work.body)
    work.begin()
    if work.mode == "mpub":
        for _ in range(work.count // work.batch):
            producer.multipublish(work.topics[0], [work.body] * work.batch)
        work.done()

    def some(count: int) -> None:
        topics = cycle(work.topics)
        for _ in range(count):
            producer.publish(next(topics), work.body)

    tasks = CONCURRENT if work.mode == "pubc" else 1
    gevent.joinall([gevent.spawn(some, work.count // tasks) for _ in range(tasks)])
    work.done()


class RawSocket:
    """A minimal connection to nsqd."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(b"  V2")
        if tls is not None:
            asked = json.dumps({"feature_negotiation": True, "tls_v1": True}).encode()
            self.sock.sendall(b"IDENTIFY\n" + struct.pack(">i", len(asked)) + asked)
            (size,) = struct.unpack(">i", self.sock.recv(4))
            self.sock.recv(size, socket.MSG_WAITALL)
            self.sock = tls.wrap_socket(self.sock)
        self._file = self.sock.makefile("rb", 1 << 16)
        if tls is not None:
            self.frame()  # OK

    def frame(self) -> tuple[int, bytes]:
        """Return the kind and the data of the next frame."""
        size, kind = struct.unpack(">ii", self._file.read(8))
        data = self._file.read(size - 4)
        if kind == 1:
            raise SystemExit(f"the server refuses: {data!r}")
        return kind, data


def run_raw(work: Work) -> None:
    """Run blocking sockets; with several, send on all of them before reading."""
    peers = [RawSocket(work.address, work.tls) for _ in range(work.connections)]
    if work.mode in ("sub", "iterate"):
        consume_raw(work, peers[0])
    sized = struct.pack(">i", len(work.body)) + work.body
    if work.mode == "mpub":
        items = struct.pack(">i", work.batch) + sized * work.batch
        head = b"MPUB %s\n%s" % (work.topics[0].encode(), struct.pack(">i", len(items)))
        chunks, answers, each = [head + items], 1, work.batch
    else:
        answers = CONCURRENT if work.mode == "pubc" else 1
        chunks, each = [(b"PUB %s\n" % topic.encode() + sized) * answers for topic in work.topics], answers
    chunk = cycle(chunks)
    work.begin()
    for _ in range(work.count // each // len(peers)):
        for peer in peers:
            peer.sock.sendall(next(chunk))
        for peer in peers:
            for _ in range(answers):
                peer.frame()
    work.done()


def consume_raw(work: Work, peer: RawSocket) -> NoReturn:
    """Consume, and acknowledge in groups of 20."""
    peer.sock.sendall(b"SUB %s %s\nRDY %d\n" % (work.topics[0].encode(), CHANNEL.encode(), MAX_IN_FLIGHT))
    finished: list[bytes] = []
    while True:
        kind, data = peer.frame()
        if kind != 2:
            continue
        last = work.take()
        finished.append(b"FIN " + data[10:26] + b"\n")
        if last or len(finished) >= 20:
            peer.sock.sendall(b"".join(finished))
            finished.clear()
        if last:
            work.done()


def main(work: Work) -> None:
    """Do the work."""
    if work.client == "pynsq":
        run_pynsq(work)
    elif work.client == "gnsq":
        run_gnsq(work)
    elif work.client == "raw":
        run_raw(work)
    elif work.client == "blocking":
        run_blocking(work)
    elif work.client == "uvloop":
        import uvloop

        uvloop.run(run_nsqext(work))
    else:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # asyncnsq requests it
        loop.run_until_complete(run_nsqext(work) if work.client == "nsqext" else run_asyncnsq(work))


if __name__ == "__main__":
    main(Work(*sys.argv[1:]))
