"""The examples of tests/README.md run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

_README = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
_EXAMPLES = dict(
    re.findall(r"^## ([A-Z][a-z ]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", _README, re.MULTILINE | re.DOTALL)
)
_FOLDERS = {"Pure": "", "Cluster": "", "Real server": "contract", "Spark": "spark"}


def test_every_kind_has_an_example() -> None:
    assert _EXAMPLES.keys() == _FOLDERS.keys()


@pytest.mark.parametrize("kind", [kind for kind in _FOLDERS if kind != "Spark"])
def test_an_example_passes(kind: str, tmp_path: Path) -> None:
    """Run an example with the conftest files of its folder."""
    for folder in {"", _FOLDERS[kind]}:
        source = ROOT / "tests" / folder / "conftest.py"
        target = tmp_path / folder / "conftest.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / _FOLDERS[kind] / "test_example.py").write_text(_EXAMPLES[kind], encoding="utf-8")
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
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
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout + done.stderr
