"""The subscriptions of a consumer without connections: RDY counts, ticks and lookups are recorded."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, cast

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions
from nsqext.client.consumer.subscriptions import subscription_group as module
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.client.events import ClientEvent, ClientEvents
from nsqext.transport.options import ConnectionOptions

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.lookup.metadata import MetadataCache

__all__ = ("Bench", "Connection", "ready")


class Connection:
    """A subscription that records its RDY counts."""

    def __init__(self, topic: str = "t", partition: int = 0, backoff: Backoff | None = None) -> None:
        self.topic, self.partition, self.node = topic, partition, f"n:{partition}"
        self.backoff = backoff or Backoff(BackoffOptions(), lambda: 1.0)
        self.max_ready, self.msg_timeout = 100, 60.0
        self.key_sharing = KeySharing.NONE
        self.request = SimpleNamespace(options=SimpleNamespace(connection=ConnectionOptions()))
        self.live, self.busy, self.upgradable, self.silent = True, False, False, False
        self.stopped = False
        self.in_flight = self.received = self.requeued = self.timed_out = self.received_bytes = 0
        self.ready = self.flushes = 0
        self.pending: list[bytes] = []
        self.received_at, self.watched = 0.0, True
        self.silence_due = inf
        self.ticks: list[float] = []
        self.unrecorded = (0, 0)
        self.waited, self.excess, self.width = 0.0, inf, inf

    def set_ready(self, count: int) -> None:
        """Record a RDY count."""
        self.ready = count

    def take_unrecorded(self) -> tuple[int, int, float, float]:
        """Return what was received since the last call, and what the test says of it."""
        (count, size), self.unrecorded = self.unrecorded, (0, 0)
        return count, size, self.excess, self.width

    def flush(self) -> None:
        """Count the flushes."""
        self.flushes += 1
        self.pending.clear()

    def tick(self) -> None:
        """Record the time."""
        self.ticks.append(module._clock())

    def misses_heartbeat(self, now: float) -> bool:
        """Return what the test says."""
        return self.silent


class Bench:
    """A group of connections that a test adds."""

    def __init__(self, max_in_flight: int = 10, mode: Literal["consumer", "connection"] = "connection") -> None:
        self.events: list[ClientEvent] = []
        self.looked_up: list[str] = []
        self.late: list[float] = []
        events = ClientEvents()
        events.add(self.events.append)
        options = ConsumerOptions(
            max_in_flight=max_in_flight, max_in_flight_bytes=0, initial_ready=100, backoff=BackoffOptions(mode=mode)
        )
        tasks = cast("BackgroundTasks", SimpleNamespace(check_event_loop=lambda: None))
        self.group = SubscriptionGroup(options, cast("MetadataCache", self), events, tasks)
        self.backoff, self.flow = self.group.backoff, self.group.flow

    answer_age: float | None = 1.5
    failures: int = 2
    service: frozenset[str] = frozenset(("lookup:4161",))

    def lists_cheaply(self, count: int) -> bool:
        """Return that the list of all topics is long."""
        return False

    def poll_soon(self, topic: str, access: str = "r") -> None:
        """Record what is looked up, as metadata of the consumer."""
        self.looked_up.append(topic)

    def add(self, *connections: Connection) -> None:
        """Add open subscriptions."""
        for connection in connections:
            self.group.add(cast("Subscription", connection))
        self.group.flush()

    def ticked(self, now: float, late: float) -> None:
        """Record by how much a tick was late."""
        self.late.append(late)

    def remove(self, connection: Connection) -> bool:
        """Remove a subscription that ended."""
        return self.group.remove(cast("Subscription", connection))


def ready(*connections: Connection) -> list[int]:
    """Return the RDY counts."""
    return [connection.ready for connection in connections]
