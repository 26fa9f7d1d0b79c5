"""The subscriber of a topic with connections and lookup answers of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions
from nsqext.client.consumer.subscriptions import subscriber as module
from nsqext.client.consumer.subscriptions.assignment import SubscriberContext
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.subscriber import Subscriber
from nsqext.errors import ConnectionLost, NsqError
from nsqext.lookup.partition_map import PartitionMap
from nsqext.types import Address, TopicMeta
from tests.support.sleeps import settled

if TYPE_CHECKING:
    import pytest

    from nsqext import Position
    from nsqext.client.consumer.subscriptions.assignment import MessageReceiver
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup

__all__ = ("NODE", "OTHER", "Connection", "Scene", "make_context", "running_subscriber", "texts_with", "view_of")

NODE, OTHER = Address("n", 1), Address("m", 1)


def view_of(*leaders: Address, meta: TopicMeta | None = None, nodes: tuple[Address, ...] = ()) -> PartitionMap:
    """Return what lookup knows about the topic t."""
    return PartitionMap(
        "t",
        meta=meta or TopicMeta(len(leaders)),
        leaders=dict(enumerate(leaders)),
        nodes=nodes,
        http={NODE: NODE, OTHER: OTHER},
    )


def make_context(group: object, forgotten: list[Any]) -> SubscriberContext:
    """Return the context of subscribers with a group of the test; subscriptions without messages are recorded."""
    receiver = SimpleNamespace(receive=None, forget=forgotten.append)
    return SubscriberContext("ch", cast("SubscriptionGroup", group), cast("MessageReceiver", receiver))


class Connection:
    """A subscription; it lasts until `end` or `fail`."""

    def __init__(self, request: SubscribeRequest, backoff: Backoff) -> None:
        self.request, self.backoff = request, backoff
        self.topic, self.partition, self.node = request.topic, request.partition, str(request.address)
        self.number = self.in_flight = 0
        self.live, self.stopped, self.moved = True, False, False
        self.received, self.start = 0, cast("Position | None", None)
        self.key_sharing = KeySharing.NONE
        self.over = anyio.Event()
        self.error: NsqError | None = ConnectionLost("closed")
        self.closes = self.ends = 0

    async def receive(self) -> None:
        try:
            await self.over.wait()
        finally:
            self.live = False
        if self.error is not None:
            raise self.error

    def fail(self, error: NsqError) -> None:
        self.error = error
        self.over.set()

    def end(self) -> None:
        self.ends += 1
        self.live = False
        self.over.set()

    async def close(self) -> None:
        self.closes += 1
        self.stopped = True
        self.end()

    def skip_to(self, position: Position) -> None:
        pass


class Scene:
    """A subscriber of topic t, and what surrounds it."""

    def __init__(self, tasks: Any, view: PartitionMap, discovered: bool, settings: dict[str, Any]) -> None:
        self.view: PartitionMap | None = view
        self.refusals: list[NsqError] = []
        self.answers: list[PartitionMap | NsqError] = []
        self.lookup_refusals: list[NsqError] = []
        self.forgotten: list[Connection] = []
        self.opened: list[Connection] = []
        self.refreshed: list[int | None] = []
        self.unknown = False
        self.asked = 0
        self.lacking: set[Address] = set()
        self.failed: list[NsqError] = []
        self.emitted: list[tuple[object, ...]] = []
        self.events = SimpleNamespace(emit=lambda *event: self.emitted.append(event))
        self.retired: list[Connection] = []
        self.added: list[Connection] = []
        self.flushes = self.reconnects = 0
        self.others = 1
        self.unwatched = 0
        self.changed: Callable[[PartitionMap], None] = lambda view: None
        self.backoff = Backoff(BackoffOptions())
        self.channels = self
        given = {"reconnect_wait": 0.0001, "max_reconnect_wait": 0.0002, "close_timeout": 5.0, **settings}
        self.options = ConsumerOptions(**given)
        self.metadata, self.tasks = self, tasks
        context = make_context(self, self.forgotten)
        self.subject = Subscriber("t", context, self.failed.append, discovered=discovered)

    # As the metadata

    def watch(self, topic: str, access: str, changed: Callable[[PartitionMap], None]) -> Callable[[], None]:
        self.changed = changed

        def unwatch() -> None:
            self.unwatched += 1

        return unwatch

    def cached(self, topic: str, access: str) -> PartitionMap | None:
        return self.view

    def is_unknown(self, topic: str, access: str) -> bool:
        return self.unknown

    async def may_subscribe(self, topic: str, view: PartitionMap, node: Address) -> bool:
        self.asked += 1
        return node not in self.lacking

    async def refresh(self, topic: str, access: str, view: PartitionMap, suspect: int | None) -> None:
        self.refreshed.append(suspect)
        if self.lookup_refusals:
            raise self.lookup_refusals.pop(0)

    async def resolve(self, topic: str, access: str) -> PartitionMap:
        answer = self.answers.pop(0)
        if isinstance(answer, NsqError):
            raise answer
        self.view = answer
        return answer

    async def clients(self, *place: object) -> int:
        return self.others

    # As the group

    def add(self, connection: Connection) -> None:
        self.added.append(connection)

    def remove(self, connection: Connection) -> bool:
        return connection in self.added

    def retire(self, connections: list[Connection]) -> None:
        self.retired += connections

    def flush(self) -> None:
        self.flushes += 1

    async def open(self, request: SubscribeRequest, *, backoff: Backoff, **_: Any) -> Connection:
        if self.refusals:
            raise self.refusals.pop(0)
        self.opened.append(Connection(request, backoff))
        return self.opened[-1]

    def moved(self, view: PartitionMap) -> None:
        """Let lookup answer something else."""
        self.view = view
        self.changed(view)

    async def connections(self, count: int) -> list[Connection]:
        """Wait until a number of subscriptions were opened."""
        while len(self.opened) < count:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.001)
        await settled()
        return self.opened


@asynccontextmanager
async def running_subscriber(
    monkeypatch: pytest.MonkeyPatch, view: PartitionMap, *refusals: NsqError, discovered: bool = False, **settings: Any
) -> AsyncIterator[Scene]:
    """Run a subscriber."""
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            scene = Scene(tasks, view, discovered, settings)
            scene.refusals = list(refusals)
            monkeypatch.setattr(module, "Subscription", scene)
            tasks.start_soon(scene.subject.run)
            await settled()
            yield scene
            tasks.cancel_scope.cancel()


def texts_with(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """Return the log records that contain a text."""
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]
