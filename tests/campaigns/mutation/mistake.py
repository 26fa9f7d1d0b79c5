"""Mistakes that a programmer would make: an old text of a module, and the text in its place.

``mistakes/ROOM.diff`` has those of a room, with ``_`` in place of ``/``: ``@ MODULE``, ``# NAME``, and lines that begin
with a space (unchanged), ``-`` (before) or ``+`` (after). The unchanged and the old lines occur once in the module.
"""

from __future__ import annotations

import ast
from pathlib import Path

from attrs import evolve, frozen

__all__ = ("Mistake", "mistakes_of")


@frozen
class Mistake:
    """A change of one module.

    Attributes:
        name: what goes wrong.
        module: path of the module below the package.
        before: the right text, which occurs once in the module.
        after: the wrong text.
    """

    name: str
    module: str
    before: str
    after: str

    def line(self, source: str) -> int:
        """Return the first line that is changed."""
        same = 0
        while self.before[same : same + 1] == self.after[same : same + 1] != "":
            same += 1
        left = self.before[same:]
        same += len(left) - len(left.lstrip())
        return source.count("\n", 0, source.index(self.before) + same) + 1

    def changed(self, source: str) -> str:
        """Return the source of the changed module.

        Raises:
            LookupError: the right text does not occur once.
        """
        if source.count(self.before) != 1:
            raise LookupError(f"{self.name}: {self.module} has not once {self.before!r}")
        return source.replace(self.before, self.after)

    def tree(self, source: str) -> ast.Module:
        """Return the changed module; raise as `changed` does."""
        return ast.parse(self.changed(source))


def mistakes_of(room: str) -> tuple[Mistake, ...]:
    """Return the mistakes of a room; empty for a room without a file."""
    path = Path(__file__).parent / "mistakes" / f"{room.replace('/', '_')}.diff"
    return tuple(_parse(path.read_text("utf-8"))) if path.exists() else ()


def _parse(text: str) -> list[Mistake]:
    found: list[Mistake] = []
    module = ""
    for line in text.splitlines():
        mark, rest = line[:1], f"{line[1:]}\n"
        if mark == "@":
            module = line[2:]
        elif mark == "#":
            found.append(Mistake(line[2:], module, "", ""))
        else:  # an editor may remove the space of an empty line
            before, after = found[-1].before, found[-1].after
            found[-1] = evolve(
                found[-1],
                before=before if mark == "+" else before + rest,
                after=after if mark == "-" else after + rest,
            )
    return found
