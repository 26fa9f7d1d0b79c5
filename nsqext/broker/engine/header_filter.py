r"""Filters on extend headers that a client requests in IDENTIFY (captured: ext_filter).

They select a text by a path (github.com/tidwall/gjson): a dot descends into an object or selects an array element;
``*`` and ``?`` match any characters of a name unless escaped with a backslash. The first match counts, also among
members of the same name.

The server's Go ``regexp`` and ``github.com/gobwas/glob`` are compiled to RE2 (google-re2), which has Go's syntax and
its guarantee: a hostile expression costs time linear in the header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import eq
from typing import TYPE_CHECKING, Any

import re2

from nsqext.protocol.identify import FILTER_EQUAL, FILTER_GLOB, FILTER_MULTI, FILTER_REGEXP
from nsqext.protocol.json_fields import Members
from nsqext.protocol.messages import EXT_JSON

if TYPE_CHECKING:
    from nsqext.protocol.record import Record

_MAX_NESTING = 1000
_MAX_HEADER = 0xFFFF
_STARS = re.compile(r"\*+")
_SURROGATES = re.compile("[\ud800-\udfff]")

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True

_BYTES_OPTIONS = re2.Options()
_BYTES_OPTIONS.log_errors = False
_BYTES_OPTIONS.never_capture = True
_BYTES_OPTIONS.encoding = re2.Options.Encoding.LATIN1

# quoted texts, escaped characters, brackets with content, and parentheses of groups
_PARTS = re2.compile(r"(?s)\\Q.*?(?:\\E|\z)|\\.|\[\^?\]?(?:\[:.*?:\]|\\.|[^\\\]])*\]|[()]")

Matcher = Callable[[str], bool]
_Test = Callable[[bytes], bool]
_INDEX = re.compile(r"[0-9]+", re.ASCII)


class InvalidExpression(ValueError):
    """An expression or glob that the server refuses."""


def compile_regexp(pattern: str) -> Matcher:
    """Return a function that searches a text for an expression.

    Raises `InvalidExpression` if Go refuses it, or RE2 needs more than 8 MiB.
    """
    expression = _compile_re2(pattern)
    _check_go_only_rules(pattern)
    return lambda text: expression.search(_valid(text)) is not None


def compile_glob(pattern: str) -> Matcher:
    """Return a function that compares a whole text with a glob; raises `InvalidExpression`.

    A glob has ``*``, ``?``, ``[…]``, ``[!…]``, ``{a,b}`` and backslashes. As in the real server, the end closes braces,
    and a glob of only ``?`` or ``[!…]`` also matches an empty text.
    """
    expression = _compile_re2("(?s)" + _glob_expression(pattern))
    return lambda text: expression.fullmatch(_valid(text)) is not None


@lru_cache(256)
def compile_wildcard(pattern: str) -> Callable[[str], bool]:
    """Return a function that compares a whole text with a pattern of ``*`` and ``?`` (a byte).

    A pattern longer than a header matches nothing; RE2 would refuse the largest.
    """
    pattern = _STARS.sub("*", pattern)
    if len(_bytes(pattern)) - pattern.count("*") > _MAX_HEADER:
        return lambda text: False
    source = "".join({"*": ".*", "?": "."}.get(char) or re2.escape(char) for char in pattern)
    expression = re2.compile(b"(?s)" + _bytes(source), _BYTES_OPTIONS)
    return lambda text: expression.fullmatch(_bytes(text)) is not None


def _compile_re2(pattern: str) -> re2._Regexp:
    try:
        return re2.compile(pattern, _OPTIONS)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidExpression(f"{pattern!r} is not a valid expression: {error}") from error


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _valid(text: str) -> str:
    """Return a text with U+FFFD for invalid UTF-8 (lone surrogates), as Go reads it."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _check_go_only_rules(pattern: str) -> None:
    r"""Check what Go refuses and RE2 accepts: ``\C``, and deep nesting."""
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
    """Read a range or characters behind ``[``; return the expression and the end position."""
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


def compile_filter(wanted: Mapping[str, Any]) -> Callable[[Record], bool] | None:
    """Return a function that applies a filter to a record; None for an invalid filter, as the real server.

    A record without a JSON header matches no filter: it passes an inverse filter.
    """
    try:
        test = _compile(wanted)
    except InvalidExpression:
        return None
    if test is None:
        return None
    inverse = bool(wanted.get("inverse"))

    def matches(record: Record) -> bool:
        return (record.version == EXT_JSON and test(record.header)) is not inverse

    return matches


def _compile(wanted: Mapping[str, Any]) -> _Test | None:
    kind, key, data = (wanted.get(name) or "" for name in ("type", "filter_ext_key", "filter_data"))
    if not key or (not data and kind != FILTER_MULTI):
        return None
    if kind == FILTER_EQUAL:
        return _at(key, partial(eq, data))
    if kind == FILTER_REGEXP:
        return _at(key, compile_regexp(data))
    if kind == FILTER_GLOB:
        return _at(key, compile_glob(data))
    if kind == FILTER_MULTI:
        return _several(key, wanted.get("filter_data_list") or [])
    return None


def _at(path: str, matches: Matcher) -> _Test:
    return lambda header: matches(text_at(path, header) or "")


def _several(relation: str, pairs: list[Mapping[str, Any]]) -> _Test | None:
    parts = [(pair.get("filter_ext_key") or "", pair.get("filter_data") or "") for pair in pairs]
    if not parts or not all(key and data for key, data in parts):
        return None
    tests = [_at(key, partial(eq, data)) for key, data in parts]
    if relation == "all":
        return lambda header: all(test(header) for test in tests)
    if relation == "any":
        return lambda header: any(test(header) for test in tests)
    return lambda header: False


def text_at(path: str, header: bytes) -> str | None:
    """Return the text at a path in a header; None for a missing or other value, and deep nesting."""
    try:
        document = json.loads(header.decode("utf-8", "surrogateescape"), object_pairs_hook=Members, strict=False)
    except (ValueError, RecursionError):
        return None
    try:
        found = _find([document], path[2:]) if path.startswith("..") else _find(document, path)
    except RecursionError:
        return None
    return found if isinstance(found, str) else None


def _find(value: Any, path: str) -> Any:
    """Return the value at a path; an empty tuple if missing."""
    if isinstance(value, Members):
        name, wild, rest = _split(path)
        members = [member for key, member in value if (compile_wildcard(name)(key) if wild else name == key)]
    elif isinstance(value, list):
        place, dot, rest_text = path.partition(".")
        rest = rest_text if dot else None
        index = int(place) if _INDEX.fullmatch(place) and len(place) < 20 else len(value)
        members = value[index : index + 1]
    else:
        return ()
    if rest is None:
        return members[0] if members else ()
    for member in members:
        found = _find(member, rest)
        if found != ():
            return found
    return ()


def _split(path: str) -> tuple[str, bool, str | None]:
    """Return the first name of a path, whether it has wildcards, and the rest or None."""
    name, wild, at = "", False, 0
    while at < len(path):
        char = path[at]
        if char == ".":
            return name, wild, path[at + 1 :]
        if char == "\\":
            at += 1
            char = path[at : at + 1]
        elif char in "*?":
            wild = True
        name += char
        at += 1
    return name, wild, None
