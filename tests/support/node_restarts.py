"""Nodes of a real cluster that a test has killed, and that have to run again before the next one."""

from __future__ import annotations

import anyio

from nsqext import Admin
from tests.support.cluster import REAL

__all__ = ("until_nodes_are_back",)

_NODES = 3
_PATIENCE = 120.0


def until_nodes_are_back() -> None:
    """Wait until the real cluster lists all its nodes; return at once for an embedded one."""
    if REAL:
        anyio.run(_wait)


async def _wait() -> None:
    async with Admin(REAL.split(",")) as admin:
        with anyio.fail_after(_PATIENCE):
            while len(await admin.nodes()) < _NODES:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.5)
