"""Environments of other clients, of Python or Node.js; created on first use and kept."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.missing import skip_without

__all__ = ("REQUIREMENTS", "install_once", "node_modules_of", "python_of")

REQUIREMENTS = {
    "pynsq": ("pynsq==0.9.1", "tornado<6.5", "python-snappy"),
    "gnsq": ("gnsq==1.0.2", "gevent", "python-snappy", "setuptools<81"),
    "ansq": ("ansq==0.3.0", "setuptools<81"),
    "faststream": ("faststream[nats]==0.7.8",),
}
NODE_REQUIREMENTS = {"nsqjs": ("nsqjs@0.13.0",)}
_ROOT = Path(__file__).parents[2] / ".venv"
_UNREACHABLE = (
    *("Failed to establish a new connection", "name resolution", "timed out", "ProxyError"),
    *("ENOTFOUND", "ETIMEDOUT", "EAI_AGAIN", "ECONNREFUSED"),
)


def install_once(folder: Path, requirements: Sequence[str], install: Callable[[Path], None]) -> None:
    """Call install(folder) unless an earlier call installed the same requirements; other processes wait meanwhile."""
    ready, wanted = folder / ".ready", " ".join(requirements)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
            return
        install(folder)
        ready.write_text(wanted, encoding="utf-8")


def python_of(client: str) -> str:
    """Return an interpreter with a client installed; skip the test if PyPI cannot be reached to install it."""
    folder = _ROOT / f"interop-{client}"
    python = str(folder / "bin" / "python")

    def install(folder: Path) -> None:
        # the pip of the tests installs into it: making an environment with pip takes thirty times as long
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python]
        words = ("install", "--quiet", "--no-compile", "--disable-pip-version-check", "--retries", "1")
        done = subprocess.run([*pip, *words, *REQUIREMENTS[client]], capture_output=True, text=True, check=False)
        if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
            pytest.skip(f"PyPI cannot be reached to install {client}")
        assert done.returncode == 0, done.stderr

    install_once(folder, REQUIREMENTS[client], install)
    return python


def node_modules_of(client: str) -> str:
    """Return the folder of a Node.js client; skip the test without npm or its registry."""
    if shutil.which("npm") is None:
        skip_without("Node.js with npm", "nodejs", "npm")

    def install(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_text("{}", encoding="utf-8")
        words = ("npm", "install", "--no-audit", "--no-fund", "--fetch-retries", "1", *NODE_REQUIREMENTS[client])
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
            pytest.skip(f"npm's registry cannot be reached to install {client}")
        assert done.returncode == 0, done.stderr

    folder = _ROOT / f"interop-{client}"
    install_once(folder, NODE_REQUIREMENTS[client], install)
    return str(folder)
