"""Consume while the consumer's connections are cut at random, and record the calls of its handlers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import anyio
from anyio import create_task_group

from nsqext import Consumer, ConsumerSettings, Message, OutgoingMessage, Producer
from nsqext.client.consumer.subscriptions import partition_reader
from nsqext.transport.handshake import open_connection
from nsqext.types import Address
from tests.support.consumers import eventually
from tests.support.tcp_relay import Relay, relaying

if TYPE_CHECKING:
    import pytest
    from anyio.abc import TaskGroup

__all__ = ("Faults", "LossyConsumers", "backward_steps", "lossy", "numbered", "relayed_connections")

PATIENCE = 90.0


def lossy(**settings: Unpack[ConsumerSettings]) -> dict[str, Any]:
    """Return settings that reconnect quickly and requeue failed messages soon."""
    return {
        "reconnect_wait": 0.01,
        "max_reconnect_wait": 0.1,
        "requeue_delay": 0.02,
        "backoff": "off",
        **settings,
    }


class Faults(Protocol):
    """Cuts connections while messages are in flight."""

    def cut(self, rng: random.Random) -> None:
        """Cut some connections."""


class RelayedConnections:
    """Relays between consumers and nodes.

    Args:
        tasks: task group of the relays.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._relays: dict[Address, Relay] = {}

    async def relay_of(self, node: Address) -> Address:
        """Return the address of the relay to a node."""
        if node not in self._relays:
            ready = anyio.Event()
            self._tasks.start_soon(self._run, node, ready)
            await ready.wait()
        host, _, port = self._relays[node].address.rpartition(":")
        return Address(host, int(port))

    async def _run(self, node: Address, ready: anyio.Event) -> None:
        async with relaying(str(node)) as relay:
            self._relays[node] = relay
            ready.set()
            await anyio.sleep_forever()

    def cut(self, rng: random.Random) -> None:
        """Cut the connections to one node."""
        rng.choice(list(self._relays.values())).cut()


@asynccontextmanager
async def relayed_connections(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RelayedConnections]:
    """Connect consumers through relays."""
    async with create_task_group() as tasks:
        relays = RelayedConnections(tasks)

        async def open_relayed(address: Address, *rest: Any) -> Any:
            return await open_connection(await relays.relay_of(address), *rest)

        monkeypatch.setattr(partition_reader, "open_connection", open_relayed)
        yield relays
        monkeypatch.undo()
        tasks.cancel_scope.cancel()


def backward_steps(seen: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Return key, number and larger number for each number that was seen after a larger one of its key."""
    last: dict[str, int] = {}
    wrong = []
    for key, number in seen:
        if number < last.get(key, -1):
            wrong.append((key, number, last[key]))
        last[key] = max(number, last.get(key, -1))
    return wrong


class LossyConsumers:
    """Consumers of one channel whose connections are cut while messages are in flight.

    Args:
        consumers: the consumers; `run` opens them.
        seed: seed of the handlers and the cuts.
        failures: share of calls in which the handler raises.
        cuts: number of cuts.

    Attributes:
        begun: name of the order and number of the message, for each call of a handler.
        done: the same, for each call that returned.
    """

    def __init__(self, consumers: Sequence[Consumer], seed: int, *, failures: float = 0.05, cuts: int = 8) -> None:
        self.begun: list[tuple[str, int]] = []
        self.done: list[tuple[str, int]] = []
        self._consumers = consumers
        self._failures = failures
        self._cuts = cuts
        self._rng = random.Random(seed)
        for consumer in consumers:
            consumer.handler(self._handle)

    async def _handle(self, message: Message) -> None:
        name, _, number = message.body.decode().partition(":")
        self.begun.append((name, int(number)))
        await anyio.sleep(self._rng.choice([0.0, 0.001, 0.01]))
        if self._rng.random() < self._failures:
            raise OSError("try again")
        self.done.append((name, int(number)))

    async def run(
        self,
        faults: Faults,
        producer: Producer,
        topic: str,
        messages: Mapping[int | None, Sequence[bytes | OutgoingMessage]],
    ) -> None:
        """Publish messages to their partitions, and consume until each has been handled.

        Args:
            faults: cuts connections at random until then.
            producer: the producer.
            topic: name of the topic.
            messages: messages by partition; None for the original NSQ.
        """
        wanted = sum(map(len, messages.values()))
        async with create_task_group() as tasks:
            for consumer in self._consumers:
                tasks.start_soon(lambda consumer: consumer.serve(signals=False), consumer)
            with anyio.fail_after(PATIENCE):
                await eventually(
                    lambda: all(len(consumer.connections) == len(messages) for consumer in self._consumers)
                )
                tasks.start_soon(self._publish, producer, topic, messages)
                # the order holds from the first message that was received from a partition
                await eventually(
                    lambda: len({name.partition("/")[0] for name, _ in self.begun}) == len(messages), PATIENCE
                )
                for done in sorted(self._rng.sample(range(1, wanted), self._cuts)):
                    await eventually(lambda done=done: len(set(self.done)) >= done, PATIENCE)  # type: ignore[misc]
                    faults.cut(self._rng)
                await eventually(lambda: len(set(self.done)) == wanted, PATIENCE)
                # the consumer may still be connecting again
                await eventually(lambda: self._reconnects > 0, PATIENCE)
            for consumer in self._consumers:
                consumer.stop()

    @property
    def _reconnects(self) -> int:
        return sum(consumer.statistics().reconnects for consumer in self._consumers)

    async def _publish(
        self, producer: Producer, topic: str, messages: Mapping[int | None, Sequence[bytes | OutgoingMessage]]
    ) -> None:
        for first in range(0, max(map(len, messages.values())), 40):
            for partition, given in messages.items():
                if batch := given[first : first + 40]:
                    await producer.publish_many(topic, batch, partition=partition)
                    await anyio.sleep(0.01)


def numbered(partitions: int, keys: int, count: int, seed: int) -> dict[int | None, list[OutgoingMessage]]:
    """Return messages of random keys for each partition; a body is ``partition/key:number``."""
    rng = random.Random(seed)
    numbers: defaultdict[str, int] = defaultdict(int)
    made: dict[int | None, list[OutgoingMessage]] = {}
    for partition in range(partitions):
        made[partition] = []
        for _ in range(count):
            key = f"key{rng.randrange(keys)}"
            name = f"{partition}/{key}"
            made[partition].append(OutgoingMessage(f"{name}:{numbers[name]}".encode(), headers={"of": key}))
            numbers[name] += 1
    return made
