"""Requests to lookup and nodes as another client sends them: unlike `nsqext.Admin`, they inform no client here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from nsqext.admin.requests import ClusterRequests
from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupOptions

__all__ = ("cluster_requests", "offered_partitions")

_SECONDS = 15.0  # nsqlookupd forwards a change to the nodes before it responds
_CHANGE = 120.0


@asynccontextmanager
async def cluster_requests(lookupd: Sequence[str] | str) -> AsyncIterator[ClusterRequests]:
    """Send requests to a cluster until the end of the block."""
    client = LookupClient(lookupd, LookupOptions(request_timeout=_SECONDS))
    try:
        yield ClusterRequests(client, _CHANGE)
    finally:
        await client.aclose()


async def offered_partitions(requests: ClusterRequests, topic: str) -> list[int]:
    """Return the partitions that lookup offers to producers, once for each node that lists them."""
    answers = await requests.client.lookup(topic, "w")
    return [partition for answer in answers for partition in answer.partitions]
