"""What happened in a schedule: every publish and delivery with begin and end in virtual time."""

from __future__ import annotations

from typing import Literal

from attrs import define, field

__all__ = ("ALWAYS", "Channel", "Delivery", "History", "Publish")

ALWAYS = float("inf")

PublishOutcome = Literal["pending", "stored", "unknown", "failed", "killed", "undocumented"]
DeliveryOutcome = Literal["running", "returned", "raised", "cancelled"]


@define(eq=False)
class Publish:
    """One message that was published.

    Attributes:
        body: unique.
        topic: where to.
        key: its key; empty without one.
        number: its place among the publishes of its publisher.
        begin: when the call was made.
        end: when it returned or raised.
        outcome: what the caller received.
        error: what was raised.
        partition: of its receipt.
        message_id: of its receipt; None if the receipt has none.
        offset: of its receipt; None if the receipt has none.
    """

    body: bytes
    topic: str
    key: str
    number: int
    begin: float
    end: float = ALWAYS
    outcome: PublishOutcome = "pending"
    error: str = ""
    partition: int = -1
    message_id: int | None = None
    offset: int | None = None


@define(eq=False)
class Delivery:
    """One call of a handler.

    Attributes:
        body: of the message.
        topic: its topic.
        channel: the channel.
        consumer: name of the consumer.
        partition: its partition.
        message_id: internal id.
        attempts: as the server counts.
        begin: when the handler was called.
        end: when it returned or raised.
        outcome: how it ended.
    """

    body: bytes
    topic: str
    channel: str
    consumer: str
    partition: int
    message_id: int
    attempts: int
    begin: float
    end: float = ALWAYS
    outcome: DeliveryOutcome = "running"


@define(eq=False)
class Channel:
    """What a channel promises.

    Attributes:
        topic: its topic.
        name: its name.
        order: ``key`` within a key and partition, ``partition``, or empty for none.
    """

    topic: str
    name: str
    order: Literal["", "key", "partition"] = ""


@define(eq=False)
class History:
    """Everything that happened in a schedule.

    Attributes:
        on_unknown: setting of the producers.
        channels: the channels, all created before the first publish.
        publishes: in the order of their begins.
        deliveries: in the order of their begins.
        disturbances: begin and end of everything that may cause a redelivery: faults, and consumers that ended.
        healed: when the last fault had ended; None before that.
        concurrency: handlers that each consumer may run at once.
        timeout: of publishes, in seconds.
        settle: seconds after the last fault in which leases end, back-off ends, and clients reconnect.
        paused: seconds for which the machine did nothing.
        close_seconds: longest time that closing a client took.
        left_over: sockets and tasks that existed after everything was closed.
    """

    on_unknown: Literal["retry", "raise"] = "retry"
    channels: list[Channel] = field(factory=list)
    publishes: list[Publish] = field(factory=list)
    deliveries: list[Delivery] = field(factory=list)
    disturbances: list[tuple[float, float]] = field(factory=list)
    healed: float | None = None
    concurrency: dict[str, int] = field(factory=dict)
    timeout: float = 30.0
    settle: float = 20.0
    paused: float = 0.0
    close_seconds: float = 0.0
    left_over: list[str] = field(factory=list)

    def missing(self) -> int:
        """Return how many deliveries are due."""
        returned = {
            (found.topic, found.channel, found.body) for found in self.deliveries if found.outcome == "returned"
        }
        return sum(
            (channel.topic, channel.name, publish.body) not in returned
            for channel in self.channels
            for publish in self.publishes
            if publish.topic == channel.topic and publish.outcome == "stored"
        )
