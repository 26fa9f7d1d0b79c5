"""A server has an event loop of its own, which is always asyncio."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The event loop of servers."""
    return "asyncio"
