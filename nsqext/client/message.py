"""A message in the hands of a consumer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight
from nsqext.protocol.headers import RESERVED_PREFIX, decode_headers, tag_of
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, RawMessage

__all__ = ("Message",)

logger = logging.getLogger("nsqext.consumer")

_MAX_DELAY = 3 * 24 * 3600.0


class Owner(Protocol):
    """The subscription that a message came from."""

    topic: str
    partition: int
    node: str
    in_order: bool

    def respond(self, message: Message, command: str, delay: float = 0.0) -> None:
        """Send FIN, REQ or TOUCH."""

    def expired(self, message: Message) -> bool:
        """Return whether the message went back to the server."""


class Message(RawMessage):
    """A message that was delivered.

    Each message is answered once, with `finish` or `requeue`; in a handler, returning and raising do that. Answers are
    collected and sent together as soon as the event loop has a moment: awaiting them does not wait for the server,
    which does not reply to them.

    Attributes:
        body: what was published.
        attempts: how often it was delivered, this time included.
        timestamp: when the server stored it, in nanoseconds since 1970.
        id: the 16 bytes of its id.
        offset: byte offset in the partition's queue; -1 where the subscription does not tell.
        size: bytes of its record in the queue; 0 where the subscription does not tell.
        header: bytes of the extend header as they were published.
        received: when it arrived, in seconds of the monotonic clock.
    """

    __slots__ = ("_headers", "_owner", "answered", "received")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._headers: dict[str, Any] | None = None
        self.answered = False
        self.received = 0.0

    @property
    def topic(self) -> str:
        """Topic it was published to."""
        return self._owner.topic

    @property
    def partition(self) -> int:
        """Partition it came from; -1 at the original NSQ."""
        return self._owner.partition

    @property
    def node(self) -> str:
        """``host:port`` of the node that delivered it."""
        return self._owner.node

    @property
    def in_order(self) -> bool:
        """Whether the next message of its partition waits for the answer to this one."""
        return self._owner.in_order

    @property
    def headers(self) -> Mapping[str, Any]:
        """Extend headers without the reserved ones; empty without any.

        Values are text, unless a publisher of another kind used other JSON values.

        Raises:
            ProtocolError: the header is not JSON, which servers refuse to store.
        """
        return {name: value for name, value in self._all_headers().items() if not name.startswith(RESERVED_PREFIX)}

    @property
    def tag(self) -> str | None:
        """Tag that it was published with."""
        if self.version == EXT_TAG:
            return self.header.decode("utf-8", "replace") or None
        return tag_of(self._all_headers())

    @property
    def reserved_headers(self) -> Mapping[str, Any]:
        """Extend headers whose names begin with ``##``."""
        return {name: value for name, value in self._all_headers().items() if name.startswith(RESERVED_PREFIX)}

    def _all_headers(self) -> dict[str, Any]:
        if self._headers is None:
            self._headers = decode_headers(self.header) if self.version == EXT_JSON else {}
        return self._headers

    @property
    def expired(self) -> bool:
        """Whether it is no longer ours: its timeout has passed, or its connection is gone; it will be delivered again."""
        return self._owner.expired(self)

    async def finish(self) -> None:
        """Acknowledge it: it will not be delivered again.

        Raises:
            InvalidState: it was answered before.
            MessageNotInFlight: it is no longer ours, see `expired`.
        """
        self._answer("FIN")

    def finish_now(self) -> None:
        """Finish it after its handler returned; one that is no longer ours is left to its next delivery."""
        try:
            self._owner.respond(self, "FIN")
        except MessageNotInFlight as error:
            logger.warning("a handled message will come again: %s", error)
        self.answered = True

    def requeue_now(self, delay: float) -> None:
        """Requeue it after its handler raised; one that is no longer ours is left to its next delivery."""
        try:
            self._owner.respond(self, "REQ", delay)
        except MessageNotInFlight as error:
            logger.warning("a message that was not handled will come again: %s", error)
        self.answered = True

    async def requeue(self, delay: float = 0.0) -> None:
        """Give it back: it will be delivered again, with one attempt more.

        Args:
            delay: seconds until then; servers take up to three days, and ordered channels none.

        Raises:
            InvalidInput: the delay is negative or too long.
            InvalidState: it was answered before.
            MessageNotInFlight: it is no longer ours, see `expired`.
        """
        if not 0 <= delay <= _MAX_DELAY:
            raise InvalidInput(f"a requeue delay of {delay!r} s is not within 0..{_MAX_DELAY:g}")
        self._answer("REQ", delay)

    async def touch(self) -> None:
        """Start its timeout anew.

        Raises:
            InvalidState: it was answered before.
            MessageNotInFlight: it is no longer ours, see `expired`.
        """
        if self.answered:
            raise InvalidState("the message was answered already", topic=self.topic, partition=self.partition)
        self._owner.respond(self, "TOUCH")

    def _answer(self, command: str, delay: float = 0.0) -> None:
        if self.answered:
            raise InvalidState("the message was answered already", topic=self.topic, partition=self.partition)
        self._owner.respond(self, command, delay)
        self.answered = True

    def __repr__(self) -> str:
        return f"<Message {self.topic}[{self.partition}] id={self.id.hex()} attempts={self.attempts} {len(self.body)} bytes>"
