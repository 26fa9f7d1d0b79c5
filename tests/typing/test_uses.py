"""Type checkers in their strict modes accept every right use of the public API, and refuse every wrong one."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USES = Path(__file__).with_name("uses.py")
LINES = USES.read_text(encoding="utf-8").splitlines()
WRONG = {number for number, line in enumerate(LINES, 1) if line.endswith("# wrong")}


def check(*words: object) -> str:
    """Run a checker in the root of the project, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def refused_by_mypy() -> dict[int, str]:
    """Return the errors of mypy by line."""
    found = re.findall(r"^.*uses\.py:(\d+): error: (.*)$", check("mypy", "--strict", USES), re.MULTILINE)
    return {int(number): text for number, text in found}


def refused_by_pyright() -> dict[int, str]:
    """Return the errors of pyright by line; the file asks for its strict mode."""
    report = json.loads(check("pyright", "--outputjson", "--pythonpath", sys.executable, USES))
    assert report["summary"]["filesAnalyzed"] == 1
    found = [one for one in report["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1: one["message"] for one in found}


@pytest.mark.parametrize("refused", [refused_by_mypy, refused_by_pyright])
def test_wrong_uses_are_refused_and_right_ones_are_not(refused: object) -> None:
    assert callable(refused)
    errors = refused()
    assert {number: text for number, text in errors.items() if number not in WRONG} == {}, "right uses are refused"
    assert {number: LINES[number - 1] for number in WRONG - errors.keys()} == {}, "wrong uses are accepted"


def test_the_uses_are_many() -> None:
    """Guard against a mark that is not found."""
    calls = {node.lineno for node in ast.walk(ast.parse("\n".join(LINES))) if isinstance(node, ast.Call)}
    assert len(WRONG) >= 40
    assert len(calls - WRONG) >= 40
