"""The examples of tests/README.md run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.programs import ROOT

_README = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
_EXAMPLES = dict(
    re.findall(r"^## ([A-Z][a-z ]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", _README, re.MULTILINE | re.DOTALL)
)
_FOLDERS = {"Pure": "", "Cluster": "", "Real server": "contract", "Spark": "spark"}


def test_every_kind_has_an_example() -> None:
    assert _EXAMPLES.keys() == _FOLDERS.keys()


def test_the_table_of_behaviours_names_what_exists() -> None:
    table = _README.partition("## Where things are")[2]
    paths = [name for name in re.findall(r"`([^`]+)`", table) if name.endswith((".py", "/"))]
    assert len(paths) > 30
    tests = ROOT / "tests"
    assert [path for path in paths if not (tests / path).exists() and not list(tests.rglob(path))] == []


def test_the_examples_pass(tmp_path: Path) -> None:
    """Run the examples, each with the conftest files of its folder."""
    files = []
    for kind, folder in _FOLDERS.items():
        if kind == "Spark":
            continue
        (tmp_path / folder).mkdir(exist_ok=True)
        source = ROOT / "tests" / folder / "conftest.py"
        (tmp_path / folder / "conftest.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        files.append(tmp_path / folder / f"test_{kind.partition(' ')[0].lower()}.py")
        files[-1].write_text(_EXAMPLES[kind], encoding="utf-8")
    words = (
        *("-m", "pytest", "-v", "-p", "no:cacheprovider"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)),
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NSQEXT_TEST_LOOKUPD": "", "CI": ""}
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in files:
        assert re.search(rf"{file.name}::\S+ PASSED", done.stdout), done.stdout
