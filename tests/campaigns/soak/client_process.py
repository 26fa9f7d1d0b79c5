"""A process of producers and consumers: ``python -m tests.campaigns.soak.client_process SETTINGS`` (JSON).

It obeys lines of standard input: ``cut SHARE`` shuts down a share of its connections, ``stop`` ends publishing,
``last`` publishes once more, ``close`` closes the clients. It ends when standard input does.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import anyio
import orjson
from attrs import frozen

from nsqext import BatchFailed, Consumer, Message, MessageBatch, OutgoingMessage, Producer
from tests.campaigns.simulation.history import Delivery
from tests.campaigns.soak.records import Recorder, place

__all__ = ("CONCURRENCY", "CONSUMERS", "PUBLISHERS", "Settings")

KEYS = 3
BATCH = 5
_STEP = 0.05
_WAIT_FOR_ORDER: dict[str, Any] = {"redelivery_wait": 100.0, "gap_wait": 60.0}
"""Longer than every fault, so that lanes never give up their order."""

_KEYED: dict[str, Any] = {"concurrency": 3, "dispatch": "key_failover"}
CONSUMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "handlers": ("plain", "a", {"concurrency": 4}),
    "batches": ("plain", "b", {"concurrency": 2, "max_in_flight": 50}),
    "lanes": ("lanes", "a", {"concurrency": 4, "key": "##key"}),
    "key_failover": ("keyed", "a", _KEYED),
    "ordered": ("ordered", "a", {"concurrency": 2}),
    "tag": ("tagged", "a", {"concurrency": 2, "tag": "blue"}),
    "no tag": ("tagged", "a", {"concurrency": 4}),
}
"""Topic, channel and settings of each kind of consumer; a guest joins and leaves all the time."""
CONCURRENCY: dict[str, int] = {
    kind: settings["concurrency"] * (BATCH if kind == "batches" else 1) for kind, (_, _, settings) in CONSUMERS.items()
}
PUBLISHERS: tuple[str, ...] = ("each", "many", "batcher")


@frozen
class Settings:
    """Settings of a client process.

    Attributes:
        name: of the process, unique in the round.
        round: begins every body.
        seed: of its pauses.
        lookupd: lookup addresses.
        topics: name of each kind of topic on the cluster.
        record: path of its record.
        backend: ``asyncio``, ``asyncio+uvloop`` or ``trio``.
        publish: kinds of topic and publisher, ``lanes/many`` for example.
        consume: kinds of consumers, of `CONSUMERS`; ``guest`` in front of one that joins and leaves.
        pause: longest pause between two publishes of a task, in seconds.
        timeout: of publishes.
        request_timeout: of requests.
        on_unknown: setting of the producers.
        traced: half of the publishes have a trace id.
    """

    name: str
    round: str
    seed: str
    lookupd: list[str]
    topics: dict[str, str]
    record: str
    backend: str
    publish: list[str]
    consume: list[str]
    pause: float
    timeout: float
    request_timeout: float
    on_unknown: Literal["retry", "raise"]
    traced: bool


class HandlerFailed(Exception):
    """What handlers raise now and then."""


def cut_connections(share: float) -> None:
    """Shut down a share of the TCP connections of this process."""
    for path in list(Path("/dev/fd").iterdir()):
        try:
            copy = os.dup(int(path.name))
        except OSError:
            continue  # the descriptor of the listing itself
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock:
            if sock.family == socket.AF_INET and random.random() < share:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it listens, or has ended


class ClientProcess:
    """The clients of the process.

    Args:
        settings: what they are.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings: Settings = settings
        self.recorder: Recorder = Recorder(Path(settings.record))
        self.random: random.Random = random.Random(f"{settings.seed} {settings.name}")
        self.orders: set[str] = set()
        self._numbers = 0

    def obey(self) -> None:
        """Read standard input, in a thread of its own."""
        for line in sys.stdin:
            word, _, value = line.strip().partition(" ")
            if word == "cut":
                cut_connections(float(value))
            else:
                self.orders.add(word)
        os._exit(0)  # the process that started this one has ended

    async def run(self) -> None:
        """Run the clients until the order ``close``."""
        consumers = [self._consumer(kind) for kind in self.settings.consume if not kind.startswith("guest ")]
        guests = [kind.removeprefix("guest ") for kind in self.settings.consume if kind.startswith("guest ")]
        async with anyio.create_task_group() as tasks:
            for consumer in consumers:
                tasks.start_soon(self._consume, consumer)
            for kind in guests:
                tasks.start_soon(self._come_and_go, kind)
            self._announce("ready")
            async with anyio.create_task_group() as publishing:
                for kind in self.settings.publish:
                    topic, publisher = kind.split("/")
                    publishing.start_soon(self._publish, topic, publisher, self._until("stop"))
            await self._wait_for("stop")
            self._announce("stopped")
            await self._wait_for("last")
            for kind in self.settings.publish:
                await self._publish(kind.split("/")[0], "each", 2)
            self._announce("published")
            await self._wait_for("close")
            began = time.monotonic()
            for consumer in consumers:
                consumer.stop()
        self._announce("closed", seconds=time.monotonic() - began)

    def _announce(self, name: str, **values: float) -> None:
        self.recorder.write("phase", name=name, **values)

    def _until(self, order: str) -> Callable[[], bool]:
        return lambda: order not in self.orders

    async def _wait_for(self, order: str) -> None:
        while order not in self.orders:  # noqa: ASYNC110 - a thread reads the orders
            await anyio.sleep(_STEP)

    # --- consumers ------------------------------------------------------------------------------------------------

    def _consumer(self, kind: str) -> Consumer:
        topic, channel, settings = CONSUMERS[kind]
        options: dict[str, Any] = {
            "requeue_delay": 0.05,
            "backoff": "off",
            "max_reconnect_wait": 1.0,
            "request_timeout": self.settings.request_timeout,
            **(_WAIT_FOR_ORDER if kind in ("lanes", "key_failover") else {}),
        }
        name = self.settings.topics[topic]
        consumer = Consumer(name, channel, lookupd=self.settings.lookupd, **options, **settings)
        self._numbers += 1
        label = f"{kind} {self.settings.name}/{self._numbers}"
        if kind == "batches":

            @consumer.batch_handler(max_count=BATCH, max_wait=0.02)
            async def handle_batch(batch: MessageBatch) -> None:
                calls = [call for message in batch if (call := self._begin_delivery(message, topic, channel, label))]
                await self._work(calls)

        else:

            @consumer.handler
            async def handle(message: Message) -> None:
                if call := self._begin_delivery(message, topic, channel, label):
                    await self._work([call])

        return consumer

    def _begin_delivery(self, message: Message, topic: str, channel: str, label: str) -> int:
        """Record a delivery; returns 0 for a message of another round."""
        run, _, key, tag, *_ = message.body.decode().split("|")
        if run != self.settings.round:
            return 0
        if topic in ("lanes", "keyed", "tagged"):
            found = message.key or "", message.tag or "", message.headers.get("h", "")
            if found != (key, tag, "x" * (len(key) % 3)):
                self.recorder.write("violation", text=f"{message.body!r} was delivered with key, tag, header {found}")
            if label.startswith("tag ") and tag != "blue":
                self.recorder.write("violation", text=f"{message.body!r} was delivered to a consumer of tag blue")
        number = int(message.id, 16) if message.partition is None else message.internal_id
        where = topic, channel, label, place(message), number
        return self.recorder.delivery_begins(Delivery(message.body, *where, message.attempts, time.monotonic()))

    async def _work(self, calls: list[int]) -> None:
        outcome: Literal["returned", "raised", "cancelled"] = "cancelled"
        try:
            chance = self.random.random()
            if chance < 0.4:
                await anyio.sleep(self.random.uniform(0.0, 0.02))
            elif chance < 0.405:
                await anyio.sleep(self.random.uniform(0.5, 3.0))
            if self.random.random() < 0.02:
                outcome = "raised"
                raise HandlerFailed
            outcome = "returned"
        finally:
            for call in calls:
                self.recorder.delivery_ends(call, outcome)

    async def _consume(self, consumer: Consumer) -> None:
        try:
            await consumer.serve(signals=False)
        except Exception as error:
            self.recorder.write("violation", text=f"a consumer of {consumer.topics[0]} ended: {error!r}")
        else:
            if "close" not in self.orders:
                self.recorder.write("violation", text=f"a consumer of {consumer.topics[0]} ended without an error")

    async def _come_and_go(self, kind: str) -> None:
        while "stop" not in self.orders:
            await anyio.sleep(self.random.uniform(0.3, 3.0))
            begin = time.monotonic()
            consumer = self._consumer(kind)
            try:
                async with consumer:
                    await anyio.sleep(self.random.uniform(0.1, 2.0))
            except Exception as error:
                self.recorder.write("violation", text=f"a guest on {consumer.topics[0]} failed: {error!r}")
            self.recorder.write("guest", begin=begin, end=time.monotonic())

    # --- publishers -----------------------------------------------------------------------------------------------

    async def _publish(self, topic: str, kind: str, go: Callable[[], bool] | int) -> None:
        """Publish, one task for each key; ``go`` says whether to continue, or is the number of publishes."""
        async with Producer(
            self.settings.lookupd,
            on_unknown=self.settings.on_unknown,
            timeout=self.settings.timeout,
            request_timeout=self.settings.request_timeout,
        ) as producer:
            if kind == "batcher":
                async with producer.batcher(self.settings.topics[topic]) as batcher, anyio.create_task_group() as tasks:
                    for number in range(KEYS):
                        tasks.start_soon(self._publish_each, batcher.publish, topic, f"b{number}", go)
                return
            async with anyio.create_task_group() as tasks:
                if kind == "many":
                    tasks.start_soon(self._publish_many, producer, topic, go)
                    return

                async def publish(message: OutgoingMessage) -> Any:
                    return await producer.publish(
                        self.settings.topics[topic],
                        message.body,
                        headers=message.headers,
                        tag=message.tag,
                        key=message.key,
                        trace_id=message.trace_id,
                    )

                for number in range(KEYS):
                    tasks.start_soon(self._publish_each, publish, topic, f"k{number}", go)

    def _message(self, topic: str, key: str, begin: float) -> OutgoingMessage:
        """Record the begin of a publish, and return its message."""
        by_batcher = key.startswith("b")  # its publish waits for the batch before it, and begins then
        key = "" if topic == "plain" else f"{self.settings.name}-{key}"
        tag = self.random.choice(("", "blue")) if topic == "tagged" else ""
        self._numbers += 1
        body = f"{self.settings.round}|{topic}|{key}|{tag}|{self.settings.name}|{self._numbers}".encode()
        headers = {"h": "x" * (len(key) % 3)} if topic in ("lanes", "keyed", "tagged") and len(key) % 3 else None
        trace_id = self._numbers if self.settings.traced and self.random.random() < 0.5 else None
        self.recorder.publish_begins(body, topic, key, begin, self.settings.timeout if by_batcher else 0.0)
        return OutgoingMessage(body, headers, tag or None, trace_id, key or None)

    async def _publish_each(
        self, publish: Callable[[OutgoingMessage], Awaitable[Any]], topic: str, key: str, go: Callable[[], bool] | int
    ) -> None:
        count = 0
        while count < go if isinstance(go, int) else go():
            count += 1
            message = self._message(topic, key, time.monotonic())
            try:
                result = await publish(message)
            except BaseException as error:
                self.recorder.publish_ends(message.body, error)
                if not isinstance(error, Exception):
                    raise
            else:
                self.recorder.publish_ends(message.body, result)
            await anyio.sleep(self.random.uniform(0.0, self.settings.pause))

    async def _publish_many(self, producer: Producer, topic: str, go: Callable[[], bool] | int) -> None:
        count = 0
        while count < go if isinstance(go, int) else go():
            count += 1
            begin = time.monotonic()
            batch = [self._message(topic, f"m{self.random.randrange(KEYS)}", begin) for _ in range(BATCH)]
            outcomes: list[Any]
            try:
                outcomes = list(await producer.publish_many(self.settings.topics[topic], batch))
            except BatchFailed as error:
                outcomes = list(error.outcomes)
            except Exception as error:
                outcomes = [error] * len(batch)
            for message, outcome in zip(batch, outcomes, strict=True):
                self.recorder.publish_ends(message.body, outcome)
            await anyio.sleep(self.random.uniform(0.0, BATCH * self.settings.pause))


def main() -> None:
    """Run the process."""
    settings = Settings(**orjson.loads(sys.argv[1]))
    form = "%(asctime)s.%(msecs)03d %(name)s %(message)s"
    logging.basicConfig(filename=f"{settings.record}.log", level=logging.WARNING, format=form)
    process = ClientProcess(settings)
    threading.Thread(target=process.obey, daemon=True).start()
    backend, _, loop = settings.backend.partition("+")
    options = {"use_uvloop": loop == "uvloop"} if backend == "asyncio" else {}
    anyio.run(process.run, backend=backend, backend_options=options)


if __name__ == "__main__":
    main()
