"""Mistakes that a programmer would make, as data: an old text of a module, and the text in its place.

``mistakes/ROOM.py`` has those of a room, with ``_`` in place of ``/``.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec

from attrs import frozen

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
    name = f"tests.campaigns.mutation.mistakes.{room.replace('/', '_')}"
    if find_spec(name) is None:
        return ()
    found: tuple[Mistake, ...] = import_module(name).MISTAKES
    return found
