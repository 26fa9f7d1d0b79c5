"""Copy the tests and the files that they read, without the package: ``python copy_suite.py REPOSITORY TARGET``.

Tests that run in the copy import the installed wheel. Make a new copy before each run.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_FOLDERS = (".ci", "tests", "docs", "examples", "benchmarks")
_FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "LICENSE", "tox.ini")


def copy_suite(repository: Path, target: Path) -> None:
    """Replace ``target`` by a copy of the repository without the package."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _FOLDERS:
        shutil.copytree(repository / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in _FILES:
        shutil.copy(repository / name, target / name)


if __name__ == "__main__":
    copy_suite(Path(sys.argv[1]), Path(sys.argv[2]))
