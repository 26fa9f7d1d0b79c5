"""A cluster for the tests of a module, and a topic for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.broker import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes, or ``NODES`` of the module; each test uses topics of its own."""
    with Cluster(getattr(request.module, "NODES", 3)) as running:
        yield running


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own with two partitions and a channel."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**12}"
    cluster.create_topic(name, partitions=2, channels=["ch"])
    return name
