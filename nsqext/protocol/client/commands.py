"""Encode commands of the client: ``NAME words\\n``, some followed by a sized body.

The caller has checked the arguments (`nsqext.protocol.names`). Each topic and partition has one publish line, made
once.
"""

from __future__ import annotations

from struct import Struct

from nsqext.errors import InvalidBody

__all__ = (
    "CLS",
    "DEFAULT_MAX_BODY_SIZE",
    "DEFAULT_MAX_MESSAGE_SIZE",
    "LARGE",
    "NOP",
    "Command",
    "LargeCommand",
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
"""Largest message that servers accept by default, in bytes with trace id and header.

Captured: pub_max_size.
"""
DEFAULT_MAX_BODY_SIZE = 5 * 1024 * 1024
"""Largest batch that servers accept by default, in bytes with its count word."""

TRACE_SIZE = 8
"""Bytes of a trace id in front of a body."""
HEADER_LENGTH = 2
"""Bytes of the length in front of an extend header."""

LARGE = 65536
"""Bytes from which sending a body separately is cheaper than a copy."""

_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")
_SIZE_AND_TRACE = Struct(">IQ")
_SIZE_AND_LENGTH = Struct(">IH")


class LargeCommand:
    """A command with large bodies, which are sent without a copy.

    Args:
        parts: bytes in the order of sending; large parts are not joined with others.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: bytes) -> None:
        self.parts: tuple[bytes, ...] = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Command = bytes | LargeCommand


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
    """Return the line of a publish command (PUB, MPUB, PUB_TRACE, MPUB_TRACE, PUB_EXT, MPUB_EXT, DPUB).

    Args:
        partition: None for the original NSQ.
        delay: seconds, only for DPUB, sent in milliseconds.
    """
    if delay is not None:
        return b"%b %b %d\n" % (verb.encode(), topic.encode(), round(delay * 1000))
    if partition is None:
        return b"%b %b\n" % (verb.encode(), topic.encode())
    return b"%b %b %d\n" % (verb.encode(), topic.encode(), partition)


def publish_trace(line: bytes, trace_id: int, body: bytes) -> Command:
    """Return PUB_TRACE of one message."""
    return with_body(line + _SIZE_AND_TRACE.pack(_U64.size + len(body), trace_id), body)


def publish_ext(line: bytes, header: bytes, body: bytes) -> Command:
    """Return PUB_EXT of one message; its header is not empty."""
    length = len(header)
    sizes = _SIZE_AND_LENGTH.pack(_U16.size + length + len(body), length)
    return with_body(b"%b%b%b" % (line, sizes, header), body)


def check_body(body: bytes, limit: int = DEFAULT_MAX_MESSAGE_SIZE, overhead: int = 0) -> bytes:
    """Return a message body; raise `InvalidBody` if servers do not accept it.

    Args:
        limit: largest message of the server, in bytes.
        overhead: bytes of trace id and header, which count against the limit.
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
        partition: the partition; None at the original NSQ.
        start: start position of SUB_ADVANCED, ``kind:number``; with it, servers ignore the partition (captured:
            sub_advanced_offset_partition).
    """
    words = [verb, topic, channel]
    if partition is not None or start is not None:
        words.append("-1" if partition is None else str(partition))
    if start is not None:
        words.append(start)
    return " ".join(words).encode() + b"\n"


def rdy(count: int) -> bytes:
    """Return RDY, the allowed number of messages in flight."""
    return b"RDY %d\n" % count


def fin(message_id: bytes) -> bytes:
    """Return FIN of 16 raw id bytes, which may contain spaces and newlines."""
    return b"FIN %b\n" % message_id


def req(message_id: bytes, delay_ms: int = 0) -> bytes:
    """Return REQ with a delay in milliseconds."""
    return b"REQ %b %d\n" % (message_id, delay_ms)


def touch(message_id: bytes) -> bytes:
    """Return TOUCH, which restarts the message timeout."""
    return b"TOUCH %b\n" % message_id
