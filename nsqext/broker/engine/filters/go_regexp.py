"""Regular expressions and globs of header filters, as the real server's libraries read them, in linear time.

The server uses Go's ``regexp`` and ``github.com/gobwas/glob``. Both are compiled to RE2 (google-re2), whose syntax and
guarantee Go's package shares: no backtracking, so a hostile expression or header costs time linear in the header.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import re2

_MAX_NESTING = 1000
_SURROGATES = re.compile("[\ud800-\udfff]")

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True

_BYTES_OPTIONS = re2.Options()
_BYTES_OPTIONS.log_errors = False
_BYTES_OPTIONS.never_capture = True
_BYTES_OPTIONS.encoding = re2.Options.Encoding.LATIN1

# quoted texts, escaped characters, brackets with what is in them, and parentheses of groups
_PARTS = re2.compile(r"(?s)\\Q.*?(?:\\E|\z)|\\.|\[\^?\]?(?:\[:.*?:\]|\\.|[^\\\]])*\]|[()]")

Matcher = Callable[[str], bool]


class InvalidExpression(ValueError):
    """An expression or glob that the server refuses."""


def compile_regexp(pattern: str) -> Matcher:
    """Return a function that tells whether an expression of Go's ``regexp`` matches anywhere in a text.

    Raises `InvalidExpression` if Go refuses the expression, or RE2 needs more than 8 MiB for it.
    """
    expression = _compile(pattern)
    _check_go_only_rules(pattern)
    return lambda text: expression.search(_valid(text)) is not None


def compile_glob(pattern: str) -> Matcher:
    """Return a function that tells whether a glob matches a whole text; raises `InvalidExpression`.

    A glob has ``*``, ``?``, ``[…]``, ``[!…]``, ``{a,b}`` and backslashes. As at the real server, braces that are not
    closed end with the glob, and a glob that is only ``?`` or ``[!…]`` also matches an empty text.
    """
    expression = _compile("(?s)" + _glob_expression(pattern))
    return lambda text: expression.fullmatch(_valid(text)) is not None


@lru_cache(256)
def compile_wildcard(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a name with ``*`` and ``?`` matches a whole text; ``?`` is one byte."""
    source = "".join({"*": ".*", "?": "."}.get(char) or re2.escape(char) for char in pattern)
    expression = re2.compile(b"(?s)" + _bytes(source), _BYTES_OPTIONS)
    return lambda text: expression.fullmatch(_bytes(text)) is not None


def _compile(pattern: str) -> re2._Regexp:
    try:
        return re2.compile(pattern, _OPTIONS)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidExpression(f"{pattern!r} is not a valid expression: {error}") from error


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _valid(text: str) -> str:
    """Return a text whose invalid UTF-8 (lone surrogates) is U+FFFD, as which Go reads it."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _check_go_only_rules(pattern: str) -> None:
    r"""Check a valid RE2 expression against the two rules that only Go has: no ``\C``, and a bound for nesting."""
    depth = 0
    for part in _PARTS.findall(pattern):
        if part == r"\C":
            raise InvalidExpression(r"invalid escape sequence: \C")
        depth += (part == "(") - (part == ")")
        if depth > _MAX_NESTING:
            raise InvalidExpression("expression nests too deeply")


def _glob_expression(pattern: str) -> str:
    out: list[str] = []
    at = depth = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            out += [re2.escape(pattern[at])] if at < len(pattern) else []
            at += 1
        elif char == "[":
            expression, at = _glob_class(pattern, at)
            out.append(expression)
        elif char == "{" or (depth and char in ",}"):
            depth += (char == "{") - (char == "}")
            out.append({"{": "(?:", ",": "|", "}": ")"}[char])
        elif char != "*":
            out.append("." if char == "?" else re2.escape(char))
        elif out[-1:] != [".*"]:
            out.append(".*")
    if len(out) == 1 and (pattern == "?" or pattern.startswith("[!")):
        out.append("?")
    return "".join(out) + ")" * depth


def _glob_class(pattern: str, at: int) -> tuple[str, int]:
    """Read what follows a ``[``, one range or single characters; return its expression and the position behind it."""
    negative = pattern.startswith("!", at)
    at += negative
    ranges: list[tuple[str, str]] = []
    if pattern.startswith("-", at + 1) and at + 2 < len(pattern):
        ranges = [(pattern[at], pattern[at + 2])]
        at += 3
    while not ranges or (ranges[0][0] == ranges[0][1] and not pattern.startswith("]", at)):
        escaped = pattern.startswith("\\", at)
        char = pattern[at + escaped : at + escaped + 1]
        if not char or (char == "]" and not escaped):
            break
        ranges.append((char, char))
        at += 1 + escaped
    if not ranges or ranges[0][1] < ranges[0][0] or not pattern.startswith("]", at):
        raise InvalidExpression("brackets of the glob are empty, not closed, or hold an invalid range")
    inside = "".join(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}" for first, last in ranges)
    return f"[{'^' * negative}{inside}]", at + 1
