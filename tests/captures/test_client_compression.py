"""Bodies and headers between this client and the Go and Java clients of the redesigned NSQ, recorded."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import orjson

from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER, Codec, compress_body, decompress_body
from nsqext.protocol.headers import decode_headers
from tests.support.tables import table

_RECORDS = orjson.loads((Path(__file__).parent / "data" / "client_compression.json").read_bytes())
_MIXED = orjson.loads((Path(__file__).parent / "data" / "mixed_clients.json").read_bytes())
_CODECS: dict[str, Codec] = {"1": "gzip", "2": "snappy", "3": "lz4"}


def _told(number: int) -> bytes:
    return b"all work and no play %d " % number * (40 * (number + 1))


def test_every_codec_was_recorded() -> None:
    recorded = [decode_headers(record["header"].encode())[COMPRESS_HEADER] for record in _RECORDS]
    assert sorted(recorded) == ["1"] * 3 + ["2"] * 3 + ["3"] * 3


@table("record", _RECORDS)
def test_bodies_compressed_by_the_go_client_are_restored(record: dict[str, str]) -> None:
    headers = decode_headers(record["header"].encode())
    body = _told(int(headers["k"][1:]))
    assert int(headers[SIZE_HEADER]) == len(body)
    assert decompress_body(headers, b64decode(record["body"])) == body
    packed = compress_body(_CODECS[headers[COMPRESS_HEADER]], body)
    assert packed is not None
    # written by this package with the same headers; the Go client could read them too
    assert packed[1] == {name: headers[name] for name in (COMPRESS_HEADER, SIZE_HEADER)}


@table("sent", _MIXED["compressed_by_nsqext"])
def test_the_go_client_unpacks_bodies_of_this_client_and_the_java_sdk_does_not(sent: dict[str, Any]) -> None:
    body, packed = bytes.fromhex(sent["received_by_go"]), bytes.fromhex(sent["received_by_java"])
    assert decompress_body(sent["headers"], packed) == body
    assert compress_body(sent["headers"]["codec"], body) is not None


@table("received", _MIXED["compressed_by_go"])
def test_the_java_sdk_does_not_unpack_bodies_of_the_go_client(received: dict[str, Any]) -> None:
    headers, packed = received["headers"], bytes.fromhex(received["received_by_java"])
    assert packed in {b64decode(record["body"]) for record in _RECORDS}
    assert decompress_body(headers, packed) == _told(int(headers["k"][1:]))


@table(
    ("body", "values"),
    [
        ("java 0", {"tenant": 7, "flag": True, "name": "cut \ufffd"}),
        ("java 1", {"s": "text", "e": "emoji 😀 é 中", "n": None}),
        ("java 2", {"big": 1 << 64, "neg": -(1 << 63), "max": (1 << 63) - 1}),
        ("java 3", {"d": 1.5, "e": 1e300, "nan": "NaN", "inf": "Infinity", "dec": 0.1}),
        ("java 4", {"l": [1, "x", None], "o": {"k": {"j": 2}}, "bytes": "AQID"}),
        ("java 5", {"quote": 'a"b\\c/\n\t\x01\x7f\u2028'}),
        ("java tagged", {"k": "v", "##client_dispatch_tag": "blue"}),
        ("java plain", {}),
    ],
)
def test_headers_of_the_java_sdk_are_read_as_it_wrote_them(body: str, values: dict[str, Any]) -> None:
    (header,) = (message["header"] for message in _MIXED["published_by_java"] if message["body"] == body)
    assert decode_headers(header.encode()) == values
