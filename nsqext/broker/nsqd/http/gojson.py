"""JSON as the redesigned server writes a header that came over HTTP: every number a double, names in order."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ("write_json",)

_ESCAPES = (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def write_json(value: Any) -> bytes:
    """Return the bytes that are stored for a header (captured: http_pub_ext_delivered)."""
    return _write(value).encode("utf-8", "replace")


def _write(value: Any) -> str:
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda member: member[0].encode("utf-8", "surrogatepass"))
        return "{" + ",".join(f"{_text(name)}:{_write(content)}" for name, content in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_write, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(float(value))
    return {None: "null", True: "true", False: "false"}[value]


def _text(value: str) -> str:
    text = orjson.dumps(value).decode()
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
