"""Environments of other clients are installed once, also by processes that need them at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.interop_clients import install_once


def test_an_environment_is_installed_once(tmp_path: Path) -> None:
    installed, running = [], [0]

    def install(folder: Path) -> None:
        running[0] += 1
        assert running == [1], "two installations run at the same time"
        folder.mkdir(exist_ok=True)
        time.sleep(0.02)
        installed.append(folder.name)
        running[0] -= 1

    # a lock of a file belongs to the open file, so threads exclude each other as processes do
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(install_once, tmp_path / "new" / "pynsq", ("pynsq==1",), install) for _ in range(4)]
        for call in calls:
            call.result()
    assert installed == ["pynsq"]
    install_once(tmp_path / "new" / "pynsq", ("pynsq==2",), install)
    assert installed == ["pynsq", "pynsq"]


def test_an_installation_that_failed_is_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space")

    installed: list[Path] = []
    with pytest.raises(OSError, match="no space"):
        install_once(tmp_path / "gnsq", ("gnsq",), fail)
    install_once(tmp_path / "gnsq", ("gnsq",), installed.append)
    assert installed == [tmp_path / "gnsq"]
