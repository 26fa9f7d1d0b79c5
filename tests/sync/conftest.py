"""A cluster for the tests of the blocking clients."""

from __future__ import annotations

from collections.abc import Iterator
from secrets import token_hex

import pytest

from nsqext.broker import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, shared by all tests here."""
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A fresh topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, extend=True, channels=["ch"])
    return name
