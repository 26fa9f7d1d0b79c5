"""JSON objects decoded into structures like in Go."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext.protocol.json_fields import UnreadableFields, read_fields
from tests.support.tables import table

_LISTS: dict[str, Any] = {"list": [{"key": str}], "names": [str]}
_SCHEMA = {"name": str, "count": int, "rate": 127, "on": bool, "inner": {"key": str, "n": int}, **_LISTS}


@table(
    ("body", "expected"),
    [
        (b"null", {}),
        (b"{}", {}),
        (b'{"unknown":[1,{}],"name":"x"}', {"name": "x"}),
        (b'{"NAME":"x","Count":-5}', {"name": "x", "count": -5}),
        (b'{"name":"a","Name":"b"}', {"name": "b"}),
        (b'{"name":"a","Name":null}', {"name": "a"}),
        (b'{"inner":{"key":"k","n":1},"inner":{"n":2}}', {"inner": {"key": "k", "n": 2}}),
        (b'{"count":9223372036854775807,"rate":-128}', {"count": 9223372036854775807, "rate": -128}),
        (b'{"on":false,"inner":{"KEY":"k","n":1,"x":2}}', {"on": False, "inner": {"key": "k", "n": 1}}),
        (b'{"list":[{"key":"a"},null,{}]}', {"list": [{"key": "a"}, {}, {}]}),
        (b'{"inner":null,"list":null}', {}),
        (b'{"names":["a",null,"\xff"]}', {"names": ["a", "", "\ufffd"]}),
        (b'{"name":"\xff"}', {"name": "\ufffd"}),
        (b'{"name":"\\ud800"}', {"name": "\ufffd"}),
        (b' {"name":"\\ud83d\\ude00"}\n', {"name": "😀"}),
        # Go's library reads 10,000 levels (seen on both servers)
        (b'{"a":' * 9_999 + b"{}" + b"}" * 9_999, {}),
        (b'{"x":' + b"[" * 3_000 + b'"]\\""' + b"]" * 3_000 + b',"name":"n"}', {"name": "n"}),
        (b'{"x":[' + b"[]," * 3_000 + b'0],"name":"n"}', {"name": "n"}),
        (b'{"x":[' + b"[]," * 20_000 + b'0],"name":"n"}', {"name": "n"}),
        (b'{"name":"n","x":"' + b"[{" * 20_000 + b'\\""}', {"name": "n"}),
    ],
)
def test_members_that_servers_read(body: bytes, expected: dict[str, Any]) -> None:
    assert read_fields(body, _SCHEMA) == expected


@table(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"x"', b"true", b"{}x", b"{'name':'x'}", b'{"name":1}', b'{"name":true}',
        b'{"name":1,"name":"x"}',
        b'{"count":"1"}', b'{"count":1.0}', b'{"count":1e2}', b'{"count":true}', b'{"count":9223372036854775808}',
        b'{"count":99999999999999999999}', b'{"rate":128}', b'{"rate":-129}', b'{"on":1}', b'{"on":"true"}',
        b'{"inner":[]}', b'{"inner":{"n":"1"}}', b'{"list":{}}', b'{"list":[1]}', b'{"list":[0]}', b'{"list":[""]}',
        b'{"names":"a"}', b'{"names":[1]}',
        b'{"name":"a\nb"}', b'{"count":NaN}', b'{"x":Infinity}', b"[" * 100_000, b'{"x":\xff}',
        b'{"a":' * 10_000 + b"{}" + b"}" * 10_000, b'{"x":' + b"[" * 3_000 + b"01" + b"]" * 3_000 + b"}",
        b'{"x":' + b"[" * 3_000 + b"]" * 2_999 + b"}}", b"{" * 200, b"}" + b"{" * 200, b"[" * 200 + b"]" * 201,
        b'{"name":' + b"[" * 3_000 + b"]" * 3_000 + b"}",
    ],
)  # fmt: skip
def test_invalid_objects_are_refused(body: bytes) -> None:
    with pytest.raises(UnreadableFields):
        read_fields(body, _SCHEMA)
