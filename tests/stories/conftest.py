"""Users run clients on any event loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import EVERY_LOOP


@pytest.fixture(scope="module", params=list(EVERY_LOOP.values()), ids=list(EVERY_LOOP))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Every event loop."""
    return request.param
