"""Requests that concern nodes: their ids in the cluster, their options, and moves of partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import orjson

from nsqext.admin.requests import ask_all, http_address
from nsqext.admin.stats import in_sync_replicas
from nsqext.errors import ConnectionFailed, InvalidInput, LookupFailed, LookupUnreachable, PartitionUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.admin.requests import ClusterRequests
    from nsqext.lookup.responses import NodeInfo
    from nsqext.types import Address

_PAUSE = 0.2  # seconds between two looks at a partition that is being moved
_LATER = ("cluster is unstable", "another balance is running")  # refusals that pass


async def node_info(requests: ClusterRequests, node: str) -> NodeInfo:
    """Return the node with a TCP address."""
    infos = await requests.client.nodes()
    for info in infos:
        if node == str(info.tcp):
            return info
    raise InvalidInput(
        f"no node has the TCP address {node!r}", hint=f"known: {', '.join(str(info.tcp) for info in infos)}"
    )


async def node_id(requests: ClusterRequests, node: str) -> str:
    """Return the id of a node of the redesigned NSQ in its cluster: ``host:rpc_port:tcp_port:number``.

    Lookup lists the ids of leaders only, so the node is asked for its parts.
    """
    info = await node_info(requests, node)
    rpc_port, number = [await option(requests, info, name) for name in ("rpc_port", "id")]
    return f"{info.tcp.host}:{rpc_port}:{info.tcp.port}:{number}"


async def option(requests: ClusterRequests, info: NodeInfo, name: str, value: bytes = b"") -> Any:
    """Return an option of a node, as its JSON value; with a value, change it first."""
    status, body = await requests.fetch(http_address(info), f"/config/{name}", {}, "PUT" if value else "GET", value)
    if status in (400, 404, 413):
        what = f"the node refuses {name}={value.decode()!r}" if value else f"the node has no option {name!r}"
        raise InvalidInput(f"{what}: {body[:200].decode('utf-8', 'replace')}", node=str(info.tcp))
    if status != 200:
        raise ConnectionFailed(f"/config/{name} returned {status}: {body[:200]!r}", node=str(info.tcp))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")  # texts are not quoted


async def change_everywhere(
    requests: ClusterRequests, path: str, params: Mapping[str, str | int], *, lookupd: bool
) -> None:
    """Send a change to every nsqd, and with ``lookupd`` to every lookup node.

    Raises:
        PartitionUnavailable, ConnectionFailed, InvalidInput: the error of one of the nodes; the others are changed.
    """
    nodes = [http_address(info) for info in await requests.client.nodes()]
    if lookupd:
        nodes += [node.address for node in await requests.client.lookup_nodes()]

    async def change(node: Address) -> None:
        await requests.post(node, path, params)

    _, failed = await ask_all(nodes, change)
    for error in failed.values():
        raise error


async def move_partition(requests: ClusterRequests, topic: str, partition: int, source: str, target: str) -> None:
    """Move a replica of a partition, or its leader, and return once that is done; see `nsqext.Admin.move_partition`."""
    where = await requests.led(topic)
    if partition not in where.leaders:
        raise InvalidInput(f"the topic has no partition {partition}", topic=topic, partition=partition)
    leads = str(where.leaders[partition]) == source
    if not leads and source not in (await in_sync_replicas(requests, where))[partition]:
        raise InvalidInput(f"{source} has no replica of the partition", topic=topic, partition=partition)
    params: dict[str, str | int] = {
        "topic": topic,
        "partition": partition,
        "move_from": await node_id(requests, source),
        "move_to": await node_id(requests, target),
        "move_leader": "true" if leads else "false",
    }
    while True:
        try:
            await requests.change_lookup("/topic/partition/move", params)
            break
        except LookupUnreachable:  # it responds after the move, which may take longer than a request
            break
        except LookupFailed as error:
            if not any(text in error.message for text in _LATER):
                raise
        await anyio.sleep(_PAUSE)

    async def check() -> None:
        now = await requests.led(topic)
        replicas = (await in_sync_replicas(requests, now))[partition]
        if target not in replicas or (leads and str(now.leaders[partition]) != target):
            raise PartitionUnavailable("the partition has not moved yet", topic=topic, partition=partition)

    await requests.settled(check, topic)
