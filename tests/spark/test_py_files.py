"""Links for the process that plans a stream."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nsqext.spark.source import link_for_streams


@pytest.mark.parametrize("session", ["", "6f0c"])
def test_the_delivered_file_is_linked(tmp_path: Path, session: str) -> None:
    base = tmp_path / "userFiles-1"
    root = base / session
    root.mkdir(parents=True)
    (root / "nsqext.zip").write_text("first")
    link = base / "streaming_job" / "nsqext.zip"
    for _ in range(2):
        link_for_streams(root, root / "nsqext.zip" / "nsqext" / "spark" / "source.py")
        assert link.read_text() == "first"
    other = base / "7a11"
    other.mkdir()
    (other / "nsqext.zip").write_text("second")
    link_for_streams(other, other / "nsqext.zip" / "nsqext" / "spark" / "source.py")
    assert link.read_text() == "second"
    (other / "nsqext.zip").unlink()
    link_for_streams(root, root / "nsqext.zip" / "nsqext" / "spark" / "source.py")
    assert link.read_text() == "first"


def test_an_installed_package_is_not_linked(tmp_path: Path) -> None:
    root = tmp_path / "userFiles-1"
    root.mkdir()
    link_for_streams(root, Path(__file__))
    (root / "environment" / "nsqext").mkdir(parents=True)
    link_for_streams(root, root / "environment" / "nsqext" / "__init__.py")
    assert [path.name for path in root.iterdir()] == ["environment"]


def test_a_link_that_cannot_be_created_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "userFiles-1"
    root.mkdir()
    (root / "streaming_job").write_text("a file")
    with caplog.at_level(logging.WARNING, "nsqext.spark"):
        link_for_streams(root, root / "nsqext.zip" / "nsqext" / "spark" / "source.py")
    assert "streams will not find nsqext.zip" in caplog.text
