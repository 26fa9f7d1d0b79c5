"""Key lanes without connections: an owner that records answers, and a clock that tests set."""

from __future__ import annotations

from nsqext.client.consumer.handlers.key_lanes import KeyLanes
from nsqext.client.consumer.handlers.message_keys import key_reader
from nsqext.client.consumer.message import KeySharing, Message
from nsqext.client.consumer.options import DeliveryOptions
from nsqext.errors import MessageNotInFlight
from tests.support.clock import Clock

__all__ = ("Bench", "Owner", "at_place", "cut")


class Owner:
    """A subscription that records the calls it receives."""

    topic, node, in_order = "t", "127.0.0.1:4150", False
    msg_timeout, max_msg_timeout, ignore_lost = 60.0, 900.0, False

    def __init__(self) -> None:
        self.horizon = 0.0
        self.partition: int | None = 0
        self.original = False
        self.moved = self.taking_over = False
        self.key_sharing = KeySharing.NONE
        self.number = 1
        self.ready = 20
        self.commands: list[tuple[str, bytes]] = []
        self.delays: dict[bytes, float] = {}
        self.clock = Clock()

    def finish(self, message: Message) -> None:
        """Record a FIN."""
        self._check(message)
        self.commands.append(("FIN", message.body))

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        """Record a REQ."""
        assert not backoff, "a failure delays its key only"
        self._check(message)
        self.commands.append(("REQ", message.body))
        self.delays[message.body] = delay

    def touch(self, message: Message) -> None:
        """Record a TOUCH."""
        self._check(message)
        self.commands.append(("TOUCH", message.body))
        message.received = self.clock.now

    def _check(self, message: Message) -> None:
        if message.received < self.horizon:
            raise MessageNotInFlight("gone")

    def record_outcome(self, failed: bool) -> None:
        """Record the outcome."""
        self.commands.append(("record_outcome", b""))

    def expired(self, message: Message) -> bool:
        """Return whether the message is no longer in flight."""
        return message.received < self.horizon

    def reset(self, reason: str) -> None:
        """Record a request to close the connection."""
        self.commands.append(("reset", b""))


class Bench:
    """Lanes whose key is the first byte of the body."""

    def __init__(self, count: int = 4, *, ordered_by_server: bool = False) -> None:
        self.clock = Clock()
        self.owner = Owner()
        self.owner.clock = self.clock
        self.owner.key_sharing = KeySharing.SERVER if ordered_by_server else KeySharing.NONE
        self.lanes = KeyLanes(count, key_reader(lambda message: message.body[:1]), self.clock, DeliveryOptions())

    def put(self, *bodies: str, owner: Owner | None = None) -> list[Message]:
        """Receive messages."""
        messages = self.make(*bodies, owner=owner)
        self.lanes.put(messages)
        return messages

    def put_at(self, *numbers: int) -> None:
        """Receive messages of the key ``a`` with these numbers, at their offsets."""
        messages = self.make(*(f"a{number}" for number in numbers))
        self.lanes.put([at_place(message, number) for message, number in zip(messages, numbers, strict=True)])

    def make(self, *bodies: str, owner: Owner | None = None) -> list[Message]:
        """Return messages."""
        messages = []
        for body in bodies:
            message = Message(owner or self.owner)
            message.body, message.id = body.encode(), body.encode().ljust(16, b"-")
            message.attempts, message.received, message.delivered = 1, self.clock.now, self.clock.now
            message.version, message.header, message.offset, message.size = 0, b"", -1, 0
            message.timestamp = 1
            messages.append(message)
        return messages

    def rows(self) -> dict[str, list[str]]:
        """Return the bodies that wait in lanes, by key."""
        found: dict[str, list[str]] = {}
        for message in self.lanes.queued():
            found.setdefault(message.body[:1].decode(), []).append(message.body.decode())
        return found

    def take(self, message: Message) -> Message:
        """Take a message out of its lane, like its worker."""
        for row in self.lanes.lanes:
            if row.messages and row.messages[0] is message:
                return row.messages.popleft()
        raise AssertionError("it is not the first of its lane")

    def expire(self, message: Message) -> None:
        """Take an expired message out of its lane and pass it over, like its worker."""
        self.lanes.expired(self.take(message))

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.now += seconds
        self.lanes.tick(self.clock.now)


def cut(bench: Bench) -> Owner:
    """Close the connection; return the next one."""
    bench.owner.horizon = float("inf")
    bench.owner = Owner()
    bench.owner.clock = bench.clock
    return bench.owner


def at_place(message: Message, number: int) -> Message:
    """Return a message with the offset of this number, as an extend topic sends it."""
    message.offset, message.size = number * 30, 30
    return message
