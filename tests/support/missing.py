"""Skip tests whose program is not installed; the end of a run lists the commands that install what was missing."""

from __future__ import annotations

from typing import NoReturn

import pytest

__all__ = ("reason_without", "skip_without")


def reason_without(what: str, *packages: str) -> str:
    """Return the reason of a skip, from which `tests/conftest.py` reads the program and Debian's packages."""
    return f"{what} is missing: apt-get install {' '.join(packages)}"


def skip_without(what: str, *packages: str) -> NoReturn:
    """Skip the running test, because a program is not installed."""
    pytest.skip(reason_without(what, *packages))
