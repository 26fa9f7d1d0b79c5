"""What a reader of ranges uses, scripted: connections, the servers' answers, and a clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel

from nsqext.errors import NsqError
from nsqext.partitions import ChannelPosition, Leader
from nsqext.protocol.client.commands import rdy
from nsqext.protocol.messages import RawMessage
from nsqext.types import Address, TopicMeta
from tests.support.message_frames import encode_message

__all__ = ("LEADER", "Clock", "Connection", "Servers", "fins", "frames")

LEADER = Leader(Address("n1", 4150), Address("n1", 4151))


def frames(*numbers: int) -> list[bytes]:
    """Return messages of ten bytes each."""
    found: list[bytes] = []
    for number in numbers:
        message = RawMessage()
        message.timestamp, message.attempts, message.id = 1, 1, number.to_bytes(16)
        message.offset, message.size, message.body = 10 * number, 10, b"%d" % number
        found.append(encode_message(message, False, detail=True))
    return found


def fins(*numbers: int) -> bytes:
    return b"".join(b"FIN %b\n" % number.to_bytes(16) for number in numbers)


class Connection:
    """A subscribed connection: runs the steps of a script, and then waits for its end.

    A step is a delivery, an error that ends the connection, or a function to call.
    """

    def __init__(self, *steps: list[bytes] | NsqError | Callable[[], object], max_ready: int = 1000) -> None:
        self.steps, self.max_ready, self.extend = steps, max_ready, False
        self.request = SimpleNamespace(channel="")
        self.pending: list[bytes] = []
        self.sent: list[bytes] = []
        self.ticks = 0
        self.ended = False
        self.failure: NsqError | None = None
        self._over = anyio.Event()

    def set_ready(self, count: int) -> None:
        self.pending.append(rdy(count))

    def flush(self) -> None:
        if self.pending:
            self.sent.append(b"".join(self.pending))
        self.pending.clear()

    def tick(self) -> None:
        self.ticks += 1

    def end(self) -> None:
        self.ended = True
        self._over.set()

    def fail(self, error: NsqError) -> None:
        self.failure = error
        self._over.set()

    async def read(self, on_messages: Callable[[list[bytes]], None]) -> None:
        for step in self.steps:
            if isinstance(step, NsqError):
                raise step
            if isinstance(step, list):
                on_messages(step)
            else:
                step()
            await anyio.lowlevel.checkpoint()
        await self._over.wait()
        if self.failure is not None:
            raise self.failure


class Servers:
    """The `Admin` of a reader, whose connections are scripted."""

    def __init__(self, *connections: Connection | NsqError) -> None:
        self.waiting = list(connections)
        self.opened = 0
        self.retained = {0: [0], 1: [0], 2: [0], 3: [0]}
        self.settled: NsqError | None = None
        self.offset = 0
        self.moves: list[int] = []
        self.retries: list[tuple[float, float, NsqError]] = []
        self.known: list[str] = []
        self.distrusted: list[tuple[str, int, Leader]] = []
        self.deleted = [True]
        self.closed = False
        self.connection = None

    @property
    def leaders(self) -> Servers:
        return self

    nodes = leaders

    async def open(self, *_: object) -> Connection:
        self.opened += 1
        found = self.waiting.pop(0)
        if isinstance(found, NsqError):
            raise found
        return found

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        return LEADER, TopicMeta()

    async def first_retained(self, leader: Leader, topic: str, partition: int) -> int:
        retained = self.retained[partition]
        return retained.pop(0) if len(retained) > 1 else retained[0]

    async def bounds(self, topic: str, partition: int) -> Any:
        return SimpleNamespace(start=self.retained[partition][0])

    async def move(self, leader: Leader, topic: str, partition: int, channel: str, count: int) -> None:
        self.moves.append(count)

    async def wait_for_move(self, *given: Any) -> ChannelPosition:
        assert given[4] == self.moves[-1]
        if self.settled is not None:
            raise self.settled
        return ChannelPosition(99, given[4], 10 * given[4] + self.offset)

    async def is_deleted(self, topic: str) -> bool:
        return self.deleted.pop(0) if len(self.deleted) > 1 else self.deleted[0]

    def exists(self, topic: str) -> None:
        self.known.append(topic)

    def distrust(self, topic: str, partition: int, leader: Leader) -> None:
        self.distrusted.append((topic, partition, leader))

    def log_retry(self, waited: float, limit: float, error: NsqError) -> None:
        self.retries.append((waited, limit, error))

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed = True


class Clock:
    """A clock that only pauses move on; they are recorded."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        await anyio.lowlevel.checkpoint()

    def pass_by(self, seconds: float) -> Callable[[], None]:
        """Return a function that lets time pass without a pause."""

        def step() -> None:
            self.now += seconds

        return step
