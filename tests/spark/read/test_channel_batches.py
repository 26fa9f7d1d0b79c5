"""Batches of a consumed channel with a scripted consumer: which messages a batch has, and when they are finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self

import anyio
import pytest
from attrs import define, field

from nsqext.errors import ConnectionLost, NsqError, PartitionUnavailable
from nsqext.protocol.messages import message_id
from nsqext.spark.options import SourceOptions
from nsqext.spark.read import channel_batches
from nsqext.spark.read.channel_batches import ChannelBatches, ChannelReader

LATER = time.time_ns() + 10**15
"""A time after the start of a query that excludes later messages."""
TEXT_ID = b"0123456789abcdef"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


@define(eq=False)
class Sent:
    """A message in flight, and what it was answered with."""

    number: int
    timestamp: int = 1
    id: bytes = TEXT_ID
    expired: bool = False
    answered: bool = False
    answers: list[object] = field(factory=list)

    @property
    def owner(self) -> SimpleNamespace:
        return SimpleNamespace(original=self.id == TEXT_ID)

    def finish_now(self) -> None:
        self.answers.append("FIN")

    def requeue_now(self, delay: float, *, backoff: bool) -> None:
        self.answers.append(("REQ", delay, backoff))

    def mark_answered(self) -> None:
        self.answers.append("none")


@define(eq=False)
class Channel:
    """The consumer and the `Admin` of batches.

    Attributes:
        deliveries: batches that the consumer returns; an empty one lets it wait in vain.
        counts: numbers of unfinished messages, as the servers report them in turn, or errors.
        done: what was called, in order.
        settings: those of the consumer.
        asking: those of the `Admin`.
        broken: whether the consumer cannot be closed without an error.
    """

    deliveries: list[list[Sent]]
    counts: list[int | NsqError] = field(factory=list)
    done: list[str] = field(factory=list)
    settings: dict[str, Any] = field(factory=dict)
    asking: dict[str, Any] = field(factory=dict)
    broken: bool = False

    def consumer(self, topics: tuple[str, ...], channel: str, lookupd: object, **settings: object) -> Self:
        self.settings = {"topics": topics, "channel": channel, **settings}
        return self

    def batches(self, **settings: object) -> Self:
        self.settings |= settings
        return self

    async def __anext__(self) -> list[Sent]:
        self.done.append("next")
        if not (found := self.deliveries.pop(0)):
            await anyio.sleep_forever()
        return found

    async def start(self) -> None:
        self.done.append("start")

    def pause(self) -> None:
        self.done.append("pause")

    async def aclose(self) -> None:
        self.done.append("close")
        if self.broken:
            raise ConnectionLost("it broke")

    def admin(self, lookupd: object, **settings: object) -> SimpleNamespace:
        self.asking = settings
        return SimpleNamespace(aclose=self.close_admin)

    async def close_admin(self) -> None:
        self.done.append("close Admin")

    async def count(self, *_: object) -> int:
        self.done.append("count")
        if isinstance(found := self.counts.pop(0), NsqError):
            raise found
        return found


def options() -> SourceOptions:
    given = {"lookupd": "127.0.0.1:1", "subscribe": "one,two", "channel": "spark", "readMode": "channel"}
    return SourceOptions.parse({**given, "maxOffsetsPerTrigger": "2"}, streaming=True)


Counts = Sequence[int | NsqError]
Open = Callable[..., tuple[Channel, ChannelBatches]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A function that returns batches of a scripted channel; one batch has two messages at most."""

    def open_channel(*deliveries: list[Sent], counts: Counts = ()) -> tuple[Channel, ChannelBatches]:
        channel = Channel(list(deliveries), list(counts))
        monkeypatch.setattr(channel_batches, "Consumer", channel.consumer)
        monkeypatch.setattr(channel_batches, "Admin", channel.admin)
        monkeypatch.setattr(channel_batches, "unfinished_count", channel.count)
        return channel, ChannelBatches(options())

    monkeypatch.setattr(channel_batches, "WAIT", 0.0)
    monkeypatch.setattr(channel_batches, "SETTLED", 0.0)
    return open_channel


async def take(batches: ChannelBatches, start: int) -> list[Any]:
    return await batches.take(start)


@pytest.mark.anyio
async def test_a_consumer_that_leaves_messages_to_spark(opened: Open) -> None:
    channel, _ = opened()
    own = {"topics": ("one", "two"), "channel": "spark", "max_count": 2, "max_wait": 0.0}
    assert channel.settings == own | {"max_in_flight": 4, "on_lost": "ignore", "decompress": False, "block_warning": 0}
    assert channel.asking["node_filter"] is None, "messages of every node count"


@pytest.mark.anyio
async def test_a_batch_is_returned_until_a_later_one_is_requested(opened: Open) -> None:
    sent = [Sent(number) for number in range(4)]
    channel, batches = opened(sent[:2], [], sent[2:])
    assert await take(batches, 5) == await take(batches, 5) == sent[:2]
    assert await take(batches, 6) == sent[1:2]
    assert [message.answers for message in sent] == [["FIN"], [], [], []]
    assert await take(batches, 7) == []
    assert await take(batches, 7) == sent[2:]
    await batches.finish(9)
    await batches.finish(9)
    assert [message.answers for message in sent] == [["FIN"]] * 4
    assert channel.done == ["next"] * 3


@pytest.mark.anyio
async def test_messages_of_incomplete_batches_are_given_back(opened: Open) -> None:
    """REQ for the original NSQ only; messages that are answered or expired get no answer."""
    number = message_id(7, 0)
    sent = [Sent(0), Sent(1, expired=True), Sent(2, expired=True, answered=True)]
    other = [Sent(3, id=number), Sent(4, id=number, answered=True), Sent(5, LATER), Sent(6, LATER, expired=True)]
    channel, batches = opened([*other, *sent])
    await batches.__aenter__()
    await batches.freeze()
    assert await take(batches, 0) == [*other[:2], *sent]
    channel.broken = True
    with pytest.raises(ConnectionLost, match="it broke"):
        await batches.__aexit__()
    assert [message.answers for message in (*sent, *other)] == [
        [("REQ", 0.0, False)],
        ["none"],
        [],
        ["none"],
        [],
        [("REQ", 0.0, False)],
        ["none"],
    ]
    assert channel.done == ["start", "next", "pause", "close", "close Admin"]


@pytest.mark.anyio
async def test_a_query_that_ends_when_only_later_messages_are_unfinished(opened: Open) -> None:
    sent = [Sent(0), Sent(1, LATER), Sent(2), Sent(3)]
    channel, batches = opened(sent[:2], [], sent[2:3], [], [], sent[3:], [], counts=[2, 2, 2, 1])
    await batches.freeze()
    found = [await take(batches, number) for number in range(4)]
    assert found == [sent[:1], sent[2:3], sent[3:], []]
    waits = ["next", "count"]
    assert channel.done == ["next", *waits, "next", *waits * 2, "next", *waits]


@pytest.mark.anyio
async def test_a_query_ends_when_only_later_messages_are_in_flight(opened: Open) -> None:
    """Nothing else can be received then; a node that does not report its messages may have earlier ones."""
    later, down = [[Sent(number, LATER)] * 2 for number in range(2)], PartitionUnavailable("the node is down")
    channel, batches = opened(*later, [], counts=[9, down, 9])
    await batches.freeze()
    assert await take(batches, 0) == []
    assert channel.done == ["next", "count"] * 3


def test_a_reader_for_blocking_code_closes_its_connections(opened: Open) -> None:
    sent = [Sent(0)]
    channel, _ = opened(sent)
    reader = ChannelReader(options())
    found: list[Any] = reader.take(0)
    reader.close()
    assert (found, sent[0].answers) == (sent, [("REQ", 0.0, False)])
    assert channel.done == ["start", "next", "pause", "close", "close Admin"]
