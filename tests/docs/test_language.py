"""The language of documentation, docstrings, comments and messages: plain technical English.

The phrases below belong to a private dialect that earlier texts were written in. All folders are free of them.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ROOT

# phrase -> what to write instead
PHRASES = {
    r"whoever|nobody|somebody|anybody|everybody": "the caller, the server, no task, another program",
    r"ours": "of this process, of this package",
    r"told": "receives, is notified",
    r"(?:see|sees|saw|seen) to": "handle, apply",
    r"anew": "again",
    r"(?:come|comes|came) about": "occur",
    r"(?:take|takes|took|taking) (?:its |their )?leave": "close, leave",
    r"mend(?:s|ed|ing)?": "correct, repair",
    r"(?:is|are|was|were|cannot) (?:to )?be had": "available, unknown",
    r"what is there": "the existing ones",
    r"as the case may be": "name the cases",
    r"(?:is|are|was|were) at work": "run, handle",
    r"(?:go|goes|went|going) on(?! (?:with )?(?:a|the) (?:host|node))": "continue",
    r"(?:come|comes|came) again": "is redelivered",
    r"(?:takes?|took) its time": "is slow",
    r"(?:is|are) no more(?! than)": "does not exist any more",
    r"leads? no more": "is not the leader any more",
    r"so many": "this number of, that many, the argument's name",
    r"(?:what|how) (?:becomes|became) of": "the outcome",
    r"its begin": "its start, the start offset",
}

_PATTERN = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)
# the user name of containers
_ALLOWED = re.compile(r"^USER nobody$", re.MULTILINE)
_ROOMS = ("nsqext", "docs", "benchmarks", "examples", "tests")
_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
_THIS = Path(__file__).resolve()


def _text(path: Path) -> str:
    """Return the prose of a file: of Python only comments and strings, each on its line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return _ALLOWED.sub("", source)
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:
            for number, part in enumerate(token.string.split("\n")):
                lines[token.start[0] - 1 + number] += f" {part}"
    return "\n".join(lines)


def _files(room: str) -> Iterator[Path]:
    for path in sorted((ROOT / room).rglob("*")):
        generated = "generated" in path.parts or "_build" in path.parts
        if path.suffix in (".py", ".md", ".html", ".js") and not generated and path.resolve() != _THIS:
            yield path


def _found(path: Path) -> list[str]:
    if not _PATTERN.search(path.read_text(encoding="utf-8")):  # reading tokens takes 50 times as long
        return []
    text = _text(path)
    return [
        f"{path.relative_to(ROOT).as_posix()}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for match in _PATTERN.finditer(text)
    ]


def _found_in(room: str) -> list[str]:
    return [line for path in _files(room) for line in _found(path)]


@pytest.mark.parametrize("room", _ROOMS)
def test_a_room_is_free_of_the_dialect(room: str) -> None:
    assert _found_in(room) == []


@pytest.mark.parametrize("name", _PAGES)
def test_a_page_is_free_of_the_dialect(name: str) -> None:
    assert _found(ROOT / name) == []


def test_the_patterns_find_the_phrases() -> None:
    text = (
        "Whoever asks is told by somebody. It goes on, and the message comes again. Mend what is there after so many."
    )
    assert [match[0].lower() for match in _PATTERN.finditer(text)] == [
        "whoever",
        "told",
        "somebody",
        "goes on",
        "comes again",
        "mend",
        "what is there",
        "so many",
    ]
    assert _PATTERN.search("hours, goes once, the commend, recommended, colours, its beginning, not as many") is None
