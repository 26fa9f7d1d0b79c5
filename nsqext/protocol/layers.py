"""Compression between socket and frames, without I/O: snappy and deflate, for both roles.

IDENTIFY negotiates them; TLS is below them (captured: tls, snappy, deflate). A layer belongs to a connection and is
unusable after an error.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.frames import MAX_DECODED

if TYPE_CHECKING:
    from types import ModuleType


class Layer(Protocol):
    """Encode sent bytes and decode received bytes."""

    def encode(self, data: bytes) -> bytes:
        """Return the bytes to send for ``data``, which the peer can decode alone."""
        ...

    def decode(self, data: bytes) -> bytes:
        """Return the bytes that ``data``, cut anywhere, completes. Raises `ProtocolError`."""
        ...


class DeflateLayer:
    """A raw deflate stream in each direction, with a sync flush after each write; level 0 only stores."""

    __slots__ = ("_compressor", "_decompressor", "_max")

    def __init__(self, level: int = 6, *, max_decoded: int = MAX_DECODED) -> None:
        if not 0 <= level <= 9:
            raise InvalidSetting(f"deflate level {level!r} is not within 0..9")
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        self._max = max_decoded  # most bytes from one `decode`

    def encode(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decode(self, data: bytes) -> bytes:
        """Return the bytes that ``data`` completes; raises `ProtocolError`, also beyond ``max_decoded`` bytes."""
        stream = self._decompressor
        ended = stream.eof and data
        try:
            out = b"" if stream.eof else stream.decompress(data, self._max + 1)
        except zlib.error as error:
            raise ProtocolError(f"the deflate layer cannot be read: {error}") from error
        if len(out) > self._max or stream.unconsumed_tail:
            raise _too_much("deflate", self._max)
        if ended or stream.unused_data:
            raise ProtocolError("bytes follow the end of the deflate stream")
        return out


_STREAM_START = b"\xff\x06\x00\x00sNaPpY"
_COMPRESSED, _PLAIN, _START = 0x00, 0x01, 0xFF
_FIRST_SKIPPABLE = 0x80
_MAX_CHUNK = 64 * 1024
# with four bytes of checksum, and 64 KiB that snappy could not compress
_MAX_CHUNK_BODY = 4 + 32 + _MAX_CHUNK + _MAX_CHUNK // 6


class SnappyLayer:
    """The snappy framing format in each direction; needs ``nsqext[snappy]``."""

    __slots__ = ("_buffer", "_codec", "_compressor", "_error", "_max", "_skip", "_started")

    def __init__(self, *, max_decoded: int = MAX_DECODED) -> None:
        module = import_cramjam("snappy")
        self._codec = module.snappy
        self._compressor = module.snappy.Compressor()
        self._error: type[Exception] = module.DecompressionError
        self._buffer = bytearray()
        self._skip = 0
        self._started = False
        self._max = max_decoded  # most bytes from one `decode`

    def encode(self, data: bytes) -> bytes:
        self._compressor.compress(data)
        return bytes(self._compressor.flush())

    def decode(self, data: bytes) -> bytes:
        """Return the bytes of completed chunks; raises `ProtocolError`, also beyond ``max_decoded`` bytes."""
        self._buffer += data
        chunks = self._take_chunks()
        if not chunks:
            return b""
        try:
            return bytes(self._codec.decompress(_STREAM_START + chunks))
        except (self._error, OSError) as error:
            raise ProtocolError(f"the snappy layer cannot be read: {error}") from error

    def _take_chunks(self) -> bytes:
        """Remove and return the buffer's complete data chunks, with checked sizes."""
        buffer, position, total = self._buffer, 0, 0
        chunks: list[bytes] = []
        while True:
            if self._skip:
                skipped = min(self._skip, len(buffer) - position)
                self._skip -= skipped
                position += skipped
            if len(buffer) - position < 4:
                break
            kind = buffer[position]
            size = int.from_bytes(buffer[position + 1 : position + 4], "little")
            self._check(kind, size)
            if _FIRST_SKIPPABLE <= kind < _START:
                self._skip = size
                position += 4
                continue
            stop = position + 4 + size
            if stop > len(buffer):
                break
            chunk = bytes(buffer[position:stop])
            position = stop
            if kind == _START:
                self._start(chunk)
                continue
            total += self._announced(kind, chunk)
            if total > self._max:
                raise _too_much("snappy", self._max)
            chunks.append(chunk)
        del buffer[:position]
        return b"".join(chunks)

    def _check(self, kind: int, size: int) -> None:
        if not self._started and kind != _START:
            raise ProtocolError(
                f"the snappy stream begins with a chunk of type {kind:#04x}", hint="the peer may not use snappy"
            )
        if _START > kind >= _FIRST_SKIPPABLE:
            return
        if kind not in (_COMPRESSED, _PLAIN, _START):
            raise ProtocolError(f"the snappy stream has a chunk of the unknown type {kind:#04x}")
        if kind != _START and not 4 <= size <= _MAX_CHUNK_BODY:
            raise ProtocolError(f"the snappy stream has a chunk of {size} bytes, 4 to {_MAX_CHUNK_BODY} are allowed")
        if kind == _START and size != len(_STREAM_START) - 4:
            raise ProtocolError(f"the snappy stream has a header of {size} bytes")

    def _start(self, chunk: bytes) -> None:
        if chunk != _STREAM_START:
            raise ProtocolError(f"the snappy stream has the header {chunk!r}")
        self._started = True

    def _announced(self, kind: int, chunk: bytes) -> int:
        size = len(chunk) - 8
        if kind == _COMPRESSED:
            try:
                size = self._codec.decompress_raw_len(chunk[8:])
            except self._error as error:
                raise ProtocolError(f"the snappy layer cannot be read: {error}") from error
        if size > _MAX_CHUNK:
            raise ProtocolError(f"a snappy chunk announces {size} bytes, at most {_MAX_CHUNK} are allowed")
        return size


def _too_much(name: str, limit: int) -> ProtocolError:
    return ProtocolError(f"the {name} layer unpacks to more than {limit} bytes at once", hint="the peer may be hostile")


def import_cramjam(codec: str) -> ModuleType:
    """Import the package for snappy and lz4; raises `InvalidSetting`, which names the codec."""
    try:
        import cramjam
    except ImportError as error:
        raise InvalidSetting(
            f"{codec} needs a package that is not installed", hint="pip install 'nsqext[snappy]'"
        ) from error
    return cramjam
