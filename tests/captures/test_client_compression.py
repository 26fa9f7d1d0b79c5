"""Bodies compressed by the Go client of the redesigned NSQ, recorded from a real server."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import orjson

from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER, Codec, compress_body, decompress_body
from nsqext.protocol.headers import decode_headers
from tests.support.tables import table

_RECORDS = orjson.loads((Path(__file__).parent / "data" / "client_compression.json").read_bytes())
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
