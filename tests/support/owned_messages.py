"""Messages without a connection, for tests of what happens to them."""

from __future__ import annotations

from struct import pack

from nsqext.client.consumer.message import Message
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.messages import EXT_JSON, EXT_NONE

__all__ = ("RecordingOwner", "make_message")


class RecordingOwner:
    """An owner that writes down what it is told."""

    topic: str = "t"
    partition: int = 3
    node: str = "127.0.0.1:4150"

    def __init__(self, *, in_order: bool = False) -> None:
        self.in_order: bool = in_order
        self.horizon: float = float("-inf")
        self.msg_timeout: float = 60.0
        self.max_msg_timeout: float = 900.0
        self.ignore_lost: bool = False
        self.commands: list[str] = []
        self.refusal: Exception | None = None

    def _write(self, line: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.commands.append(line)

    def finish(self, message: Message) -> None:
        """Write FIN down."""
        self._write(f"FIN {message.internal_id}")

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Write REQ down, with ``!`` for a failure."""
        self._write(f"REQ {message.internal_id} {delay:g}{'!' if backoff else ''}")

    def touch(self, message: Message) -> None:
        """Write TOUCH down."""
        self._write(f"TOUCH {message.internal_id}")

    def record_outcome(self, failed: bool) -> None:
        """Write down who is to record_outcome."""
        self._write("failed" if failed else "passed")

    def expired(self, message: Message) -> bool:
        """Return whether the horizon has passed it."""
        return message.received < self.horizon


def make_message(
    owner: RecordingOwner,
    number: int = 1,
    body: bytes = b"body",
    *,
    attempts: int = 1,
    offset: int = -1,
    headers: dict[str, str] | None = None,
    tag: str | None = None,
    trace_id: int = 0,
    timestamp: int = 0,
) -> Message:
    """Return a message."""
    message = Message(owner)
    message.id = pack(">QQ", number, trace_id)
    message.timestamp = timestamp
    message.attempts = attempts
    message.version = EXT_JSON if headers or tag else EXT_NONE
    message.header = encode_headers(headers, tag=tag) if headers or tag else b""
    message.offset, message.size = offset, 0 if offset < 0 else 30 + len(body)
    message.body = body
    return message
