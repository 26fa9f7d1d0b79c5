"""Cancellation at every await, one by one: pool and routes stay consistent, and no stored message is lost."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from nsqext import (
    Consumer,
    Lookup,
    LookupSettings,
    NsqError,
    OutgoingMessage,
    Position,
    Producer,
    ProducerSettings,
    Receipt,
)
from nsqext.errors import InvalidState
from tests.support.cancellation import Step, sweep
from tests.support.consumers import eventually, opened, quick_sharing, take
from tests.support.consumers import publish as publish_over_http
from tests.support.fake_nsqd import error, message, obey, ok, scripted_lookup, scripted_node, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nsqext.broker import Cluster
    from nsqext.client.producer.batcher import Batcher
    from nsqext.protocol.server.command_parser import Command
    from tests.support.fake_nsqd import Peer, ScriptedLookup, ScriptedNode

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

_LOOKUP: LookupSettings = {"lookup_max_pause": 0.05}
_OWN: ProducerSettings = {"timeout": 50, "retry_wait": 0.001, "close_timeout": 20}
_SETTINGS: ProducerSettings = {**_OWN, "lookup_max_pause": 0.05}


class Broker:
    """A lookup node and a node that leads two partitions, and counts the connections to it."""

    def __init__(self, lookup: ScriptedLookup, node: ScriptedNode) -> None:
        self.lookup = str(lookup)
        self.node = node
        self.partitions = 1
        self._lookup = lookup
        self.move()
        self.serving = 0

    def bodies(self) -> list[bytes]:
        """Bodies published since `forget`."""
        return [body for command in self.node.commands for body in _bodies(command)]

    def count(self, verb: bytes) -> int:
        """Number of these commands received since `forget`."""
        return sum(command.words[0] == verb for command in self.node.commands)

    def move(self) -> None:
        """Change the response of lookup."""
        self.partitions = 3 - self.partitions
        self._lookup.set_leaders(dict.fromkeys(range(self.partitions), self.node), num=self.partitions)

    def forget(self) -> None:
        """Reset the records."""
        self.node.peers.clear()


def _bodies(command: Command) -> list[bytes]:
    if command.words[0] == b"PUB":
        return [command.body or b""]
    if command.words[0] != b"MPUB":
        return []
    left, found = (command.body or b"")[4:], []
    while left:
        size = int.from_bytes(left[:4], "big")
        found.append(left[4 : 4 + size])
        left = left[4 + size :]
    return found


@asynccontextmanager
async def _broker(**answers: object) -> AsyncIterator[Broker]:
    script = obey(answers)  # type: ignore[arg-type]

    async def counted(peer: Peer) -> None:
        broker.serving += 1
        try:
            await script(peer)
        finally:
            broker.serving -= 1

    async with scripted_lookup() as lookup, scripted_node(counted) as node:
        broker = Broker(lookup, node)
        await anyio.wait_all_tasks_blocked()
        yield broker


def _all_given_back(producer: Producer, lookup: Lookup | None = None) -> None:
    assert (producer.statistics().pending, producer.statistics().connections) == (0, 0)
    if lookup is not None:
        assert not lookup.metadata.users
        assert lookup.metadata.cached("t", "w") is None, "it is not watched"


class Published:
    """Publishes while a producer closes, and records the outcome of each message."""

    def __init__(self) -> None:
        self.receipts: dict[bytes, Receipt] = {}
        self.errors: dict[bytes, NsqError] = {}

    async def one(self, producer: Producer, body: bytes, key: str | None) -> None:
        """Publish a message."""
        try:
            self.receipts[body] = await producer.publish("t", body, key=key)
        except NsqError as error:
            self.errors[body] = error


async def test_closing_a_producer() -> None:
    async def once(step: Step) -> None:
        broker.forget()
        lookup = Lookup(broker.lookup, **_LOOKUP)
        published = Published()
        async with create_task_group() as tasks:
            with step.scope:
                producer = await Producer(lookup, **_OWN).__aenter__()
                batcher = await producer.batcher("t", linger=10).__aenter__()
                for number in range(4):
                    tasks.start_soon(published.one, producer, b"%d" % number, "k" if number % 2 else None)
                    await batcher.add(b"b%d" % number)
                await checkpoint()
                close = producer._close
                producer._tasks._close = lambda: lambda: step.watch(close())
                await producer.aclose()  # its caller is cancelled at the n-th await of the close
        assert len(published.receipts) + len(published.errors) == 4
        _all_given_back(producer, lookup)
        await eventually(lambda: not broker.serving)
        stored = set(broker.bodies())
        assert published.receipts.keys() <= stored
        failed = {entry for entry, _ in batcher.take_failed()}
        assert {b"b%d" % number for number in range(4)} <= stored | failed
        with pytest.raises(InvalidState):
            await producer.publish("t", b"x")

    async with _broker() as broker:
        assert await sweep(once) >= 3


async def test_opening_publishing_and_closing() -> None:
    async def once(step: Step) -> None:
        broker.forget()
        lookup = Lookup(broker.lookup, **_LOOKUP)
        producer = Producer(lookup, **_OWN)
        receipts: list[Receipt] = []

        async def use() -> None:
            async with producer:
                receipts.append(await producer.publish("t", b"1"))
                receipts.append(await producer.publish("t", b"2", key="k"))
                receipts.extend(await producer.publish_many("t", [b"3", b"4"], key="k"))

        await step.run(use())
        _all_given_back(producer, lookup)
        await eventually(lambda: not broker.serving)
        assert broker.bodies()[: len(receipts)] == [b"1", b"2", b"3", b"4"][: len(receipts)]

    async with _broker() as broker:
        assert await sweep(once) >= 5


class Reluctant:
    """Refuses every command once."""

    def __init__(self) -> None:
        self.seen: set[bytes | None] = set()

    def __call__(self, command: Command) -> bytes:
        """Return the response to a command."""
        if command.body in self.seen:
            return ok()
        self.seen.add(command.body)
        return error("E_FAILED_ON_NOT_LEADER")


@pytest.mark.parametrize("kind", ["plain", "keyed", "pinned", "many"])
async def test_publishing_that_is_tried_again(kind: str) -> None:
    async def publish(producer: Producer, body: bytes) -> None:
        if kind == "many":
            await producer.publish_many("t", [OutgoingMessage(body, key="k"), OutgoingMessage(body, key="k")])
        elif kind == "pinned":
            await producer.publish("t", body, partition=1)
        else:
            await producer.publish("t", body, key="k" if kind == "keyed" else None)

    async def once(step: Step) -> None:
        broker.forget()
        reluctant.seen.clear()
        async with Producer(broker.lookup, **_SETTINGS) as producer:
            if step.number % 2:
                await publish(producer, b"before")  # connects
            await step.run(publish(producer, b"perhaps"))
            await publish(producer, b"after")
            stored = broker.bodies()
            assert stored.count(b"after") == (4 if kind == "many" else 2)
            if not step.reached:
                assert stored.count(b"perhaps") == (4 if kind == "many" else 2)
            await until(lambda: not producer.statistics().pending)
        _all_given_back(producer)

    reluctant = Reluctant()
    async with _broker(PUB=reluctant, MPUB=reluctant) as broker:
        # a plain message is retried on the other partition without a pause: it awaits only its two responses
        assert await sweep(once) >= (2 if kind == "plain" else 3)


@pytest.mark.parametrize("kind", ["flush", "leave", "add", "publish"])
async def test_a_batcher(kind: str) -> None:
    async def act(batcher: Batcher, taken: list[bytes]) -> None:
        if kind == "flush":
            await batcher.flush()
        elif kind == "leave":
            await batcher.__aexit__(None, None, None)
        elif kind == "add":
            for body in (b"a", b"b", b"c", b"d"):
                await batcher.add(body)
                taken.append(body)
        else:
            await batcher.publish(b"p")
            taken.append(b"p")

    async def once(step: Step) -> None:
        broker.forget()
        async with Producer(broker.lookup, **_SETTINGS) as producer:
            batcher = await producer.batcher("t", linger=0.001, max_count=2, max_pending=4).__aenter__()
            taken = [b"1", b"2", b"3"]
            for body in taken:
                await batcher.add(body)
            await step.run(act(batcher, taken))
            if kind != "leave":
                await batcher.add(b"after")
                taken.append(b"after")
                await batcher.flush()
                assert batcher.pending == 0
        assert batcher.pending == 0
        assert not batcher.take_failed()
        stored = broker.bodies()
        # a cancelled message is absent, or at its position
        assert [body for body in stored if body in taken] == taken
        _all_given_back(producer)

    async with _broker() as broker:
        assert await sweep(once) >= 1


def _deliver(command: Command) -> bytes | None:
    return b"".join(map(message, range(1, 7))) if command.words[1] not in (b"0", b"1") else None


async def test_closing_a_consumer() -> None:
    async def once(step: Step) -> None:
        broker.forget()
        lookup = Lookup(broker.lookup, **_LOOKUP)
        consumer = Consumer("t", "ch", lookupd=lookup, max_in_flight=6, **quick_sharing(partitions=(0,)))
        finished = 0
        with step.scope:
            await consumer.__aenter__()
            async for one in consumer:
                if finished == 3:
                    break
                await one.finish()
                finished += 1
            await step.watch(consumer.__aexit__(None, None, None))
        await eventually(lambda: not broker.serving)
        assert broker.count(b"FIN") == finished
        assert not lookup.metadata.users
        assert lookup.metadata.cached("t", "r") is None, "it is not watched"
        assert consumer.connections == ()
        # its user still holds it, and receives the error
        assert one.expired

    async with _broker(RDY=_deliver, CLS=ok(b"CLOSE_WAIT")) as broker:
        assert await sweep(once) >= 1


async def test_running_a_consumer() -> None:
    async def once(step: Step) -> None:
        broker.forget()
        lookup = Lookup(broker.lookup, **_LOOKUP)
        options = quick_sharing(partitions=(0,), close_timeout=0.5)
        consumer = Consumer("t", "ch", lookupd=lookup, max_in_flight=6, concurrency=2, **options)
        handled: list[int] = []

        @consumer.handler
        async def handle(message: object) -> None:
            await checkpoint()
            handled.append(1)
            if len(handled) == 6:
                consumer.stop()

        await step.run(consumer.serve(signals=False))
        await eventually(lambda: not broker.serving)
        assert broker.count(b"FIN") == len(handled)
        assert not lookup.metadata.users
        assert consumer.connections == ()

    async with _broker(RDY=_deliver, CLS=ok(b"CLOSE_WAIT")) as broker:
        assert await sweep(once) >= 4


async def test_seeking(cluster: Cluster, topic: str) -> None:
    bodies = [b"1", b"2", b"3"]
    for partition in (0, 1):
        publish_over_http(cluster, topic, *bodies, partition=partition)

    async def once(step: Step) -> None:
        async with opened(topic, cluster) as consumer:
            await take(consumer, 6)
            await step.run(consumer.seek(Position.earliest()))
            # both partitions start again, without waiting for an event of their connections
            assert sorted(await take(consumer, 6)) == sorted(bodies * 2)
            await consumer.seek(Position.earliest())

    assert await sweep(once) >= 2
