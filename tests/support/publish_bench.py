"""A sender with routes, connections and answers of lookup that a test gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel

from nsqext.client.events import ClientEvents
from nsqext.client.producer.batch import Batch
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.options import ProducerOptions, TopicOptions
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.client.producer.request import MessageRequest, PublishRequest
from nsqext.client.producer.route import Route, Target
from nsqext.client.producer.sender import Sender
from nsqext.errors import DeliveryUnknown, LookupFailed, NsqError
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.identify import Negotiated
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, TopicMeta

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledConnection, PooledNode
    from nsqext.client.producer.route import RouteTable
    from nsqext.types import Receipt

Outcome = bytes | NsqError


def route_of(partitions: int = 1, *, extend: bool = False) -> Route:
    """Return a route to a node that leads all partitions of the topic t; without partitions, to one of the original."""
    view = PartitionMap("t", nodes=(Address("n", 1),))
    if partitions:
        leaders = {number: Address("n", 1) for number in range(partitions)}
        view = PartitionMap("t", meta=TopicMeta(partitions, extend_support=extend), leaders=leaders)
    return Route("t", view, ConnectionPool(ConnectionOptions(), ClientEvents()))


def target_of(meta: TopicMeta, version: str = "0.3.7-HA.1.9.7") -> Target:
    """Return the target of a topic with this metadata, on a node of this version."""
    node = ConnectionPool(ConnectionOptions(), ClientEvents()).node(Address("n", 1))
    node.redesigned = Negotiated(version=version).redesigned
    return Target("t", 0 if meta.partition_num else None, node, meta)


class Connections:
    """The connections to all nodes: each request has the next outcome; the last one is repeated."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self.commands: list[tuple[str, bytes, float]] = []
        self.failures: list[NsqError] = []
        self.unreachable: list[NsqError] = []
        self.failed: list[NsqError] = []
        self.doubts: list[bool] = []
        self.request: PublishRequest | None = None
        self.hold: anyio.Event | None = None
        self.on_command: Callable[[], None] | None = None

    async def connection(self, node: PooledNode) -> PooledConnection:
        if self.unreachable:
            raise self.unreachable.pop(0)
        node.connection = cast("PooledConnection", _Connection(self, node.node))
        return node.connection


class _Connection:
    def __init__(self, connections: Connections, node: str) -> None:
        self._connections, self._node = connections, node
        self.usable, self.local_address, self.in_flight = True, "127.0.0.1:9", 0

    def request(self, command: bytes, deadline: float, *, breaks: bool) -> Awaitable[bytes]:
        return self._send(bytes(command), deadline)

    async def _send(self, command: bytes, deadline: float) -> bytes:
        made, outcomes = self._connections, self._connections.outcomes
        made.commands.append((self._node, command, deadline))
        if made.hold is not None:
            await made.hold.wait()
        if made.on_command is not None:
            made.on_command()
        if made.request is not None:
            made.doubts.append(made.request.in_doubt)
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, NsqError):
            raise outcome
        return outcome

    def fail(self, error: NsqError) -> None:
        self._connections.failed.append(error)


class Routes:
    """The routes of one topic; what is asked of lookup is recorded."""

    topic_options: TopicOptions
    by_topic: Mapping[str, Route]

    def __init__(self, partitions: int, meta: TopicMeta | None = None) -> None:
        self.leaders = {number: Address(f"n{number}", 1) for number in range(partitions)}
        self.meta = meta or TopicMeta(partition_num=partitions)
        self.key_hash = lambda key, count: int(key) % count
        self.asks_lookup = True
        self.asked: list[tuple[object, ...]] = []
        self.answers: list[Any] = []
        self.upgrades: list[bool] = []
        self.waits = True
        self.lacks = False
        self.known = True
        self.made = self.renewed()

    def renewed(self) -> Route:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        view = PartitionMap("t", meta=self.meta, leaders=self.leaders)
        self.made = Route("t", view, pool)
        return self.made

    def current(self, topic: str) -> Route | None:
        return self.made if self.known and topic == self.made.topic else None

    async def find(self, topic: str) -> Route:
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, NsqError):
                raise answer
        return self.made

    async def refresh(self, topic: str, view: PartitionMap | None, partition: int | None) -> None:
        self.asked.append(("refresh", view is self.made.view, partition))

    def refresh_soon(self, topic: str, view: PartitionMap, partition: int | None) -> None:
        self.asked.append(("soon", view is self.made.view, partition))

    async def upgraded(self, topic: str, partitions: int = 0) -> bool:
        self.asked.append(("upgraded", partitions))
        return self.upgrades.pop(0)

    def waits_for_lookup(self, error: LookupFailed) -> bool:
        return self.waits

    async def lacks_channel(self, topic: str, partition: int | None) -> bool:
        self.asked.append(("lacks", partition))
        return self.lacks


class Bench:
    """A sender, and what surrounds it."""

    def __init__(self, *outcomes: Outcome, partitions: int = 2, meta: TopicMeta | None = None, **settings: Any) -> None:
        self.routes = Routes(partitions, meta)
        self.connections = Connections(list(outcomes) or [b"OK"])
        given = {"timeout": 30.0, "retry_wait": 0.0001, "max_retry_wait": 0.001, **settings}
        self.options = ProducerOptions(**given)
        self.routes.topic_options = TopicOptions(self.options)
        self.sender = Sender(self.options, cast("RouteTable", self.routes), cast("ConnectionPool", self.connections))

    def request(self, **choice: Any) -> MessageRequest:
        return MessageRequest(self.options, "t", OutgoingMessage(b"x"), **choice)

    async def publish(self, request: PublishRequest | None = None, **choice: Any) -> list[Receipt]:
        self.connections.request = request = request or self.request(**choice)
        with anyio.fail_after(20):
            return await self.sender.publish(request)

    @property
    def counts(self) -> tuple[int, int]:
        """The messages stored, and the retries."""
        return self.sender.counters.stored, self.sender.counters.retries


def batch_of(count: int) -> Batch:
    """Return a batch of messages for any partition."""
    return Batch("t", None, [b"x"] * count, 1)


class Settling:
    """Answers whether publishes of unknown outcome were stored."""

    def __init__(self, *answers: list[Any] | None) -> None:
        self.answers = list(answers)
        self.sent: list[int] = []
        self.acknowledged = 0
        self.hold: anyio.Event | None = None

    def sending(self, request: PublishRequest, target: Any, connection: Any) -> None:
        self.sent.append(target.partition)

    def stored(self, receipts: list[Any]) -> None:
        self.acknowledged += len(receipts)

    async def settle(self, request: PublishRequest, unknown: DeliveryUnknown) -> list[Any] | None:
        await anyio.lowlevel.checkpoint()
        if self.hold is not None:
            await self.hold.wait()
        return self.answers.pop(0)
