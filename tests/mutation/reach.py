"""Which tests run a line: the tests of a room are run once with coverage, so that a bug meets only these tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from coverage import CoverageData

__all__ = ("Reach",)


class Reach:
    """The tests of a room, by the lines that they run.

    Args:
        folder: a copy of the project, whose sources are not changed while the tests run.
        package: the room, below the package.
        tests: folders and files of the room's tests.
        limit: seconds for all tests of the room.

    Raises:
        RuntimeError: the tests fail without a bug.
    """

    def __init__(self, folder: Path, package: str, tests: tuple[str, ...], limit: float) -> None:
        data_file = folder / f"{package.replace('/', '-')}.coverage"
        source = f"--cov=nsqext/{package}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", source, "--cov-context=test", *tests]
        environment = {**os.environ, "PYTHONPATH": str(folder), "COVERAGE_FILE": str(data_file)}
        ended = subprocess.run(
            [*command, "--cov-report="],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"the tests of {package} fail without a bug:\n{ended.stdout[-2000:]}")
        self._folder, self._tests = folder, tests
        self._contexts: dict[str, dict[int, set[str]]] = {}
        data = CoverageData(str(data_file))
        data.read()
        for file in data.measured_files():
            lines: defaultdict[int, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(file).items():
                lines[line] = {context.rpartition("|")[0] for context in contexts}
            self._contexts[str(Path(file).relative_to(folder / "nsqext"))] = lines

    def of(self, module: str, line: int) -> tuple[str, ...]:
        """Return the tests that run a line, those of the module's own file first; all, if it runs outside of a test.

        Lines run outside of tests while a module is imported, and in processes that a test starts.
        """
        lines = self._contexts.get(module, {})
        statement = _statement(ast.parse((self._folder / "nsqext" / module).read_text()), line)
        found: set[str] = set().union(*(lines.get(number, set()) for number in statement))
        own = f"test_{Path(module).stem}.py"
        ordered = sorted(found - {""}, key=lambda test: (own not in test, test))
        if "" in found:
            files = (path for tests in self._tests for path in (self._folder / tests).rglob(own))
            ordered += [*(str(path.relative_to(self._folder)) for path in files), *self._tests]
        return tuple(ordered)


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
