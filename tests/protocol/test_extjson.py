"""Headers with invalid JSON, and the error texts."""

from __future__ import annotations

import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.protocol.extjson import UnreadableHeader, members_of, quote, read_header, read_leniently, read_values
from nsqext.protocol.messages import TRACE_ID_HEADER
from tests.support.tables import table


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"", 'cannot parse JSON: cannot parse empty string; unparsed tail: ""'),
        (
            b"{nope",
            'cannot parse JSON: cannot parse object: cannot find opening \'"" for object key; unparsed tail: "nope"',
        ),
        (b'{"a" 1}', "cannot parse JSON: cannot parse object: missing ':' after object key; unparsed tail: \"1}\""),
        (b'{"a":1', 'cannot parse JSON: cannot parse object: unexpected end of object; unparsed tail: ""'),
        (b"[1 2]", "cannot parse JSON: cannot parse array: missing ',' after array value; unparsed tail: \"2]\""),
        (b"{}x", 'unexpected tail: "x"'),
        (b"tru", 'cannot parse JSON: unexpected value found: "tru"; unparsed tail: "tru"'),
    ],
)
def test_the_text_says_what_was_found(header: bytes, text: str) -> None:
    with pytest.raises(UnreadableHeader) as caught:
        read_leniently(header)
    assert str(caught.value) == text


def test_a_long_tail_is_shortened() -> None:
    with pytest.raises(UnreadableHeader, match=r"x{40}\.\.\.y{40}") as caught:
        read_leniently(b"{}" + b"x" * 60 + b"y" * 60)
    assert len(str(caught.value)) < 120


def test_unusual_numbers_and_control_characters_are_accepted() -> None:
    assert read_leniently(b'{"##trace_id":"7","n":01,"t":"a\nb"}') == {"##trace_id": "7", "n": "01", "t": "a\nb"}
    assert read_leniently(b" nan ") == {}
    assert read_leniently(b'{"a":[-inf,+NaN,1e+,{"b":"\xff"}]}') == {"a": '[-inf,+NaN,1e+,{"b":"\ufffd"}]'}


def test_the_first_of_equal_names_counts() -> None:
    assert read_header(b'{"##trace_id":"1","##trace_id":"2"}', TRACE_ID_HEADER) == {"##trace_id": "1"}
    assert read_header(b'{"\\u0023#trace_id":"7","n":nan}', TRACE_ID_HEADER) == {"##trace_id": "7", "n": "nan"}
    assert read_header(b'{"a":"1","a":"2"}', "a") == {"a": "1"}
    assert read_leniently(b'{"a":1,"b":{"a":2},"a":3,"n":nan}') == {"a": 1, "b": {"a": 2}, "n": "nan"}


@pytest.mark.parametrize("header", [b"[1,2]", b'"text"', b"12", b"null", b" [ ] "])
def test_a_header_that_is_not_an_object_has_no_members(header: bytes) -> None:
    assert read_header(header, TRACE_ID_HEADER) == {}


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(UnreadableHeader, match="exceeds 300"):
        read_leniently(b"[" * 1000)
    with pytest.raises(UnreadableHeader, match="exceeds 300"):
        read_header(b'{"a":' * 300 + b"1" + b"}" * 300, "a")
    assert read_header(b'{"a":' * 299 + b"1" + b"}" * 299, "b").keys() == {"a"}


@table(
    ("header", "text"),
    [
        (b'{"a":{"b":[1,tru]}}', 'array value: unexpected value found: "tru]}}"; unparsed tail: "tru]}}"'),
        (b'[{"a":tru}]', "array: cannot parse array value: cannot parse object: cannot parse object value: unexpected"),
        (b'{"a', 'cannot parse object: cannot parse object key: missing closing \'"\'; unparsed tail: ""'),
        (b'["a', "cannot parse array: cannot parse array value: cannot parse string: missing closing '\"'"),
        (b"{", "cannot parse object: missing '}'; unparsed tail: \"\""),
        (b"[ ", "cannot parse array: missing ']'; unparsed tail: \"\""),
        (b"[1", "cannot parse array: unexpected end of array"),
        (b'{"a":1 2}', "cannot parse object: missing ',' after object value; unparsed tail: \"2}\""),
        (b'{"a":}', 'object value: cannot parse number: unexpected char: "}"; unparsed tail: "}"'),
        (b"-x", 'cannot parse number: unexpected char: "-"; unparsed tail: "-x"'),
        (b"\xc3\xa9", 'unexpected char: "\\xc3"; unparsed tail: "\u00e9"'),
    ],
)
def test_the_text_says_where_in_nested_values(header: bytes, text: str) -> None:
    with pytest.raises(UnreadableHeader) as caught:
        read_header(header, TRACE_ID_HEADER)
    assert text in str(caught.value)


@given(st.binary(max_size=60) | st.text('{}[]",:\\ntf01-e. ', max_size=40).map(str.encode))
def test_any_bytes_give_a_value_or_the_documented_error(header: bytes) -> None:
    try:
        read_header(header, TRACE_ID_HEADER)
        read_leniently(header)
    except UnreadableHeader as error:
        assert str(error)


def test_quoting_escapes_unprintable_characters() -> None:
    assert quote('a"\\\n\x00é\u200b\udcff') == '"a\\"\\\\\\n\\x00é\\u200b\\xff"'


def test_texts_within_a_value_can_be_encoded() -> None:
    found = read_values(b'{"a":["\\ud800",{"\\udfff":"x"}]}')
    assert orjson.dumps(found)


def test_a_tail_of_up_to_80_bytes_is_quoted_whole() -> None:
    for size, shown in ((80, "x" * 80), (81, f"{'x' * 40}...{'x' * 40}")):
        with pytest.raises(UnreadableHeader, match=f'unparsed tail: "{re.escape(shown)}"$'):
            members_of(b"x" * size)
