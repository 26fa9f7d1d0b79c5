"""Compress and decompress bodies as the Go client of the redesigned NSQ, with two extend headers that servers ignore.

``nsq.client.compress`` is ``1`` for gzip, ``2`` for a snappy block, ``3`` for an lz4 block, ``0`` or absent for a plain
body; ``nsq.msg.size`` is the uncompressed size in bytes. Snappy and lz4 need the ``snappy`` extra.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.layers import import_cramjam
from nsqext.protocol.messages import COMPRESS_HEADER
from nsqext.protocol.names import check_topic, check_topic_pattern, is_topic_pattern

__all__ = (
    "COMPRESS_HEADER",
    "MAX_UNPACKED",
    "SIZE_HEADER",
    "Codec",
    "Compression",
    "check_codec",
    "check_compression",
    "compress_body",
    "decompress_body",
    "is_compressed",
    "read_compression",
)

Codec = Literal["none", "gzip", "snappy", "lz4"]
Compression = Codec | Mapping[str, Codec]
"""A codec for all topics, or codecs by topic or pattern."""

_HINT = "give a codec, or codecs by topic: {'logs': 'snappy', 'events.*': 'gzip'}, in text logs=snappy,events.*=gzip"

SIZE_HEADER: Final = "nsq.msg.size"
MAX_UNPACKED: Final = 64 * 1024 * 1024
"""Default bound of a decompressed body, in bytes."""

# bytes that a byte of a block can unpack to: snappy copies 64 bytes with three, lz4 255 with a byte
_LARGEST_RATIO = {"snappy": 22, "lz4": 255}
_NUMBERS = {"gzip": "1", "snappy": "2", "lz4": "3"}
_GZIP = 16 + zlib.MAX_WBITS
_PIECE = 16 * 1024  # bytes


def check_codec(codec: str) -> None:
    """Raise InvalidSetting if a codec is unknown or not installed."""
    if codec in ("none", "gzip"):
        return
    if codec not in _NUMBERS:
        raise InvalidSetting(f"compression {codec!r} is unknown", hint="use none, gzip, snappy or lz4")
    import_cramjam(codec)


def read_compression(text: str) -> Compression:
    """Return the compression in a text: a codec, or ``topic=codec`` with commas; raises ValueError."""
    if "=" not in text:
        return cast("Codec", text)
    table: dict[str, Codec] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        topic, found, codec = map(str.strip, part.partition("="))
        if not found:
            raise ValueError("write topic=codec, with commas")
        if topic in table:
            raise ValueError(f"{topic!r} is given twice")
        table[topic] = cast("Codec", codec)
    return table


def check_compression(given: object) -> None:
    """Raise InvalidSetting or InvalidName if a codec or topic name is invalid."""
    if isinstance(given, str):
        check_codec(given)
        return
    if not isinstance(given, Mapping):
        raise InvalidSetting(f"compression is a {type(given).__name__}", hint=_HINT)
    for topic, codec in given.items():
        (check_topic_pattern if is_topic_pattern(topic) else check_topic)(topic)
        check_codec(codec)


def is_compressed(headers: Mapping[str, Any]) -> bool:
    """Return whether headers declare a compressed body."""
    return headers.get(COMPRESS_HEADER, "0") not in ("0", 0, "")


def compress_body(codec: Codec, body: bytes) -> tuple[bytes, dict[str, str]] | None:
    """Return the compressed body and its headers; None if it would not be smaller."""
    if codec == "none":
        return None
    if codec == "gzip":
        packer = zlib.compressobj(wbits=_GZIP)
        packed = packer.compress(body) + packer.flush()
    elif codec == "snappy":
        packed = bytes(import_cramjam(codec).snappy.compress_raw(body))
    else:
        packed = bytes(import_cramjam(codec).lz4.compress_block(body, store_size=False))
    if len(packed) >= len(body):
        return None
    return packed, {COMPRESS_HEADER: _NUMBERS[codec], SIZE_HEADER: str(len(body))}


def decompress_body(headers: Mapping[str, Any], body: bytes, limit: int = MAX_UNPACKED) -> bytes:
    """Return the decompressed body; unchanged without compression in the headers.

    Args:
        limit: largest decompressed size, in bytes.

    Raises:
        ProtocolError: unknown compression, damaged body, or more than ``limit`` bytes.
        InvalidSetting: a package is not installed.
    """
    if not is_compressed(headers):
        return body
    number = str(headers[COMPRESS_HEADER])
    size = _announced(headers, limit)
    if number == "1":
        unpacked = inflate(body, limit)
    elif number == "2":
        unpacked = _unsnap(body, limit)
    elif number == "3":
        unpacked = _unlz4(body, limit, size)
    else:
        raise ProtocolError(f"the compression of a body is unknown: {COMPRESS_HEADER} is {number[:40]!r}")
    if size is not None and len(unpacked) != size:
        raise ProtocolError(f"a compressed body unpacks to {len(unpacked)} bytes, its {SIZE_HEADER} says {size}")
    return unpacked


def _announced(headers: Mapping[str, Any], limit: int) -> int | None:
    text = str(headers.get(SIZE_HEADER, ""))
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ProtocolError(f"{SIZE_HEADER} of a compressed body is {text[:40]!r}, which is not a size")
    if int(text) > limit:
        raise _too_large(int(text), limit)
    return int(text)


def inflate(body: bytes, limit: int, encoding: str = "gzip") -> bytes:
    """Decompress deflate, or gzip of one or several members; raises ProtocolError beyond ``limit`` bytes."""
    wbits = _GZIP if encoding == "gzip" else zlib.MAX_WBITS
    unpacker, parts, size, position = zlib.decompressobj(wbits), list[bytes](), 0, 0
    while position < len(body):
        piece = body[position : position + _PIECE]  # what follows a member is copied: of thousands of them, each time
        try:
            part = unpacker.decompress(piece, limit + 1 - size)
        except zlib.error as error:
            raise ProtocolError(f"the body is not valid {encoding}: {error}") from error
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(size, limit)
        position += len(piece) - len(unpacker.unused_data)
        if unpacker.eof:
            if encoding != "gzip":
                break
            while body[position : position + 1] == b"\0":  # padding
                position += 1
            if position < len(body):
                unpacker = zlib.decompressobj(wbits)
    if not unpacker.eof:
        raise ProtocolError(f"the {encoding} body is cut off")
    return b"".join(parts)


def _unsnap(body: bytes, limit: int) -> bytes:
    cramjam = import_cramjam("snappy")
    try:
        size = cramjam.snappy.decompress_raw_len(body)
        if size > limit:
            raise _too_large(size, limit)
        if size > _LARGEST_RATIO["snappy"] * len(body):  # before the memory is allocated
            raise ProtocolError(f"a snappy body of {len(body)} bytes claims to unpack to {size}")
        return bytes(cramjam.snappy.decompress_raw(body))
    except (cramjam.DecompressionError, OSError) as error:
        raise ProtocolError(f"a snappy body cannot be read: {error}") from error


def _unlz4(body: bytes, limit: int, announced: int | None) -> bytes:
    cramjam = import_cramjam("lz4")
    # the block does not contain its size
    most = _LARGEST_RATIO["lz4"] * len(body)
    if announced is not None and announced > most:
        raise ProtocolError(f"an lz4 body of {len(body)} bytes claims to unpack to {announced}")
    unpacked = bytearray(min(limit, most) if announced is None else announced)
    try:
        size = cramjam.lz4.decompress_block_into(body, unpacked)
        return bytes(memoryview(unpacked)[:size])
    except (cramjam.DecompressionError, OSError) as error:
        raise ProtocolError(f"an lz4 body cannot be read: {error}") from error


def _too_large(size: int, limit: int) -> ProtocolError:
    return ProtocolError(
        f"a compressed body unpacks to {size} bytes or more; {limit} are allowed", hint="the sender may be hostile"
    )
