"""Create a topic, and wait until it accepts publishes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from nsqext.admin.requests import http_of
from nsqext.errors import InvalidInput, LookupFailed, PartitionUnavailable, TopicNotFound, TopicNotReady
from nsqext.lookup.partition_map import merged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.admin.requests import ClusterRequests
    from nsqext.types import Address

EXPAND = "/topic/partition/expand"
CREATE = "/topic/create"


async def create_topic(
    requests: ClusterRequests, topic: str, params: Mapping[str, str | int], *, exist_ok: bool
) -> None:
    """Register a topic at the lookup service, with these arguments of ``/topic/create``."""
    exists = InvalidInput("the topic exists", topic=topic, hint="pass exist_ok=True to keep it as it is")
    if not exist_ok:
        # the server accepts an existing topic with the same numbers and flags (captured: topic_create)
        with suppress(TopicNotFound):
            await requests.find(topic)
            raise exists
    try:
        await requests.change_lookup(CREATE, params)
    except LookupFailed as error:
        if "No node is available" in error.message and not params.keys() & {"multipart", "orderedmulti"}:
            raise _too_few_nodes(error, topic, params, len(await requests.client.nodes())) from error
        if "already exist" not in error.message:
            raise
        if not exist_ok:
            raise exists from error


def _too_few_nodes(error: LookupFailed, topic: str, params: Mapping[str, str | int], nodes: int) -> LookupFailed:
    partitions, replicas = int(params["partition_num"]), int(params["replicator"])
    if replicas > nodes:
        return LookupFailed(
            f"{replicas} replicas need {replicas} nodes, but the cluster has {nodes}",
            topic=topic,
            hint="use fewer replicas",
        )
    if partitions * replicas <= nodes:
        return error
    needed = f"{partitions} partitions with {replicas} replicas" if replicas > 1 else f"{partitions} partitions"
    return LookupFailed(
        f"{needed} need {partitions * replicas} nodes, but the cluster has {nodes}",
        topic=topic,
        hint="allow several partitions on one node (multipart, --multipart), or use fewer",
    )


async def wait_writable(requests: ClusterRequests, topic: str, path: str, params: Mapping[str, str | int]) -> None:
    """Create a topic on nodes of the original generation, then wait until each partition's leader accepts publishes.

    Nodes of the original generation register the topic at lookup some time after they have created it. Without this
    wait, the next change, of a channel for example, would not reach them.

    Args:
        path: path of the request for the partitions that lookup has accepted; it changes nothing if it is repeated.
        params: its arguments; after an expansion, lookup must report the number of partitions.
    """
    created: set[Address] = set()
    for info in await requests.client.nodes():
        if not info.is_ha and info.http is not None:
            await requests.post(info.http, "/topic/create", {"topic": topic})
            created.add(info.tcp)
    wanted = int(params["partition_num"]) if path == EXPAND else 0

    async def check() -> None:
        where = await requests.led(topic)
        if where.partition_num < wanted:
            raise PartitionUnavailable(f"lookup does not report {wanted} partitions yet", topic=topic)
        unregistered = created.difference(where.nodes)
        if unregistered and not where.leaders:
            raise PartitionUnavailable("lookup does not list the node yet", topic=topic, node=str(min(unregistered)))
        for number, node in where.leaders.items():
            params: dict[str, str | int] = {"topic": topic, "partition": number}
            # the leader refuses the missing trace id; other nodes refuse earlier (captured: http_pubtrace)
            with suppress(InvalidInput):
                await requests.post(http_of(where, node), "/pubtrace", params, b"x")

    async def request_again() -> None:
        with suppress(LookupFailed, TopicNotFound):  # it exists with other flags, or the cluster is unstable
            await requests.change_lookup(path, params)

    await requests.settled(check, topic, passing=TopicNotFound, again=request_again, bounded=False)


async def wait_offered(requests: ClusterRequests, topic: str) -> None:
    """Wait until lookup offers every partition of a topic with channels to producers."""

    async def check() -> None:
        where = merged(topic, "w", await requests.client.lookup(topic, "w"))
        if len(where.leaders) < where.partition_num:
            raise PartitionUnavailable(
                f"lookup offers {len(where.leaders)} of {where.partition_num} partitions to producers", topic=topic
            )

    await requests.settled(check, topic, passing=TopicNotReady, bounded=False)
