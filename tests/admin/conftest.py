"""Lookup nodes for the requests of the administration client."""

from __future__ import annotations

import pytest

from tests.support.fake_lookupd import LookupNodes


@pytest.fixture
def nodes() -> LookupNodes:
    """Lookup nodes of which b leads."""
    lookup_nodes = LookupNodes()
    lookup_nodes.lists("a:4161", "a:4161", "b:4161", leader="b:4161")
    return lookup_nodes
