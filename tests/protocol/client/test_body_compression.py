"""Compressed bodies: round trips, and bounds for hostile ones."""

from __future__ import annotations

import gzip
from types import SimpleNamespace
from typing import Any, get_args

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.client import body_compression
from nsqext.protocol.client.body_compression import (
    COMPRESS_HEADER,
    SIZE_HEADER,
    Codec,
    check_codec,
    compress_body,
    decompress_body,
    inflate,
    is_compressed,
)

_CODECS: tuple[Codec, ...] = tuple(codec for codec in get_args(Codec) if codec != "none")
_BODY = b"all work and no play " * 2000


@pytest.mark.parametrize(("codec", "number"), [("gzip", "1"), ("snappy", "2"), ("lz4", "3")])
def test_a_compressed_body_names_codec_and_size(codec: Codec, number: str) -> None:
    packed = compress_body(codec, _BODY)
    assert packed is not None
    body, headers = packed
    assert headers == {COMPRESS_HEADER: number, SIZE_HEADER: str(len(_BODY))}
    assert len(body) < len(_BODY) / 4
    assert is_compressed(headers)
    assert decompress_body(headers, body) == _BODY


@pytest.mark.parametrize("codec", _CODECS)
@given(body=st.binary(min_size=1, max_size=3000))
def test_bodies_round_trip(codec: Codec, body: bytes) -> None:
    packed = compress_body(codec, body * 3)
    if packed is not None:
        assert decompress_body(packed[1], packed[0]) == body * 3


@pytest.mark.parametrize("codec", _CODECS)
def test_a_body_that_would_not_be_smaller_is_not_compressed(codec: Codec) -> None:
    assert compress_body(codec, b"x") is None
    assert compress_body("none", _BODY) is None


def test_plain_bodies_are_unchanged() -> None:
    assert decompress_body({}, b"x") == b"x"
    assert decompress_body({COMPRESS_HEADER: "0", SIZE_HEADER: "1"}, b"x") == b"x"


def test_a_size_may_be_missing() -> None:
    assert decompress_body({COMPRESS_HEADER: "1"}, gzip.compress(_BODY)) == _BODY
    packed = compress_body("snappy", _BODY)
    assert packed is not None
    assert decompress_body({COMPRESS_HEADER: 2}, packed[0]) == _BODY


@pytest.mark.parametrize("codec", _CODECS)
@given(damaged=st.binary(max_size=200))
def test_damage_is_a_protocol_error(codec: Codec, damaged: bytes) -> None:
    packed = compress_body(codec, _BODY)
    assert packed is not None
    with pytest.raises(ProtocolError):
        decompress_body(packed[1], packed[0][:-7] + damaged[:3])


@pytest.mark.parametrize("codec", _CODECS)
def test_a_bomb_stays_small(codec: Codec) -> None:
    packed = compress_body(codec, b"\0" * 5_000_000)
    assert packed is not None
    with pytest.raises(ProtocolError, match="allowed"):
        decompress_body(packed[1], packed[0], limit=100_000)
    lying = packed[1] | {SIZE_HEADER: "100"}
    with pytest.raises(ProtocolError):
        decompress_body(lying, packed[0], limit=100_000)


class _Recording:
    """Replaces cramjam's ``lz4`` and ``snappy``; records the number of bytes allocated for the result."""

    def __init__(self, inner: Any, allocated: list[int]) -> None:
        self._inner = inner
        self._allocated = allocated

    def decompress_block_into(self, body: bytes, output: bytearray) -> int:
        self._allocated.append(len(output))
        size: int = self._inner.decompress_block_into(body, output)
        return size

    def decompress_raw(self, body: bytes) -> Any:
        self._allocated.append(self._inner.decompress_raw_len(body))
        return self._inner.decompress_raw(body)

    def decompress_raw_len(self, body: bytes) -> int:
        size: int = self._inner.decompress_raw_len(body)
        return size


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of allocations for unpacked bodies."""
    sizes: list[int] = []
    fake = SimpleNamespace(
        snappy=_Recording(cramjam.snappy, sizes),
        lz4=_Recording(cramjam.lz4, sizes),
        DecompressionError=cramjam.DecompressionError,
    )
    monkeypatch.setattr(body_compression, "import_cramjam", lambda codec: fake)
    return sizes


def test_a_small_body_allocates_little(allocated: list[int]) -> None:
    """This holds for any announced size, and without one."""
    body = bytes(cramjam.lz4.compress_block(bytes(1000), store_size=False))
    assert decompress_body({COMPRESS_HEADER: "3"}, body) == bytes(1000)
    assert allocated == [255 * len(body)]
    allocated.clear()
    for headers in ({COMPRESS_HEADER: "3", SIZE_HEADER: "60000000"}, {COMPRESS_HEADER: "2"}):
        with pytest.raises(ProtocolError, match="claims to unpack to"):
            decompress_body(headers, b"\x80\x80\x80\x10" + b"\0" * 16)
    assert allocated == []


@pytest.mark.parametrize("codec", _CODECS)
@pytest.mark.parametrize("size", [1000, 100_000, 10_000_000])
def test_the_best_ratio_of_each_codec_is_accepted(codec: Codec, size: int) -> None:
    packed = compress_body(codec, bytes(size))
    assert packed is not None
    body, headers = packed
    assert decompress_body(headers, body) == bytes(size)
    assert decompress_body({COMPRESS_HEADER: headers[COMPRESS_HEADER]}, body) == bytes(size)


@pytest.mark.parametrize("codec", _CODECS)
@pytest.mark.parametrize("size", [0, 999, 1001])
def test_a_size_that_is_not_that_of_the_body_is_refused(codec: Codec, size: int) -> None:
    packed = compress_body(codec, bytes(1000))
    assert packed is not None
    with pytest.raises(ProtocolError):
        decompress_body(packed[1] | {SIZE_HEADER: str(size)}, packed[0])


@pytest.mark.parametrize(
    "headers",
    [{COMPRESS_HEADER: "9"}, {COMPRESS_HEADER: "1", SIZE_HEADER: "-1"}, {COMPRESS_HEADER: "1", SIZE_HEADER: "x" * 90}],
)
def test_invalid_headers_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ProtocolError):
        decompress_body(headers, gzip.compress(b"x"))


def test_unknown_codecs_are_refused() -> None:
    for codec in get_args(Codec):
        check_codec(codec)
    with pytest.raises(InvalidSetting, match="zstd"):
        check_codec("zstd")


def test_the_limit_of_a_decompressed_body_is_its_largest_size() -> None:
    body = gzip.compress(b"x" * 100)
    assert inflate(body, 100) == b"x" * 100
    with pytest.raises(ProtocolError, match="99 are allowed"):
        inflate(body, 99)


def test_a_gzip_body_of_several_members_is_decompressed_whole() -> None:
    """Only the first was, without an error."""
    first, second = b"one" * 20_000, bytes(range(256)) * 100
    body = gzip.compress(first) + gzip.compress(b"") + gzip.compress(second, 0) + bytes(5)
    assert inflate(body, 85_600) == first + second
    with pytest.raises(ProtocolError, match="85599 are allowed"):
        inflate(body, 85_599)
    for bad, reason in ((body[:-9], "is cut off"), (body + b"x", "is cut off"), (body + b"rest", "is not valid gzip")):
        with pytest.raises(ProtocolError, match=reason):
            inflate(bad, 100_000)
