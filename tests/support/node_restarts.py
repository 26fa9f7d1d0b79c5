"""Nodes of a real cluster that a test has killed, and that have to run again before the next one."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection
from typing import TYPE_CHECKING

import anyio

from nsqext import Admin, Producer
from nsqext.errors import NsqError
from tests.support.cluster_requests import cluster_requests, offered_partitions

if TYPE_CHECKING:
    from nsqext.admin.requests import ClusterRequests
    from nsqext.types import Receipt

__all__ = ("published_again", "start_nodes", "until_nodes_lead")

_PATIENCE = 300.0
_WRITABLE = 120.0


def start_nodes(command: str, numbers: Collection[int]) -> None:
    """Start nodes that were killed; without a command they are started by who supervises them."""
    if command:
        for number in numbers:
            subprocess.run(shlex.split(command.format(n=number)), check=True)


async def until_nodes_lead(lookupd: list[str], nodes: Collection[str], topics: dict[str, int]) -> None:
    """Wait until lookup lists all nodes, and offers every partition of the topics to producers.

    Args:
        lookupd: lookup addresses.
        nodes: TCP addresses of all nodes.
        topics: numbers of partitions, by topic.
    """
    async with Admin(lookupd) as admin, cluster_requests(lookupd) as requests:
        with anyio.fail_after(_PATIENCE):
            while not await _lead(admin, requests, nodes, topics):  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.5)


async def published_again(lookupd: list[str], topic: str, body: bytes) -> Receipt | None:
    """Publish a message as soon as the partition is writable; None if it is not within two minutes."""
    with anyio.move_on_after(_WRITABLE):
        while True:
            try:
                async with Producer(lookupd) as producer:
                    return await producer.publish(topic, body, trace_id=1)  # has an offset then
            except NsqError:
                await anyio.sleep(0.5)
    return None


async def _lead(admin: Admin, requests: ClusterRequests, nodes: Collection[str], topics: dict[str, int]) -> bool:
    try:
        listed = {str(node.tcp) for node in await admin.nodes()}
        return listed >= set(nodes) and all(
            [len(set(await offered_partitions(requests, topic))) == count for topic, count in topics.items()]
        )
    except NsqError:  # a lookup server that was restarted
        return False
