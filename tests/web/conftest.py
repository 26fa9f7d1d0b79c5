"""The page is served by asyncio; one test in `test_pages.py` runs it on trio too."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The event loop of a test marked with ``anyio``."""
    return "asyncio"
