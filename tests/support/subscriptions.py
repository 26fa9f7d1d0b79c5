"""A subscription of a consumer whose connection and clock belong to the test: nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, cast

import pytest

from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.client.consumer.unpacking import UnpackBudget
from nsqext.protocol.identify import Negotiated
from nsqext.types import Address, TopicMeta
from tests.support.clock import replace_clock
from tests.support.fake_nsqd import message

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.errors import NsqError
    from nsqext.transport.connection import Connection

__all__ = ("FakeConnection", "FakeMonitor", "Subscribed", "delivered", "subscribed")


class FakeConnection:
    """A connection that records what is written to it, and when it is flushed.

    Attributes:
        sent: what each flush has sent, oldest first.
        ended: what ended it.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended: list[NsqError | None] = []
        self.received_at = 0.0
        self.heartbeat_interval = 30.0
        self.busy = False
        self.notices: list[object] = []
        self.ticks = 0
        self.requests: list[bytes] = []
        self.on_messages: Callable[[list[bytes]], None] | None = None
        self.local_address = "127.0.0.1:1"
        self._buffer = b""

    @property
    def protocol(self) -> FakeConnection:
        return self

    @property
    def usable(self) -> bool:
        return not self.ended

    def split_large(self) -> None:
        """The frames of tests are whole."""

    def write(self, data: bytes) -> None:
        self._buffer += data

    def flush(self) -> None:
        if self._buffer:
            self.sent.append(self._buffer)
            self._buffer = b""

    def fail(self, error: NsqError) -> None:
        self.ended.append(error)

    def close(self) -> None:
        if not self.ended:
            self.ended.append(None)

    def tick(self) -> None:
        self.ticks += 1
        self.notices.clear()

    async def request(self, data: bytes) -> bytes:
        self.requests.append(data)
        return b"CLOSE_WAIT"

    async def drain(self) -> None:
        pass

    async def read_forever(self) -> None:
        await _Forever()


class _Forever:
    """What a test without an event loop never continues."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class FakeMonitor:
    """What a subscription reports to; its calls are recorded by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.unpack_budget: UnpackBudget | None = None
        self.early: EarlyMessages | None = None
        self.idle = False
        self.unrecorded: dict[Subscription, None] = {}
        self.on_time_until = inf
        self.share = 2
        self.receipt = 0.0
        self.at_once = False

    def received(self, subscription: Subscription) -> None:
        self.calls.append("received")

    def unpacking(self) -> UnpackBudget:
        self.unpack_budget = self.unpack_budget or UnpackBudget(0)
        return self.unpack_budget

    def early_messages(self) -> EarlyMessages:
        self.early = self.early or EarlyMessages()
        return self.early

    @property
    def kept(self) -> list[tuple[int, float]]:
        """The messages that are kept until they are due, and when they are."""
        return [] if self.early is None else [(message.internal_id, at) for at, _, message in self.early._due]

    def earliest_receipt(self, now: float) -> float:
        return self.receipt

    def make_room(self, subscription: Subscription) -> None:
        self.calls.append("make_room")

    def needs_flush(self, subscription: Subscription, *, answer: bool = False) -> bool:
        self.calls.append("needs_flush")
        return answer and self.at_once

    def rebalance(self) -> None:
        self.calls.append("rebalance")


class Subscribed:
    """A subscription, with the parts that surround it.

    Attributes:
        now: what its clock shows.
        messages: those that it has delivered.
    """

    def __init__(
        self, meta: TopicMeta, partition: int | None, negotiated: Negotiated, key_tags: int, settings: dict[str, Any]
    ) -> None:
        self.now = 100.0
        self.wire = FakeConnection()
        self.monitor = FakeMonitor()
        self.messages: list[Message] = []
        self.backoff = Backoff(BackoffOptions(base=1.0, jitter=False))
        options, address = ConsumerOptions(**settings), Address("127.0.0.1", 4150)
        request = SubscribeRequest("t", "ch", partition, address, meta, options=options, key_tags=key_tags)
        with self.clock():
            self.subject = Subscription(
                request,
                cast("Connection", self.wire),
                negotiated,
                deliver=self.messages.extend,
                monitor=self.monitor,
                backoff=self.backoff,
            )
        self.subject.watched = False
        self._reading = self.subject.receive()
        self._reading.send(None)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Let the modules of the subscription read the clock of the test."""
        with pytest.MonkeyPatch.context() as patch:
            replace_clock(patch, lambda: self.now)
            yield

    def receive(self, *numbers: int, **parts: Any) -> list[Message]:
        """Read messages with these numbers at once; return those that are delivered."""
        before = len(self.messages)
        self.read(delivered(number, **parts) for number in numbers)
        return self.messages[before:]

    def read(self, frames: Iterable[bytes]) -> None:
        """Read the data of message frames at once."""
        assert self.wire.on_messages is not None
        self.wire.on_messages(list(frames))

    def close(self) -> None:
        self._reading.close()

    def flushed(self) -> bytes:
        """Flush, and return all that was sent since the last call."""
        self.subject.flush()
        sent = b"".join(self.wire.sent)
        self.wire.sent.clear()
        return sent


def delivered(number: int, body: bytes = b"body", **parts: Any) -> bytes:
    """Return the data of a message frame."""
    return message(number, body, **parts)[8:]


@contextmanager
def subscribed(
    meta: TopicMeta = TopicMeta(1),  # noqa: B008 - it is frozen
    *,
    partition: int | None = 0,
    negotiated: Negotiated = Negotiated(),  # noqa: B008 - it is frozen
    key_tags: int = 0,
    **settings: Any,
) -> Iterator[Subscribed]:
    """Yield a subscription at 100 s of a clock that stands still."""
    made = Subscribed(meta, partition, negotiated, key_tags, settings)
    with made.clock(), closing(made):
        yield made
