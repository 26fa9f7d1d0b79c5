"""JSON of headers that were received over HTTP, as the redesigned server parses and writes it.

Numbers are doubles, members are sorted by name. In JSON, bytes that are not UTF-8 and halves of a surrogate pair become
U+FFFD; such bytes of an X-NSQEXT- header are written as the escape of U+FFFD (captured: http_pub_ext_delivered).
"""

from __future__ import annotations

import codecs
import json
import math
import re
from typing import Any

import orjson

from nsqext.arguments import is_number
from nsqext.http.api import HttpFault
from nsqext.protocol.extjson import encodable

_UNDECODED = re.compile("[\udc80-\udcff]")
_ESCAPES = (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def _one_each(error: UnicodeError) -> tuple[str, int]:
    """Replace each byte that is not UTF-8; Python's ``replace`` joins some of them."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("nsqext.one_each", _one_each)


def _number_of(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def read_object(data: bytes) -> dict[str, Any] | None:
    """Return the object that ``ext=`` holds, None for null; anything else is refused."""
    text = data.decode("utf-8", "nsqext.one_each")
    try:
        value = json.loads(text, parse_int=_number_of, parse_float=_number_of, parse_constant=_number_of)
    except (ValueError, RecursionError):
        raise HttpFault(400, "E_INVALID_JSON_HEADER") from None
    if value is not None and not isinstance(value, dict):
        raise HttpFault(400, "E_INVALID_JSON_HEADER")
    whole: dict[str, Any] | None = _replaced(value) if "\\ud" in text.lower() else value
    return whole


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    if isinstance(value, dict):
        return {_replaced(name): _replaced(content) for name, content in value.items()}
    return value


def write_json(value: Any) -> bytes:
    """Return the bytes that are stored for a header (captured: http_pub_ext_delivered); refuse one that is too deep."""
    try:
        return _write(value).encode("utf-8", "replace")
    except RecursionError:
        raise HttpFault(400, "E_INVALID_JSON_HEADER") from None


def _write(value: Any) -> str:
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda member: member[0].encode("utf-8", "surrogatepass"))
        return "{" + ",".join(f"{_text(name)}:{_write(content)}" for name, content in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_write, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if is_number(value, -math.inf):
        return _number(float(value))
    return {None: "null", True: "true", False: "false"}[value]


def _text(value: str) -> str:
    parts = (orjson.dumps(part)[1:-1].decode() for part in _UNDECODED.split(value))
    text = '"' + "\\ufffd".join(parts) + '"'
    for plain, escaped in _ESCAPES:
        if plain in text:
            text = text.replace(plain, escaped)
    return text


def _number(value: float) -> str:
    """Return the shortest digits; with an exponent below 1e-6 and from 1e21 on."""
    if value == 0:
        return "-0" if str(value).startswith("-") else "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, rest = mantissa.partition(".")
    digits = (whole + rest).lstrip("0")
    point = int(exponent or 0) + len(digits) - len(rest)  # place of the point, counted from the first digit
    digits = digits.rstrip("0") or "0"
    size = abs(value)
    if size < 1e-6 or size >= 1e21:
        head = digits[0] + (f".{digits[1:]}" if digits[1:] else "")
        scale = point - 1
        return f"{sign}{head}e{'-' if scale < 0 else '+'}{abs(scale):02d}".replace("e-0", "e-")
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if point >= len(digits):
        return sign + digits + "0" * (point - len(digits))
    return f"{sign}{digits[:point]}.{digits[point:]}"
