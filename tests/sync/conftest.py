"""A cluster for the tests of the blocking clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsqext.broker import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, shared by all tests here."""
    with Cluster(nodes=2) as cluster:
        yield cluster
