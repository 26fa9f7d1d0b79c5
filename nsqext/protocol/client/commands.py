"""Encode commands of the client (``NAME words\\n``, some with a sized body), and queue what is not sent yet.

The caller has checked the arguments (`nsqext.protocol.names`).
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING

from nsqext.errors import InvalidBody

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nsqext.protocol.layers import Layer

__all__ = (
    "CLS",
    "DEFAULT_MAX_BODY_SIZE",
    "DEFAULT_MAX_MESSAGE_SIZE",
    "LARGE",
    "NOP",
    "Command",
    "LargeCommand",
    "SendQueue",
    "auth",
    "check_body",
    "fin",
    "identify",
    "publish_ext",
    "publish_line",
    "publish_trace",
    "rdy",
    "req",
    "sized",
    "sub",
    "touch",
    "with_body",
)

NOP = b"NOP\n"
CLS = b"CLS\n"

DEFAULT_MAX_MESSAGE_SIZE = 1024 * 1024
"""Largest message that servers accept by default, in bytes with trace id and header (captured in pub_max_size)."""
DEFAULT_MAX_BODY_SIZE = 5 * 1024 * 1024
"""Largest batch that servers accept by default, in bytes with its count word."""

TRACE_SIZE = 8
"""Bytes of a trace id."""
HEADER_LENGTH = 2
"""Bytes of the length before an extend header."""

LARGE = 65536
"""Bytes from which a separate body is cheaper than a copy."""
_JOINED = 262144  # bytes of small commands in a part

_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")
_SIZE_AND_TRACE = Struct(">IQ")
_SIZE_AND_LENGTH = Struct(">IH")


class LargeCommand:
    """A command with large bodies, which are sent without a copy."""

    __slots__ = ("parts",)

    def __init__(self, *parts: bytes) -> None:
        self.parts: tuple[bytes, ...] = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Command = bytes | LargeCommand


class SendQueue:
    """Commands that the kernel has not accepted, in parts.

    Small commands are joined, large bodies are separate parts. Each system call gets a bounded number of parts: copies
    and calls are linear in bytes and commands, however few bytes the kernel accepts at a time.
    """

    __slots__ = ("_encoded", "_parts", "begun")

    def __init__(self) -> None:
        # with the number of commands that begin in each part
        self._parts: deque[tuple[bytes | memoryview, int]] = deque()
        self._encoded = False
        self.begun: int = 0  #: commands of a partly sent first part, else 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, commands: Iterable[Command]) -> None:
        small: list[bytes] = []
        size = begin = 0
        for command in commands:
            begins = 1
            for part in command.parts if isinstance(command, LargeCommand) else (command,):
                if len(part) >= LARGE:
                    self._join(small, begin)
                    self._parts.append((part, begins))
                    size = begin = 0
                else:
                    small.append(part)
                    size += len(part)
                    begin += begins
                    if size >= _JOINED:
                        self._join(small, begin)
                        size = begin = 0
                begins = 0
        self._join(small, begin)

    def append(self, data: bytes, commands: int) -> None:
        """Keep bytes as they are, without a further `encode`; nothing else is kept."""
        self._parts.append((data, commands))
        self._encoded = True

    def _join(self, small: list[bytes], begin: int) -> None:
        if small:
            self._parts.append((b"".join(small), begin))
            small.clear()

    def encode(self, layers: Sequence[Layer]) -> None:
        """Encode the first part, once."""
        if not self._encoded:
            part, count = self._parts[0]
            data = bytes(part)
            for layer in reversed(layers):
                data = layer.encode(data)
            self._parts[0] = (data, count)
            self._encoded = True

    def first(self, count: int) -> list[bytes | memoryview]:
        return [part for part, _ in islice(self._parts, count)]

    def sent(self, size: int) -> int:
        """Remove sent bytes; return the number of commands in the completed parts."""
        parts = self._parts
        commands = 0
        while parts:
            part, count = parts[0]
            if size < len(part):
                if size:
                    parts[0] = (memoryview(part)[size:], count)
                    self.begun = count
                break
            parts.popleft()
            size -= len(part)
            commands += count
            self.begun = 0
            self._encoded = False
        return commands


def with_body(head: bytes, body: bytes) -> Command:
    """Return a command that ends with a body."""
    return head + body if len(body) < LARGE else LargeCommand(head, body)


def sized(line: bytes, body: bytes) -> bytes:
    """Return a command line followed by a sized body."""
    return b"%b%b%b" % (line, _U32.pack(len(body)), body)


def identify(body: bytes) -> bytes:
    """Return IDENTIFY."""
    return sized(b"IDENTIFY\n", body)


def auth(secret: bytes) -> bytes:
    """Return AUTH."""
    return sized(b"AUTH\n", secret)


def publish_line(verb: str, topic: str, partition: int | None = None, *, delay: float | None = None) -> bytes:
    """Return the line of a publish command.

    Args:
        partition: None for the original NSQ.
        delay: seconds, only for DPUB.
    """
    if delay is not None:
        return b"%b %b %d\n" % (verb.encode(), topic.encode(), round(delay * 1000))
    if partition is None:
        return b"%b %b\n" % (verb.encode(), topic.encode())
    return b"%b %b %d\n" % (verb.encode(), topic.encode(), partition)


def publish_trace(line: bytes, trace_id: int, body: bytes) -> Command:
    """Return PUB_TRACE."""
    return with_body(line + _SIZE_AND_TRACE.pack(_U64.size + len(body), trace_id), body)


def publish_ext(line: bytes, header: bytes, body: bytes) -> Command:
    """Return PUB_EXT; its header is not empty."""
    length = len(header)
    sizes = _SIZE_AND_LENGTH.pack(_U16.size + length + len(body), length)
    return with_body(b"%b%b%b" % (line, sizes, header), body)


def check_body(body: bytes, limit: int = DEFAULT_MAX_MESSAGE_SIZE, overhead: int = 0) -> bytes:
    """Return a message body; raise `InvalidBody` if servers do not accept it.

    Args:
        limit: largest message of the server, in bytes with trace id and header.
        overhead: bytes of trace id and header.
    """
    if not isinstance(body, bytes):
        hint = "encode it first"
        if hasattr(body, "body"):
            hint = "give its body, and headers, tag, trace_id and key as keywords, or use publish_many"
        raise InvalidBody(f"a body must be bytes, not {type(body).__name__}", hint=hint)
    if not body:
        raise InvalidBody("a body cannot be empty", hint="servers refuse empty messages")
    if len(body) + overhead > limit:
        raise InvalidBody(
            f"a body of {len(body)} bytes (with {overhead:d} bytes of trace id and headers) is larger than {limit}",
            hint="send less, or raise max_message_size in this client and on the servers",
        )
    return body


def sub(
    topic: str, channel: str, partition: int | None = None, *, verb: str = "SUB", start: str | None = None
) -> bytes:
    """Return SUB, SUB_ADVANCED or SUB_ORDERED.

    Args:
        partition: None for the original NSQ.
        start: start position of SUB_ADVANCED, ``kind:number``, with which servers ignore the partition (captured:
            sub_advanced_offset_partition).
    """
    words = [verb, topic, channel]
    if partition is not None or start is not None:
        words.append("-1" if partition is None else str(partition))
    if start is not None:
        words.append(start)
    return " ".join(words).encode() + b"\n"


def rdy(count: int) -> bytes:
    """Return RDY, the largest number of messages in flight."""
    return b"RDY %d\n" % count


def fin(message_id: bytes) -> bytes:
    """Return FIN of 16 raw bytes, maybe with spaces and newlines."""
    return b"FIN %b\n" % message_id


def req(message_id: bytes, delay_ms: int = 0) -> bytes:
    """Return REQ."""
    return b"REQ %b %d\n" % (message_id, delay_ms)


def touch(message_id: bytes) -> bytes:
    """Return TOUCH, which restarts the message timeout."""
    return b"TOUCH %b\n" % message_id
