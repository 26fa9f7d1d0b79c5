"""Topics for apps."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nsqext.broker import Cluster


@pytest.fixture
def topics(cluster: Cluster) -> tuple[str, str]:
    """Two fresh topics with the channel ``ch``."""
    names = (f"a_{token_hex(4)}", f"b_{token_hex(4)}")
    for name in names:
        cluster.create_topic(name, channels=["ch"])
    return names
