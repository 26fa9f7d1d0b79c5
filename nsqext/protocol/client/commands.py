"""Encode commands of the client: ``NAME words\\n``, some followed by a sized body.

The caller has checked the arguments (`nsqext.protocol.names`). Each topic and partition has one publish line, made
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import add, itemgetter
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
    "multi",
    "multi_ext",
    "multi_trace",
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
_SMALL = 4096

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


def multi(line: bytes, bodies: Sequence[bytes], sizes: Sequence[int] | int | None = None) -> Command:
    """Return MPUB: line, size, count, then each body with its size.

    Args:
        sizes: their lengths, or their common length, if known.
    """
    count = len(bodies)
    if isinstance(sizes, int):
        if sizes < LARGE:
            # joined by their common size word, in a third of the general case's time
            head = b"%b%b%b" % (line, _U32.pack(4 + (4 + sizes) * count), _U32.pack(count))
            return _U32.pack(sizes).join((head, *bodies))
        sizes = [sizes] * count
    if sizes is None:
        sizes = list(map(len, bodies))
    if count > 1 and max(sizes) < _SMALL:
        return _multi(line, sizes, itemgetter(*sizes)(_small_words()), bodies)
    return _multi(line, sizes, map(_U32.pack, sizes), bodies)


def multi_trace(line: bytes, trace_ids: Sequence[int], bodies: Sequence[bytes]) -> Command:
    """Return MPUB_TRACE: as `multi` with a trace id before each body."""
    sizes = [len(body) + _U64.size for body in bodies]
    return _multi(line, sizes, map(_SIZE_AND_TRACE.pack, sizes, trace_ids), bodies)


def multi_ext(line: bytes, headers: Sequence[bytes], bodies: Sequence[bytes]) -> Command:
    """Return MPUB_EXT: as `multi` with a header before each body.

    A header may be empty, unlike in PUB_EXT (captured: pub_ext_errors).
    """
    lengths = list(map(len, headers))
    sizes = [_U16.size + length + len(body) for length, body in zip(lengths, bodies, strict=True)]
    return _multi(line, sizes, map(add, map(_SIZE_AND_LENGTH.pack, sizes, lengths), headers), bodies)


def _multi(line: bytes, sizes: Sequence[int], heads: Iterable[bytes], bodies: Sequence[bytes]) -> Command:
    """Return a command of the MPUB family from item sizes, bytes before bodies, and bodies."""
    count = len(bodies)
    parts = [b"%b%b%b" % (line, _U32.pack(4 + 4 * count + sum(sizes)), _U32.pack(count))] * (2 * count + 1)
    parts[1::2] = heads
    parts[2::2] = bodies
    return LargeCommand(*parts) if max(sizes, default=0) >= LARGE else b"".join(parts)


@cache
def _small_words() -> tuple[bytes, ...]:
    """Return the size words of small items; look-ups take a fifth of the time of packing."""
    return tuple(map(_U32.pack, range(_SMALL)))


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
