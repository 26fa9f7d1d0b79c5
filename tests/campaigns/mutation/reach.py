"""Which tests run a line, and how long they take: a bug meets only these, the fastest and most specific first."""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from pathlib import PurePath
from types import FrameType
from typing import Any

from attrs import define, field, frozen

__all__ = ("LineTrace", "Reach")

_FAST = 0.3
"""Seconds; the tests of all files that take less are run before those that take longer."""


@frozen
class Reach:
    """What the tests of a room run without a bug.

    Attributes:
        tests: path of a module below the package -> line -> names of the tests that run it.
        seconds: name of a test -> how long it takes, with the measurement.
        failed: names of tests that fail without a bug.
    """

    tests: dict[str, dict[int, set[str]]] = field(factory=dict)
    seconds: dict[str, float] = field(factory=dict)
    failed: set[str] = field(factory=set)

    def add(self, other: Reach) -> None:
        """Add what other tests run."""
        self.seconds.update(other.seconds)
        self.failed.update(other.failed)
        for module, lines in other.tests.items():
            mine = self.tests.setdefault(module, {})
            for line, tests in lines.items():
                mine.setdefault(line, set()).update(tests)

    def of(self, module: str, source: str, line: int, files: dict[str, str], kills: Counter[str]) -> list[str]:
        """Return the tests that run a line, in the order in which a bug meets them.

        A constant of a module meets all tests that run the module.

        Args:
            module: path below the package.
            source: of the module.
            line: of the bug.
            files: name of a test -> its file.
            kills: how many bugs each test found.
        """
        lines = self.tests.get(module, {})
        tree = ast.parse(source)
        constant = _is_constant(tree, line)
        reached = lines.values() if constant else (lines.get(number, set()) for number in _statement(tree, line))
        found: set[str] = set().union(*reached)
        own = f"test_{PurePath(module).stem}.py"
        best = Counter[str]()
        for test in found:
            best[files[test]] = max(best[files[test]], kills[test])

        def rank(test: str) -> tuple[object, ...]:
            file, slow = files[test], self.seconds[test] > _FAST
            return slow, PurePath(file).name != own, -best[file], file, -kills[test], self.seconds[test]

        return sorted(found - self.failed, key=rank)


@define
class LineTrace:
    """Records the lines of some modules that run, in all threads that begin later.

    A coroutine that a cancellation continues runs on without a call event. Its frame keeps its own trace function, as
    tools that count calls and returns do not.

    Attributes:
        folder: path that the files of the modules begin with.
        ran: file and line of what ran since this was last replaced.
    """

    folder: str
    ran: set[tuple[str, int]] = field(factory=set)

    def __enter__(self) -> None:
        sys.settrace(self._call)
        threading.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _call(self, frame: FrameType, event: str, value: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.folder) else None

    def _line(self, frame: FrameType, event: str, value: object) -> Any:
        if event == "line":
            self.ran.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def _is_constant(tree: ast.Module, line: int) -> bool:
    around = (one for one in tree.body if one.lineno <= line <= (one.end_lineno or one.lineno))
    return any(isinstance(one, ast.Assign | ast.AnnAssign) for one in around)


def _statement(tree: ast.AST, line: int) -> range:
    """Return the lines of the smallest statement around a line; of one with a body, those of its head."""
    around: list[ast.stmt] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return range(line, line + 1)
    smallest = min(around, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    body = getattr(smallest, "body", None)
    end = body[0].lineno - 1 if body else smallest.end_lineno
    return range(smallest.lineno, max(end or line, line) + 1)
