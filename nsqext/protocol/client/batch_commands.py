"""Encode commands of many messages: MPUB, MPUB_TRACE and MPUB_EXT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import add, itemgetter
from struct import Struct

from nsqext.protocol.client.commands import LARGE, Command, LargeCommand

__all__ = ("multi", "multi_ext", "multi_packed", "multi_trace")

_SMALL = 4096
_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")
_SIZE_AND_TRACE = Struct(">IQ")
_SIZE_AND_LENGTH = Struct(">IH")


def multi(line: bytes, bodies: Sequence[bytes], sizes: Sequence[int] | int | None = None) -> Command:
    """Return MPUB: line, size, count, then each body with its size.

    Args:
        sizes: lengths, or the common length, if known.
    """
    count = len(bodies)
    if isinstance(sizes, int):
        if sizes < LARGE:
            # joined by the size word, in a third of the general case's time
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
    """Return MPUB_EXT: as `multi` with a header, which may be empty, before each body (captured: pub_ext_errors)."""
    lengths = list(map(len, headers))
    sizes = [_U16.size + length + len(body) for length, body in zip(lengths, bodies, strict=True)]
    return _multi(line, sizes, map(add, map(_SIZE_AND_LENGTH.pack, sizes, lengths), headers), bodies)


def multi_packed(line: bytes, items: Sequence[bytes | memoryview], count: int) -> bytes:
    """Return a command of encoded items, each with its size."""
    return b"".join((line, _U32.pack(4 + sum(map(len, items))), _U32.pack(count), *items))


def _multi(line: bytes, sizes: Sequence[int], heads: Iterable[bytes], bodies: Sequence[bytes]) -> Command:
    """Return a command from item sizes, bytes before bodies, and bodies."""
    count = len(bodies)
    parts = [b"%b%b%b" % (line, _U32.pack(4 + 4 * count + sum(sizes)), _U32.pack(count))] * (2 * count + 1)
    parts[1::2] = heads
    parts[2::2] = bodies
    return LargeCommand(*parts) if max(sizes, default=0) >= LARGE else b"".join(parts)


@cache
def _small_words() -> tuple[bytes, ...]:
    """Return the size words of small items; a look-up takes a fifth of the time of packing."""
    return tuple(map(_U32.pack, range(_SMALL)))
