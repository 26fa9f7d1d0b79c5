"""Regular expressions and globs of header filters as the real server reads them, written for Python's `re`.

The server's expressions are RE2's: no look-around, no references, no stacked repetitions; classes and boundaries are
ASCII; ``$`` is the end of the text alone. Each piece is written with its flags, so that flags in the middle of an
expression reach as far as they do there.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

__all__ = ("glob_expression", "re2_expression")

_MAX_REPEAT = 1000
_TOP = 0x10FFFF
_COUNTS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_NAMED = re.compile(r"\(\?P?<([^>]*)>")
_FLAGS = re.compile(r"\(\?([imsU]*)(-[imsU]+)?([:)])")
_WORD = re.compile(r"[0-9A-Za-z_]+")
_OCTAL = re.compile(r"0[0-7]{0,2}|[1-7][0-7]{1,2}")
_HEX = re.compile(r"x(?:([0-9A-Fa-f]{2})|\{([0-9A-Fa-f]+)\})")
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_BOUNDARIES = {"A": r"\A", "z": r"\Z", "b": r"(?a:\b)", "B": r"(?!(?a:\b))"}
_PERL = {"d": "09", "w": "09AZ__az", "s": "\t\n\f\r  "}
_POSIX = {
    "alnum": "09AZaz",
    "alpha": "AZaz",
    "ascii": "\0\x7f",
    "blank": "\t\t  ",
    "cntrl": "\0\x1f\x7f\x7f",
    "digit": "09",
    "graph": "!~",
    "lower": "az",
    "print": " ~",
    "punct": "!/:@[`{~",
    "space": "\t\r  ",
    "upper": "AZ",
    "word": "09AZ__az",
    "xdigit": "09AFaf",
}

_Ranges = list[tuple[int, int]]


def re2_expression(pattern: str) -> str:
    r"""Return the expression for `re` that finds what RE2's finds.

    Classes of Unicode (``\p{Greek}``) are not known.

    Raises:
        re.error: RE2 would refuse it, or it has a class of Unicode.
    """
    return _Reader(pattern).read()


class _Piece(NamedTuple):
    """A piece of an expression, and how often the most repeated part of it can be repeated."""

    text: str
    repeats: int = 1


class _Level:
    """What stands between two parentheses: finished branches, pieces of the last one, and the flags outside."""

    def __init__(self, flags: str) -> None:
        self.flags = flags
        self.branches: list[str] = []
        self.pieces: list[_Piece] = []
        self.repeats = 1

    def branch(self) -> None:
        self.repeats = max([self.repeats, *(piece.repeats for piece in self.pieces)])
        self.branches.append("".join(piece.text for piece in self.pieces))
        self.pieces = []

    def close(self) -> _Piece:
        self.branch()
        return _Piece(f"(?:{'|'.join(self.branches)})", self.repeats)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags = ""
        self._levels = [_Level("")]

    def read(self) -> str:
        stacked = False
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            counts = _COUNTS.match(self._pattern, self._at) if char == "{" else None
            if char in "*+?" or counts:
                if stacked:
                    self._fail("invalid nested repetition operator")
                self._repeat(char, counts)
                stacked = True
            else:
                stacked = False
                self._next(char)
        if len(self._levels) > 1:
            self._fail("missing closing )")
        return self._levels[0].close().text

    def _fail(self, text: str) -> NoReturn:
        raise re.error(text, self._pattern, self._at)

    def _put(self, text: str) -> None:
        self._levels[-1].pieces.append(_Piece(f"(?i:{text})" if "i" in self._flags else text))

    def _next(self, char: str) -> None:
        if char == "(":
            self._open()
        elif char == "[":
            self._put(self._class())
        elif char == "\\":
            self._escape()
        else:
            self._at += 1
            if char == ")":
                self._close()
            elif char == "|":
                self._levels[-1].branch()
            elif char == ".":
                self._put("(?s:.)" if "s" in self._flags else r"[^\n]")
            elif char == "^":
                self._put("(?m:^)" if "m" in self._flags else r"\A")
            elif char == "$":
                self._put("(?m:$)" if "m" in self._flags else r"\Z")
            else:
                self._put(re.escape(char))

    def _repeat(self, char: str, counts: re.Match[str] | None) -> None:
        pieces, operator, times = self._levels[-1].pieces, char, 1
        if counts:
            operator, least = counts[0], int(counts[1])
            times = int(counts[3]) if counts[3] else least
            if times > _MAX_REPEAT or least > times:
                self._fail("invalid repeat count")
        if not pieces:
            self._fail("missing argument to repetition operator")
        self._at += len(operator)
        # whether as few as possible are taken makes no difference to whether there is a match
        self._at += self._pattern.startswith("?", self._at)
        piece = pieces.pop()
        repeats = max(times, 1) * piece.repeats
        if times > 1 and repeats > _MAX_REPEAT:
            self._fail("invalid repeat count")
        pieces.append(_Piece(f"(?:{piece.text}){operator}", repeats))

    def _open(self) -> None:
        if self._pattern.startswith("(?", self._at):
            named, flags = _NAMED.match(self._pattern, self._at), _FLAGS.match(self._pattern, self._at)
            if named and _WORD.fullmatch(named[1]):
                self._at = named.end()
            elif flags:
                self._at = flags.end()
                changed = "".join(sorted(set(self._flags + flags[1]) - set(flags[2] or "")))
                if flags[3] == ":":
                    self._levels.append(_Level(self._flags))
                self._flags = changed
                return
            else:
                self._fail("invalid or unsupported Perl syntax")
        else:
            self._at += 1
        self._levels.append(_Level(self._flags))

    def _close(self) -> None:
        if len(self._levels) == 1:
            self._fail("unexpected )")
        level = self._levels.pop()
        self._flags = level.flags
        self._levels[-1].pieces.append(level.close())

    def _escape(self) -> None:
        letter = self._pattern[self._at + 1 : self._at + 2]
        if letter in _BOUNDARIES and letter:
            self._at += 2
            self._put(_BOUNDARIES[letter])
        elif letter == "Q":
            stop = self._pattern.find("\\E", self._at)
            text = self._pattern[self._at + 2 : stop if stop >= 0 else None]
            self._at = stop + 2 if stop >= 0 else len(self._pattern)
            for char in text:
                self._put(re.escape(char))
        elif ranges := self._perl():
            self._put(_written(ranges))
        else:
            self._put(_code(self._character()))

    def _perl(self) -> _Ranges:
        r"""Read ``\d`` and its kind, if that is what comes."""
        letter = self._pattern[self._at + 1 : self._at + 2]
        if self._pattern[self._at] != "\\" or letter.lower() not in _PERL or not letter:
            return []
        self._at += 2
        ranges = _pairs(_PERL[letter.lower()])
        return _complement(ranges) if letter.isupper() else ranges

    def _character(self) -> int:
        """Read one character, which may be escaped."""
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if char != "\\":
            return ord(char)
        letter = self._pattern[self._at : self._at + 1]
        number = _OCTAL.match(self._pattern, self._at) or _HEX.match(self._pattern, self._at)
        if number:
            self._at = number.end()
            code = int(number[0], 8) if letter != "x" else int(number[1] or number[2], 16)
            if code > _TOP:
                self._fail("invalid escape sequence")
            return code
        if not letter or not letter.isascii() or (letter.isalnum() and letter not in _CONTROLS):
            self._fail("invalid escape sequence")
        self._at += 1
        return ord(_CONTROLS.get(letter, letter))

    def _class(self) -> str:
        self._at += 1
        negative = self._pattern.startswith("^", self._at)
        self._at += negative
        ranges: _Ranges = []
        first = True
        while first or not self._pattern.startswith("]", self._at):
            first = False
            if self._at >= len(self._pattern):
                self._fail("missing closing ]")
            ranges += self._posix() or self._perl() or [self._range()]
        self._at += 1
        return _written(ranges, negative=negative)

    def _posix(self) -> _Ranges:
        stop = self._pattern.find(":]", self._at + 2) if self._pattern.startswith("[:", self._at) else -1
        if stop < 0:
            return []
        name = self._pattern[self._at + 2 : stop]
        ranges = _pairs(_POSIX.get(name.removeprefix("^"), ""))
        if not ranges:
            self._fail("invalid character class range")
        self._at = stop + 2
        return _complement(ranges) if name.startswith("^") else ranges

    def _range(self) -> tuple[int, int]:
        first = last = self._character()
        if self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 : self._at + 2] not in ("", "]"):
            self._at += 1
            last = self._character()
        if last < first:
            self._fail("invalid character class range")
        return first, last


def _pairs(text: str) -> _Ranges:
    return [(ord(text[at]), ord(text[at + 1])) for at in range(0, len(text), 2)]


def _complement(ranges: _Ranges) -> _Ranges:
    out, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            out.append((begin, first - 1))
        begin = last + 1
    return [*out, (begin, _TOP)]


def _code(code: int) -> str:
    return re.escape(chr(code)) if code < 0x80 else f"\\U{code:08x}"


def _written(ranges: _Ranges, *, negative: bool = False) -> str:
    inside = "".join(_code(first) if first == last else f"{_code(first)}-{_code(last)}" for first, last in ranges)
    return f"[{'^' * negative}{inside}]"


def glob_expression(pattern: str) -> str:
    """Return the regular expression of a glob with ``*``, ``?``, ``[…]``, ``[!…]``, ``{a,b}`` and backslashes.

    As at the real server, braces that are not closed end with the glob, and one ``?`` or ``[!…]`` alone matches an
    empty text, too.

    Raises:
        re.error: brackets are not closed, hold nothing, or a range that is none.
    """
    out: list[str] = []
    at = depth = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            out += [re.escape(pattern[at])] if at < len(pattern) else []
            at += 1
        elif char == "[":
            written, at = _glob_class(pattern, at)
            out.append(written)
        elif char == "{" or (depth and char in ",}"):
            depth += (char == "{") - (char == "}")
            out.append({"{": "(?:", ",": "|", "}": ")"}[char])
        else:
            out.append({"*": ".*", "?": "."}.get(char) or re.escape(char))
    if len(out) == 1 and (pattern == "?" or pattern.startswith("[!")):
        out.append("?")
    return "".join(out) + ")" * depth


def _glob_class(pattern: str, at: int) -> tuple[str, int]:
    """Read what follows a ``[``: one range, or single characters; returns it, and where it ends."""
    negative = pattern.startswith("!", at)
    at += negative
    ranges: _Ranges = []
    if pattern.startswith("-", at + 1) and at + 2 < len(pattern):
        ranges = [(ord(pattern[at]), ord(pattern[at + 2]))]
        at += 3
    while not ranges or (ranges[0][0] == ranges[0][1] and not pattern.startswith("]", at)):
        escaped = pattern.startswith("\\", at)
        char = pattern[at + escaped : at + escaped + 1]
        if not char or (char == "]" and not escaped):
            break
        ranges.append((ord(char), ord(char)))
        at += 1 + escaped
    if not ranges or ranges[0][1] < ranges[0][0] or not pattern.startswith("]", at):
        raise re.error("brackets of a glob make no sense", pattern, at)
    return _written(ranges, negative=negative), at + 1
