"""What happened in a schedule: every publish and delivery with begin and end in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from attrs import define, field

__all__ = ("ALWAYS", "Channel", "Delivery", "History", "Letter", "Publish", "Wanted")

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
        batch: number of its batch; 0 if it was published alone.
        tag: its tag; empty without one.
        headers: its headers.
        unsynced: it was stored shortly before a loss of power, and may be lost with it.
        patience: seconds by which the publish may take longer than its timeout: batches before it.
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
    batch: int = 0
    tag: str = ""
    headers: dict[str, str] = field(factory=dict)
    unsynced: bool = False
    patience: float = 0.0


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
        delay: seconds for which it was requeued.
        received: when the consumer received it.
        batch: number of the batch in which it was handed out; 0 for none.
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
    delay: float = 0.0
    received: float = 0.0
    batch: int = 0


@define(eq=False)
class Wanted:
    """A consumer with a tag was connected to a channel.

    Attributes:
        topic: the topic.
        channel: the channel.
        tag: the tag.
        begin: when it was connected.
        end: when it began to close.
    """

    topic: str
    channel: str
    tag: str
    begin: float
    end: float = ALWAYS


@define(eq=False)
class Letter:
    """A dead letter that was handled.

    Attributes:
        body: of the message.
        begin: when the handler of the letter was called.
        copy: internal id of the letter.
        partition: of the message, as the letter says.
        message_id: internal id of the message, as the letter says.
        attempts: of the message, as the letter says.
        error: the cause, as the letter says.
    """

    body: bytes
    begin: float
    copy: int
    partition: int
    message_id: int
    attempts: int
    error: str


@define(eq=False)
class Channel:
    """What a channel promises.

    Attributes:
        topic: its topic.
        name: its name.
        order: ``key`` within a key and partition, ``partition``, or empty for none.
        shared: consumers share it, and the server gives each key to one of them.
        max_attempts: after this number of attempts, a failed message goes to the dead letters; 0 for never.
        letters: the dead-letter topic; empty without one.
        color: value of the header ``color`` that its consumers want; empty for all messages.
    """

    topic: str
    name: str
    order: Literal["", "key", "partition"] = ""
    shared: bool = False
    max_attempts: int = 0
    letters: str = ""
    color: str = ""

    def wants(self, publish: Publish) -> bool:
        """Return whether its consumers receive a message."""
        return publish.topic == self.topic and self.color in ("", publish.headers.get("color"))


@define(eq=False)
class History:
    """Everything that happened in a schedule.

    Attributes:
        on_unknown: setting of the producers.
        channels: the channels, all created before the first publish.
        publishes: in the order of their begins.
        deliveries: in the order of their begins.
        disturbances: begin and end of everything that may cause a redelivery: faults, and consumers that ended.
        faults: begin and end of each fault, and of moves of leaders after them.
        healed: when the last fault had ended; None before that.
        concurrency: handlers that each consumer may run at once.
        timeout: of publishes, in seconds.
        settle_timeout: of searches for publishes of unknown outcome, in seconds; 0 without them.
        settle: seconds after the last fault in which leases end, back-off ends, and clients reconnect.
        paused: seconds for which the machine did nothing.
        half_open: connections were lost without a sign, and the next request on each of them discovers it.
        misled: lookup named wrong leaders, or leaders moved, and idle producers keep the old ones. A node without a
            copy of the partition closes the connection, and where a command was not received as a whole, a reset hides
            the error that it sent.
        close_seconds: longest time that closing a client took.
        pauses: topic, channel, begin and end of each time for which all nodes had paused a channel.
        left_over: sockets and tasks that existed after everything was closed.
        changed: messages whose headers are not those that were published.
        tags: tag of each consumer that has one, by its name.
        wanted: when consumers with a tag were connected.
        letters: dead letters that were handled, in the order of their deliveries.
        refused: time and error of each answer to a message that was not in flight any more.
        unanswered: consumers with messages that were received, handled and not answered.
        order_given_up: topic, partition and time of each warning that lanes do not wait for messages any longer.
        rdy_exceeded: messages that a node sent beyond the RDY count of a connection.
        samples: time, and numbers of tasks, sockets and sessions, while clients ran.
        recreated: the topic ``recreated`` was deleted and created again, its messages were lost.
        kills: time and node of each kill of a node of the original NSQ. It notes the position in its queue files every
            two seconds and reads again what follows it, so a channel may have a message twice until it is finished.
        due: messages that were not handled so far: topic, channel and body of what was stored, with partition and id of
            what was delivered.
    """

    on_unknown: Literal["retry", "raise", "settle"] = "retry"
    channels: list[Channel] = field(factory=list)
    publishes: list[Publish] = field(factory=list)
    deliveries: list[Delivery] = field(factory=list)
    disturbances: list[tuple[float, float]] = field(factory=list)
    faults: list[tuple[float, float]] = field(factory=list)
    healed: float | None = None
    concurrency: dict[str, int] = field(factory=dict)
    timeout: float = 30.0
    settle_timeout: float = 0.0
    settle: float = 20.0
    paused: float = 0.0
    half_open: bool = False
    misled: bool = False
    close_seconds: float = 0.0
    pauses: list[tuple[str, str, float, float]] = field(factory=list)
    left_over: list[str] = field(factory=list)
    changed: list[str] = field(factory=list)
    tags: dict[str, str] = field(factory=dict)
    wanted: list[Wanted] = field(factory=list)
    letters: list[Letter] = field(factory=list)
    refused: list[tuple[float, str]] = field(factory=list)
    unanswered: list[str] = field(factory=list)
    order_given_up: list[tuple[str, int, float]] = field(factory=list)
    rdy_exceeded: list[str] = field(factory=list)
    samples: list[tuple[float, int, int, int]] = field(factory=list)
    recreated: bool = False
    kills: list[tuple[float, int]] = field(factory=list)
    due: dict[tuple[str | bytes | int, ...], None] = field(factory=dict)
    _handled: set[tuple[str | bytes | int, ...]] = field(factory=set)

    def missing(self) -> int:
        """Return how many deliveries are due, of a history that was not noted with `stored` and `handled`."""
        returned = {
            (found.topic, found.channel, found.body) for found in self.deliveries if found.outcome == "returned"
        }
        return sum(
            (channel.topic, channel.name, publish.body) not in returned
            for channel in self.channels
            for publish in self.publishes
            if channel.wants(publish) and publish.outcome == "stored"
        )

    def is_of_new_topic(self, publish: Publish) -> bool:
        """Return whether a publish went to the topic that was created again, when it was not deleted any more."""
        after = self.healed is not None and publish.begin >= self.healed
        return after and self.recreated and publish.topic == "recreated"

    def may_be_of_deleted_topic(self, publish: Publish) -> bool:
        """Return whether a publish may have gone to the topic that was deleted, or to the new one."""
        return self.recreated and publish.topic == "recreated" and not self.is_of_new_topic(publish)

    def forget_unsynced(self, power_losses: Sequence[float], interval: float) -> None:
        """Take publishes that were stored shortly before a loss of power for publishes of unknown outcome.

        So are those whose dead letters were: a letter that is lost is not published again.

        Args:
            power_losses: when a node lost its power.
            interval: longest time between two syncs of its files, in seconds.
        """

        def unsynced(found: Publish | Delivery) -> bool:
            return any(found.begin <= cut <= found.end + interval for cut in power_losses)

        with_letters = {(channel.topic, channel.name) for channel in self.channels if channel.letters}
        failed = {
            found.body
            for found in self.deliveries
            if found.outcome == "raised" and (found.topic, found.channel) in with_letters and unsynced(found)
        }
        for publish in self.publishes:
            if publish.outcome == "stored" and (publish.body in failed or unsynced(publish)):
                publish.outcome, publish.message_id, publish.offset, publish.unsynced = "unknown", None, None, True
                self.due = {place: None for place in self.due if publish.body not in place}

    def may_be_read_again(self, publish: Publish | None, delivery: Delivery) -> bool:
        """Return whether the node of a message was killed between its publish and a delivery, and reads it twice."""
        begin = -inf if publish is None else publish.begin
        return any(node == delivery.partition and begin <= moment <= delivery.begin for moment, node in self.kills)

    def stored(self, publish: Publish) -> None:
        """Note that a publish returned: every channel of its topic has to handle it."""
        for channel in self.channels:
            place: tuple[str | bytes | int, ...] = channel.topic, channel.name, publish.body
            if publish.message_id is not None:
                place = *place, publish.partition, publish.message_id  # another copy may have been handled
            if channel.wants(publish) and place not in self._handled:
                self.due[place] = None
        place = publish.topic, "a", publish.body
        if self.is_of_new_topic(publish) and place not in self._handled:
            self.due[place] = None

    def begun(self, delivery: Delivery) -> None:
        """Note that a handler begins: a message is due until a handler returns, also a copy of one that was handled."""
        self.deliveries.append(delivery)
        promised = any((channel.topic, channel.name) == (delivery.topic, delivery.channel) for channel in self.channels)
        if promised and self._copy(delivery) not in self._handled:
            self.due[self._copy(delivery)] = None

    def handled(self, delivery: Delivery) -> None:
        """Note that a handler returned; that of a dead letter stands for that of its message."""
        self._done(delivery.topic, delivery.channel, delivery.body)
        self._done(*self._copy(delivery))
        for channel in self.channels:
            if channel.letters == delivery.topic:
                letter = next(letter for letter in reversed(self.letters) if letter.copy == delivery.message_id)
                self._done(channel.topic, channel.name, letter.body)
                self._done(channel.topic, channel.name, letter.body, letter.partition, letter.message_id)

    def failed_after_all(self, delivery: Delivery) -> None:
        """Note that the answer of a handler that returned was refused, and that the handler raises."""
        delivery.outcome = "raised"
        self._handled.discard(self._copy(delivery))
        self.due[self._copy(delivery)] = None

    def _done(self, *place: str | bytes | int) -> None:
        self._handled.add(place)
        self.due.pop(place, None)

    @staticmethod
    def _copy(delivery: Delivery) -> tuple[str, str, bytes, int, int]:
        return delivery.topic, delivery.channel, delivery.body, delivery.partition, delivery.message_id
