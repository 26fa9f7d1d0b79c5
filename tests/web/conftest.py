"""The page is served by asyncio; one test in `test_pages.py` runs it on trio too."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop of a test marked with ``anyio``."""
    return str(request.param)
