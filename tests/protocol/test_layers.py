"""The layers below the frames: recorded bytes, any chunking, bombs, broken peers."""

from __future__ import annotations

import os
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.frames import MAX_DECODED
from nsqext.protocol.layers import DeflateLayer, Layer, SnappyLayer
from tests.support.tables import table

OK = bytes.fromhex("00000006000000004f4b")
BODY = b"through the layer " + b"z" * 300
STREAM_START = bytes.fromhex("ff060000734e61507059")

# sent by a redesigned server, in the received pieces: OK, OK, OK, a message, an error
RECORDED_SNAPPY = tuple(
    map(
        bytes.fromhex,
        (
            "ff060000734e61507059010e000026982bcf00000006000000004f4b",
            "010e000026982bcf00000006000000004f4b",
            "010e000026982bcf00000006000000004f4b",
            (
                "00380000538a1ba264480000015c0000000218e9ebe96456ca280001000901000209075000007468726f75676820746865206c61"
                "796572207aba0100001400008e5039a6fc01007afe0100fe0100fe0100ea0100"
            ),
            "01380000119aa0a80000003000000001455f494e56414c494420696e76616c696420636f6d6d616e64205b5b36362037392037312038352038335d5d",
        ),
    )
)
RECORDED_DEFLATE = tuple(
    map(
        bytes.fromhex,
        (
            "6260606063606060f0f706000000ffff000000ffff",
            "42b000000000ffff",
            "42b000000000ffff000000ffff",
            "6260608c616060609278f9fa79fed265b50c8c0c10c004a5194a328af24bd333144a32521572122b538b14aa4601d100000000ffff",
            "6260603060606060748df7f40b73f4f17451c8cc2b4bccc94c5148cecfcd4dcc4b51888e36335330b754303754b03055b0308e8d05000000ffff",
        ),
    )
)
RECORDED_ERROR = b"\x00\x00\x00\x30\x00\x00\x00\x01E_INVALID invalid command [[66 79 71 85 83]]"

MAKERS: dict[str, Callable[[], Layer]] = {
    "deflate": DeflateLayer,
    "deflate-0": lambda: DeflateLayer(0),
    "deflate-9": lambda: DeflateLayer(9),
    "snappy": SnappyLayer,
}


def split(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """Cut data at the given places."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return (data[start:stop] for start, stop in pairwise(places))


@pytest.mark.parametrize(("layer", "recorded"), [(SnappyLayer(), RECORDED_SNAPPY), (DeflateLayer(), RECORDED_DEFLATE)])
def test_recorded_answers_of_the_real_server(layer: Layer, recorded: tuple[bytes, ...]) -> None:
    first, second, third, message, error = (layer.decode(piece) for piece in recorded)
    assert (first, second, third) == (OK, OK, OK)
    assert message.startswith(b"\x00\x00\x01\x5c\x00\x00\x00\x02")
    assert message.endswith(BODY)
    assert error == RECORDED_ERROR


def test_snappy_sends_what_the_recorded_client_sent() -> None:
    layer = SnappyLayer()
    command = b"SUB k_snappy_t_zqoz2bw8 ch 0\n"
    assert layer.encode(command) == STREAM_START + bytes.fromhex("01210000d3567bdb") + command
    assert layer.encode(b"RDY 1\n") == bytes.fromhex("010a00003e353fde") + b"RDY 1\n"


@pytest.mark.parametrize("name", MAKERS)
@given(pieces=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_encoded_bytes_are_decoded_in_any_chunks(name: str, pieces: list[bytes], cuts: list[int]) -> None:
    sender, receiver = MAKERS[name](), MAKERS[name]()
    wire = b"".join(sender.encode(piece) for piece in pieces)
    assert b"".join(receiver.decode(chunk) for chunk in split(wire, cuts)) == b"".join(pieces)


@pytest.mark.parametrize("name", MAKERS)
def test_each_encode_is_complete_for_the_peer(name: str) -> None:
    """The compressor never holds back a response until more is sent."""
    sender, receiver = MAKERS[name](), MAKERS[name]()
    for number in range(50):
        data = b"%d" % number + os.urandom(number) + b"a" * number * 100
        assert receiver.decode(sender.encode(data)) == data


@pytest.mark.parametrize("name", MAKERS)
def test_large_data_passes(name: str) -> None:
    data = os.urandom(1_000_000) + bytes(5_000_000)
    sender, receiver = MAKERS[name](), MAKERS[name]()
    assert receiver.decode(sender.encode(data)) == data


@pytest.mark.parametrize("name", ["deflate", "snappy"])
@given(data=st.binary(max_size=200), valid=st.booleans())
def test_any_bytes_give_bytes_or_a_protocol_error(name: str, data: bytes, valid: bool) -> None:
    layer = MAKERS[name]()
    if valid:
        layer.decode(MAKERS[name]().encode(b"begins well"))
    try:
        assert isinstance(layer.decode(data), bytes)
    except ProtocolError as error:
        assert name in str(error)


def deflate_bomb(size: int) -> bytes:
    """Return a stream of some MiB; each of them stands for itself, so that one is compressed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)) * size


def test_a_deflate_bomb_is_refused_within_the_limit() -> None:
    bomb = deflate_bomb(200)
    limit = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"more than {limit} bytes at once"):
            DeflateLayer(max_decoded=limit).decode(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * limit


def test_the_standard_limit_stops_a_deflate_bomb() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        DeflateLayer().decode(deflate_bomb(MAX_DECODED // (1 << 20) + 1))


def test_deflate_data_of_exactly_the_limit_passes() -> None:
    wire = DeflateLayer().encode(bytes(1000))
    assert DeflateLayer(max_decoded=1000).decode(wire) == bytes(1000)
    with pytest.raises(ProtocolError):
        DeflateLayer(max_decoded=999).decode(wire)


def test_the_end_of_a_deflate_stream_is_no_error_but_bytes_behind_it_are() -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    layer = DeflateLayer()
    assert layer.decode(packer.compress(b"bye") + packer.flush(zlib.Z_SYNC_FLUSH)) == b"bye"
    assert layer.decode(packer.flush()) == b""
    assert layer.decode(b"") == b""
    with pytest.raises(ProtocolError, match="follow the end"):
        layer.decode(b"more")
    with pytest.raises(ProtocolError, match="follow the end"):
        DeflateLayer().decode(zlib.compressobj(6, zlib.DEFLATED, -15).flush() + b"more")


@pytest.mark.parametrize("level", [-1, 10])
def test_deflate_levels_are_checked(level: int) -> None:
    with pytest.raises(InvalidSetting, match="deflate level"):
        DeflateLayer(level)


def test_a_snappy_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = SnappyLayer().encode(bytes(4 << 20))
    assert len(bomb) < 1 << 18
    with pytest.raises(ProtocolError, match="more than 1048576 bytes at once"):
        SnappyLayer(max_decoded=1 << 20).decode(bomb)


def test_a_snappy_chunk_that_announces_a_huge_size_is_refused() -> None:
    huge = b"\xff\xff\xff\xff\x0f" + b"x" * 10
    chunk = b"\x00" + (len(huge) + 4).to_bytes(3, "little") + bytes(4) + huge
    with pytest.raises(ProtocolError, match="announces 4294967295 bytes"):
        SnappyLayer().decode(STREAM_START + chunk)


def test_a_snappy_chunk_is_not_waited_for_when_it_is_too_long() -> None:
    with pytest.raises(ProtocolError, match="chunk of 16777215 bytes"):
        SnappyLayer().decode(STREAM_START + b"\x00\xff\xff\xff")


@table(
    ("wire", "text"),
    [
        (OK, "begins with a chunk of type 0x00"),
        (b"HTTP/1.1 400 Bad Request", "begins with a chunk of type 0x48"),
        (STREAM_START + b"\x02\x00\x00\x00", "unknown type 0x02"),
        (b"\xff\x07\x00\x00", "header of 7 bytes"),
        (b"\xff\x06\x00\x00sNaPpX", "has the header"),
        (STREAM_START + b"\x01\x05\x00\x00\x00\x00\x00\x00x", "bad checksum"),
        (STREAM_START + b"\x00\x04\x00\x00\x00\x00\x00\x00", "cannot be read|bad checksum"),
        (STREAM_START + b"\x01\x03\x00\x00", "chunk of 3 bytes"),
        (STREAM_START + b"\x00\x0e\x00\x00" + bytes(4) + b"\xff" * 10, "cannot be read.*invalid header"),
    ],
)
def test_broken_snappy_streams_are_errors(wire: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        SnappyLayer().decode(wire)


def test_snappy_padding_and_unknown_skippable_chunks_are_skipped_in_pieces() -> None:
    sender, receiver = SnappyLayer(), SnappyLayer()
    wire = sender.encode(b"one") + b"\xfe\x00\x00\x01" + bytes(65536) + b"\x80\x01\x00\x00x" + sender.encode(b"two")
    chunks = [receiver.decode(wire[start : start + 1000]) for start in range(0, len(wire), 1000)]
    assert b"".join(chunks) == b"onetwo"


def test_the_snappy_stream_may_begin_again() -> None:
    receiver = SnappyLayer()
    assert receiver.decode(SnappyLayer().encode(b"one") + SnappyLayer().encode(b"two")) == b"onetwo"


def test_snappy_is_readable_by_other_implementations() -> None:
    data = os.urandom(200_000)
    assert bytes(cramjam.snappy.decompress(SnappyLayer().encode(data))) == data
    assert SnappyLayer().decode(bytes(cramjam.snappy.compress(data))) == data


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(InvalidSetting, match=r"nsqext\[snappy\]"):
        SnappyLayer()
