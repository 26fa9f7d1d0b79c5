"""Extend headers: encoding and decoding."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidHeader, InvalidInput, InvalidName, ProtocolError
from nsqext.protocol.headers import (
    _END_OF_VALUE,
    MAX_HEADER_BYTES,
    add_key,
    decode_headers,
    encode_header_columns,
    encode_headers,
    header_json,
)
from nsqext.protocol.messages import header_text, tag_of
from nsqext.types import RawJson
from tests.support.tables import table

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)


def test_headers_tag_and_trace_id_are_one_object() -> None:
    encoded = encode_headers({"user": "42"}, tag="canary", trace_id=(1 << 64) - 1, reserved={"##x": "y"})
    assert orjson.loads(encoded) == {
        "user": "42",
        "##client_dispatch_tag": "canary",
        "##trace_id": "18446744073709551615",
        "##x": "y",
    }
    assert encode_headers() == encode_headers({}) == b"{}"
    assert encode_headers({"k": 'é"\\\x00\u2028'}) == '{"k":"é\\"\\\\\\u0000\u2028"}'.encode()
    assert encode_headers(trace_id=0) == b'{"##trace_id":"0"}'


_COLUMNS = st.dictionaries(
    st.sampled_from(["a", "nsqext_id", "x.y-z#", "##reserved", "bad name"]),
    st.lists(st.text(st.sampled_from('aé"\\\0\x7f /{}')), min_size=3, max_size=3),
    min_size=1,
)


@given(_COLUMNS)
def test_columns_are_encoded_as_the_headers_of_each_message(columns: dict[str, list[Any]]) -> None:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    encoded = encode_header_columns(columns)
    texts = "".join(text for values in columns.values() for text in values)
    plain = texts.isascii() and texts.isprintable() and not {*'"\\'} & {*texts}
    assert (encoded is not None) == (plain and not {"##reserved", "bad name"} & columns.keys())
    if encoded is not None:
        assert encoded == [encode_headers(row) for row in rows]


def test_columns_whose_messages_must_be_checked() -> None:
    assert encode_header_columns({"a": ["b", 5]}) is None  # type: ignore[list-item]
    for value in ('"', _END_OF_VALUE):
        assert encode_header_columns({"a": ["b", value]}) is None
    for size, fits in ((MAX_HEADER_BYTES - len('{"a":""}'), True), (MAX_HEADER_BYTES, False)):
        assert (encode_header_columns({"a": ["b", "x" * size]}) is not None) == fits


def test_the_mapping_of_the_caller_is_not_changed() -> None:
    headers = {"a": "b"}
    encode_headers(headers, tag="t", trace_id=1)
    assert headers == {"a": "b"}
    assert encode_headers(MappingProxyType(headers)) == b'{"a":"b"}'


@pytest.mark.parametrize("name", ["a", "A-b_c.d", "nsq.client.compress", "1", "#a", "a##b", "-"])
def test_header_names(name: str) -> None:
    assert decode_headers(encode_headers({name: "v"})) == {name: "v"}


@table("name", ["", "a b", "a\n", "a:b", "é", 'a"', 7, None, b"a", "a\x00"])
def test_bad_header_names(name: Any) -> None:
    with pytest.raises(InvalidHeader, match=r"header name .* is not valid: use letters, digits"):
        encode_headers({name: "v"})


@pytest.mark.parametrize("name", ["##trace_id", "##client_dispatch_tag", "##", "##x"])
def test_reserved_names_belong_to_nsq(name: str) -> None:
    with pytest.raises(InvalidHeader, match=r"is reserved.*use tag= or trace_id="):
        encode_headers({name: "v"})


@pytest.mark.parametrize("value", [1, None, True, b"v", ["v"], {"a": "b"}, 1.5])
def test_values_are_text(value: Any) -> None:
    with pytest.raises(InvalidHeader, match=r"value of header 'k' is \w+, not str"):
        encode_headers({"k": value})


@pytest.mark.parametrize("headers", [[("a", "b")], "a=b", 5])
def test_headers_are_a_mapping(headers: Any) -> None:
    with pytest.raises(InvalidHeader, match="must be a mapping"):
        encode_headers(headers)


def test_header_values_must_be_text() -> None:
    with pytest.raises(InvalidHeader, match="cannot be written as JSON"):
        encode_headers({"k": "\ud800"})


def test_headers_stay_well_below_the_size_that_crashes_a_server() -> None:
    fits = "x" * (MAX_HEADER_BYTES - len('{"k":""}'))
    assert len(encode_headers({"k": fits})) == MAX_HEADER_BYTES
    with pytest.raises(InvalidHeader, match="60001 bytes, more than 60000: put large values into the body"):
        encode_headers({"k": fits + "x"})
    with pytest.raises(InvalidHeader):
        encode_headers({"k": "é" * 30_000})
    assert MAX_HEADER_BYTES < 65506


def test_bad_tags_and_trace_ids_are_refused() -> None:
    with pytest.raises(InvalidName, match="tag"):
        encode_headers(tag="no blanks")
    for trace_id in (-1, 1 << 64, True, 1.0, "1"):
        with pytest.raises(InvalidInput, match="trace id"):
            encode_headers(trace_id=trace_id)  # type: ignore[arg-type]


@table(
    ("encoded", "expected"),
    [
        (b"", {}),
        (b"{}", {}),
        (b'{"n":1,"b":true,"o":{"a":[1]},"z":null}', {"n": 1, "b": True, "o": {"a": [1]}, "z": None}),
        (b'{"bad key!":"v"}', {"bad key!": "v"}),
        (b' { "k" : "spaces" } ', {"k": "spaces"}),
        (b"[1,2]", {}),
        (b'"str"', {}),
        # invalid JSON that is stored nevertheless (observed on the real server)
        (b'{"a":"\xff","b":"c"}', {"a": "\ufffd", "b": "c"}),
        (b'{"a":"\\ud800","\\udfff":"c"}', {"a": "\ufffd", "\ufffd": "c"}),
        (b'{"a":"x\ny","##client_dispatch_tag":"t"}', {"a": "x\ny", "##client_dispatch_tag": "t"}),
        (b'{"a":1e999,"b":"c","c":7,"d":true}', {"a": RawJson("1e999"), "b": "c", "c": 7, "d": True}),
        (b'{"n":-inf,"m":+NaN,"o":01,"p":1e+,"q":7}', {"n": "-inf", "m": "+NaN", "o": "01", "p": "1e+", "q": 7}),
        (b'{"a":[1,{"b":NaN}],"c":[1,{"b":2}]}', {"a": RawJson('[1,{"b":NaN}]'), "c": [1, {"b": 2}]}),
        (b'{"a":{"name":"cut \\ud83d","\\ud83d":1},"b":7}', {"a": {"name": "cut \ufffd", "\ufffd": 1}, "b": 7}),
        (b'{"a":1,"b":{"a":NaN},"a":2}', {"a": 2, "b": RawJson('{"a":NaN}')}),
        (b'{"a":1,"b":2,"a":3}', {"a": 3, "b": 2}),
        (b"nan", {}),
    ],
)
def test_headers_stored_by_servers_are_decoded(encoded: bytes, expected: dict[str, Any]) -> None:
    assert decode_headers(encoded) == expected


@table(
    "number",
    [(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 10**400, -(10**400)],
)
def test_whole_numbers_are_exact(number: int) -> None:
    assert decode_headers(b'{"n":%d,"l":[{"n":%d}]}' % (number, number)) == {"n": number, "l": [{"n": number}]}
    assert header_text({"n": number}, "n") == header_json(number) == str(number)


def test_a_value_that_is_not_json_is_its_text_and_neither_tag_nor_key() -> None:
    digits = "9" * 5000  # more than Python converts
    encoded = b'{"##client_dispatch_tag":NaN,"##key":01,"n":%s,"text":"NaN"}' % digits.encode()
    headers = decode_headers(encoded)
    assert headers["n"] == digits
    assert {name: isinstance(value, RawJson) for name, value in headers.items()} == {
        "##client_dispatch_tag": True,
        "##key": True,
        "n": True,
        "text": False,
    }
    assert tag_of(headers) is header_text(headers, "##key") is header_text({"k": ""}, "k") is None
    assert header_json(headers["n"]) == digits


def test_a_header_that_is_nested_more_deeply_than_servers_read_has_the_values_of_its_json() -> None:
    nested = decode_headers(b'{"a":%s1%s,"b":1.5}' % (b"[" * 400, b"]" * 400))
    assert nested["b"] == 1.5


@given(st.dictionaries(st.text(max_size=5), _JSON, max_size=4))
def test_each_value_of_valid_json_is_read_as_the_standard_library_reads_it(members: dict[str, Any]) -> None:
    encoded = json.dumps(members, ensure_ascii=False).encode("utf-8", "replace")
    assert decode_headers(encoded) == json.loads(encoded)
    with_odd_value = encoded[:-1] + (b"," if members else b"") + b'"odd value":NaN}'
    assert decode_headers(with_odd_value) == json.loads(encoded) | {"odd value": "NaN"}


@pytest.mark.parametrize("encoded", [b"{", b"\xff", b"not json", b'{"a":1}x', b"[" * 5000])
def test_headers_that_are_not_json_raise(encoded: bytes) -> None:
    with pytest.raises(ProtocolError, match="extend header is not JSON"):
        decode_headers(encoded)


def test_a_tag_is_text() -> None:
    assert tag_of({"##client_dispatch_tag": "canary"}) == "canary"
    for value in (None, "", 5, ["canary"]):
        assert tag_of({"##client_dispatch_tag": value}) is None
    assert tag_of({}) is None


@pytest.mark.parametrize(
    ("before", "key", "after"),
    [
        (b"", b"ann", {"##key": "ann"}),
        (b"{}", b"ann", {"##key": "ann"}),
        (b'{"a":"1"}', 'ä"'.encode(), {"a": "1", "##key": 'ä"'}),
        (b"", b"\xff\x01", {"##key": "\xff\x01"}),
    ],
)
def test_a_key_is_added_to_an_encoded_header(before: bytes, key: bytes, after: dict[str, str]) -> None:
    assert decode_headers(add_key(before, key)) == after


def test_a_header_with_its_key_is_bounded() -> None:
    with pytest.raises(InvalidHeader, match="use a shorter key"):
        add_key(b"", b"k" * MAX_HEADER_BYTES)
