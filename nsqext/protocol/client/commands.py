"""Commands as a client writes them: ``NAME words\\n``, some with a sized body behind.

Arguments are not checked; callers check them (`nsqext.protocol.names`). Publish commands are built
from a line that is made once for each topic and partition, because that is all that changes between two publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from struct import Struct

from nsqext.errors import InvalidBody

__all__ = (
    "CLS",
    "DEFAULT_MAX_BODY_SIZE",
    "DEFAULT_MAX_MESSAGE_SIZE",
    "NOP",
    "auth",
    "check_body",
    "ext_body",
    "fin",
    "identify",
    "multi",
    "publish_line",
    "rdy",
    "req",
    "sized",
    "sub",
    "touch",
    "trace_body",
)

NOP = b"NOP\n"
CLS = b"CLS\n"

DEFAULT_MAX_MESSAGE_SIZE = 1024 * 1024
"""Bytes of one message that servers take by default; trace id and header count against it.

Captured: pub_max_size.
"""
DEFAULT_MAX_BODY_SIZE = 5 * 1024 * 1024
"""Bytes of one batch that servers take by default, its count word included."""

_SMALL = 4096

_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")


def sized(line: bytes, body: bytes) -> bytes:
    """Return a command line with a body behind it."""
    return b"%b%b%b" % (line, _U32.pack(len(body)), body)


def identify(body: bytes) -> bytes:
    """IDENTIFY with its JSON body."""
    return sized(b"IDENTIFY\n", body)


def auth(secret: bytes) -> bytes:
    """AUTH with its secret."""
    return sized(b"AUTH\n", secret)


def publish_line(verb: str, topic: str, partition: int = -1, *, delay: float | None = None) -> bytes:
    """Return the line of a publish command (PUB, MPUB, PUB_TRACE, MPUB_TRACE, PUB_EXT, MPUB_EXT, DPUB).

    Args:
        verb: name of the command.
        topic: name of the topic.
        partition: left out when negative, as the original NSQ wants it.
        delay: seconds, for DPUB only, sent in milliseconds.
    """
    if delay is not None:
        return b"%b %b %d\n" % (verb.encode(), topic.encode(), round(delay * 1000))
    if partition < 0:
        return b"%b %b\n" % (verb.encode(), topic.encode())
    return b"%b %b %d\n" % (verb.encode(), topic.encode(), partition)


def trace_body(trace_id: int, body: bytes) -> bytes:
    """Body of PUB_TRACE, or an item of MPUB_TRACE."""
    return _U64.pack(trace_id) + body


def ext_body(header: bytes, body: bytes) -> bytes:
    """Body of PUB_EXT, or an item of MPUB_EXT; only MPUB_EXT takes an empty header (captured: pub_ext_errors)."""
    return b"%b%b%b" % (_U16.pack(len(header)), header, body)


def multi(line: bytes, items: Sequence[bytes], sizes: Sequence[int] | int | None = None) -> bytes:
    """A command of the MPUB family, put together in one piece: line, size, count, then every item with its size.

    Args:
        line: the command line.
        items: the messages.
        sizes: their lengths, or the one length of them all, where the caller has it.
    """
    count = len(items)
    if isinstance(sizes, int):
        # joined by the word that they share: a third of the time of the general way
        word = _U32.pack(sizes)
        head = b"%b%b%b" % (line, _U32.pack(4 + (4 + sizes) * count), _U32.pack(count))
        return word.join((head, *items))
    if sizes is None:
        sizes = list(map(len, items))
    parts = [b"%b%b%b" % (line, _U32.pack(4 + 4 * count + sum(sizes)), _U32.pack(count))] * (2 * count + 1)
    if count > 1 and max(sizes) < _SMALL:
        parts[1::2] = itemgetter(*sizes)(_small_words())
    else:
        parts[1::2] = map(_U32.pack, sizes)
    parts[2::2] = items
    return b"".join(parts)


@cache
def _small_words() -> tuple[bytes, ...]:
    """Return the size words of small items: to look them all up at once takes a fifth of packing them."""
    return tuple(map(_U32.pack, range(_SMALL)))


def check_body(body: bytes, limit: int = DEFAULT_MAX_MESSAGE_SIZE, overhead: int = 0) -> bytes:
    """Return the body of one message; raise `InvalidBody` when no server would take it.

    Args:
        body: what is to be published.
        limit: largest message the server takes, in bytes.
        overhead: bytes of trace id and header, which count against the limit.
    """
    if not isinstance(body, bytes):
        raise InvalidBody(f"a body has to be bytes, not {type(body).__name__}", hint="encode it first")
    if not body:
        raise InvalidBody("a body cannot be empty", hint="servers refuse empty messages")
    if len(body) + overhead > limit:
        raise InvalidBody(
            f"a body of {len(body)} bytes (with {overhead} bytes of trace id and headers) is larger than {limit}",
            hint="send less, or raise max_message_size here and on the servers",
        )
    return body


def sub(topic: str, channel: str, partition: int = -1, *, verb: str = "SUB", start: str | None = None) -> bytes:
    """SUB, SUB_ADVANCED or SUB_ORDERED.

    Args:
        topic: name of the topic.
        channel: name of the channel.
        partition: left out when negative, as the original NSQ wants it.
        verb: which of the three.
        start: start position of SUB_ADVANCED, ``kind:number``. A server that gets one ignores the partition word
            (captured: sub_advanced_offset_partition).
    """
    words = [verb, topic, channel]
    if partition >= 0 or start is not None:
        words.append(str(partition))
    if start is not None:
        words.append(start)
    return " ".join(words).encode() + b"\n"


def rdy(count: int) -> bytes:
    """RDY: how many messages may be in flight."""
    return b"RDY %d\n" % count


def fin(message_id: bytes) -> bytes:
    """FIN of 16 raw id bytes (which may hold blanks and newlines)."""
    return b"FIN %b\n" % message_id


def req(message_id: bytes, delay_ms: int = 0) -> bytes:
    """REQ with a delay in milliseconds."""
    return b"REQ %b %d\n" % (message_id, delay_ms)


def touch(message_id: bytes) -> bytes:
    """TOUCH: restart the message timeout."""
    return b"TOUCH %b\n" % message_id
