"""Extend headers as other clients write them, with the values that each reader returns."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from nsqext.types import RawJson


@frozen
class WrittenHeader:
    """A header that a server stores.

    Attributes:
        header: its bytes.
        values: what `nsqext.Message.headers` returns: values of JSON, and `RawJson` for others.
        texts: what readers of text return, such as Spark; None for null.
    """

    header: bytes
    values: dict[str, Any]
    texts: dict[str, str | None]


def _written(header: str | bytes, **values: tuple[Any, str | None]) -> WrittenHeader:
    return WrittenHeader(
        header if isinstance(header, bytes) else header.encode(),
        {name: value for name, (value, _) in values.items()},
        {name: text for name, (_, text) in values.items()},
    )


def _same(text: str) -> tuple[str, str]:
    return text, text


def _raw(text: str) -> tuple[RawJson, str]:
    return RawJson(text), text


def _whole(number: int) -> tuple[int, str]:
    return number, str(number)


def _nested(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels - 1):
        nested = [nested]
    return nested


_TRUE = (True, "true")
_NULL = (None, None)
_SEVEN = _whole(7)
_DEEP = "[" * 200 + "]" * 200

WRITTEN = (
    # text
    _written('{"a":"text"}', a=_same("text")),
    _written('{"a":""}', a=_same("")),
    _written(' { "a" : "spaces" , "i" : 7 } ', a=_same("spaces"), i=_SEVEN),
    _written('{\t"a":\r\n"breaks"}', a=_same("breaks")),
    _written('{"a":"é 中 😀"}', a=_same("é 中 😀")),
    _written('{"a":"\\u00e9\\u4e2d\\ud83d\\ude00\\/\\b"}', a=_same("é中😀/\b")),
    _written('{"a":"q\\"b\\\\n\\n\\t\\u0001"}', a=_same('q"b\\n\n\t\x01')),
    _written('{"a":"\u007f\u2028\u202e"}', a=_same("\u007f\u2028\u202e")),
    # text that strict parsers refuse
    _written('{"i":7,"t":true,"a":"cut \\ud83d"}', i=_SEVEN, t=_TRUE, a=_same("cut \ufffd")),
    _written('{"a":"\\ude00 cut","i":7}', a=_same("\ufffd cut"), i=_SEVEN),
    _written('{"a":"\\ud83d\\ud83d\\ude00"}', a=_same("\ufffd😀")),
    _written('{"a":"line\nbreak","i":7}', a=_same("line\nbreak"), i=_SEVEN),
    _written('{"a":"\x00\x1b[31m","i":7}', a=_same("\x00\x1b[31m"), i=_SEVEN),
    _written(b'{"a":"caf\xe9","i":7}', a=_same("caf\ufffd"), i=_SEVEN),
    _written(b'{"a":"\xff","i":7}', a=_same("\ufffd"), i=_SEVEN),
    # whole numbers
    _written('{"i":0,"j":-1,"k":7}', i=_whole(0), j=_whole(-1), k=_SEVEN),
    _written('{"i":9007199254740993}', i=_whole(9007199254740993)),
    _written('{"i":9223372036854775807,"j":-9223372036854775808}', i=_whole(2**63 - 1), j=_whole(-(2**63))),
    _written('{"i":18446744073709551615}', i=_whole(2**64 - 1)),
    _written('{"i":18446744073709551616,"a":"x"}', i=_whole(2**64), a=_same("x")),
    _written('{"i":-9223372036854775809}', i=_whole(-(2**63) - 1)),
    _written('{"i":' + "9" * 100 + "}", i=_whole(int("9" * 100))),
    _written('{"i":' + "9" * 4400 + ',"j":7}', i=_raw("9" * 4400), j=_SEVEN),
    # other numbers
    _written('{"d":1.5,"i":7}', d=(1.5, "1.5"), i=_SEVEN),
    _written('{"d":1e3}', d=(1000.0, "1000.0")),
    _written('{"d":-0.0}', d=(-0.0, "-0.0")),
    _written('{"d":1.0E300}', d=(1e300, "1e+300")),
    _written('{"d":1e-400}', d=(0.0, "0.0")),
    _written('{"d":12345678901234567890.5}', d=(12345678901234567890.5, "1.2345678901234567e+19")),
    # numbers that strict parsers refuse
    _written('{"d":1e400,"i":7}', d=_raw("1e400"), i=_SEVEN),
    _written('{"d":-1e400,"i":7}', d=_raw("-1e400"), i=_SEVEN),
    _written('{"d":NaN,"i":7}', d=_raw("NaN"), i=_SEVEN),
    _written('{"d":inf,"i":7}', d=_raw("inf"), i=_SEVEN),
    _written('{"d":-inf,"t":true}', d=_raw("-inf"), t=_TRUE),
    _written('{"i":01,"a":"x"}', i=_raw("01"), a=_same("x")),
    _written('{"i":1.,"j":7}', i=_raw("1."), j=_SEVEN),
    _written('{"i":.5,"j":7}', i=_raw(".5"), j=_SEVEN),
    _written('{"i":+1,"n":null}', i=_raw("+1"), n=_NULL),
    # booleans and null
    _written('{"t":true,"f":false}', t=_TRUE, f=(False, "false")),
    _written('{"n":null}', n=_NULL),
    _written('{"n":null,"d":NaN}', n=_NULL, d=_raw("NaN")),
    # objects and arrays
    _written('{"l":[1,"x",null]}', l=([1, "x", None], '[1,"x",null]')),
    _written('{"l":[]}', l=([], "[]")),
    _written('{"o":{}}', o=({}, "{}")),
    _written('{"o":{"k":{"j":2}}}', o=({"k": {"j": 2}}, '{"k":{"j":2}}')),
    _written('{"o":{"i":18446744073709551616}}', o=({"i": 2**64}, '{"i":18446744073709551616}')),
    _written('{"l":[1,NaN],"i":7}', l=_raw("[1,NaN]"), i=_SEVEN),
    _written('{"o":{"a":"cut \\ud83d"},"i":7}', o=({"a": "cut \ufffd"}, '{"a":"cut \ufffd"}'), i=_SEVEN),
    _written('{"o":{"a":1,"a":2}}', o=({"a": 2}, '{"a":2}')),
    _written(f'{{"l":{_DEEP},"i":7}}', l=(_nested(200), _DEEP), i=_SEVEN),
    # names
    _written('{"":"empty"}', **{"": _same("empty")}),
    _written('{"a b":"space"}', **{"a b": _same("space")}),
    _written('{"é":"name"}', é=_same("name")),
    _written('{"\\u0061":"escaped"}', a=_same("escaped")),
    _written('{"a":"first","a":"last"}', a=_same("last")),
    _written('{"a":"first","a":NaN}', a=_raw("NaN")),
    _written(b'{"n\xff":1,"i":7}', **{"n\ufffd": _whole(1), "i": _SEVEN}),
    # no members
    _written("{}"),
    _written(" {} "),
    _written("[1,2]"),
    _written('"text"'),
    _written("7"),
    _written("null"),
    _written("true"),
    _written("NaN"),
)
"""Headers that both redesigned servers, the real and the embedded one, store as they are."""
