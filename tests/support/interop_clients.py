"""Environments of their own for other clients, made on first use and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ("REQUIREMENTS", "python_of")

REQUIREMENTS = {
    "pynsq": ("pynsq==0.9.1", "tornado<6.5", "python-snappy"),
    "gnsq": ("gnsq==1.0.2", "gevent", "python-snappy", "setuptools<81"),
    "ansq": ("ansq==0.3.0", "setuptools<81"),
}
_ROOT = Path(__file__).parents[2] / ".venv"
_UNREACHABLE = ("Failed to establish a new connection", "name resolution", "timed out", "ProxyError")


def python_of(client: str) -> str:
    """Return the interpreter that has a client; skips the test where PyPI cannot be reached to make it."""
    folder = _ROOT / f"interop-{client}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = " ".join(REQUIREMENTS[client])
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", *REQUIREMENTS[client])
    done = subprocess.run([str(python), *words], capture_output=True, text=True, check=False)
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip(f"PyPI cannot be reached, which {client} is installed from")
    assert done.returncode == 0, done.stderr
    ready.write_text(wanted, encoding="utf-8")
    return str(python)
