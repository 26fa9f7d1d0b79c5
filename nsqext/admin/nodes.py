"""Methods of the administration client that list and change nodes, and move partitions between them."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import orjson

from nsqext.admin.requests import AdminBase, ClusterRequests, ask_each, cluster_generation, http_address, no_partition
from nsqext.admin.stats import in_sync_replicas, node_statuses
from nsqext.errors import (
    ConnectionFailed,
    InvalidInput,
    LookupUnreachable,
    OperationNotSupported,
    PartitionUnavailable,
    outside_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.admin.results import NodeStatus
    from nsqext.lookup.responses import NodeInfo
    from nsqext.types import Address

# in both generations; the redesigned generation numbers them
_LEVELS = {"error": 0, "warning": 1, "info": 2, "debug": 3}
_ORIGINAL_LEVELS = {"warning": "warn"}

_ID = re.compile(r".+:\d+:\d+:\d+")
_OPTION = re.compile("[a-z0-9_]{1,100}")


class NodeAdmin(AdminBase):
    """Methods of `nsqext.Admin` for nodes."""

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """Return every nsqd that lookup lists, sorted by TCP address, and whether it responds.

        Raises:
            LookupFailed: no lookup node returned a usable response.
        """
        return await node_statuses(self._open())

    async def remove_node(self, node: str) -> None:
        """Make a redesigned cluster move all partitions of a node to other nodes, before its shutdown.

        Returns once the cluster has accepted. A real cluster begins within 30 s, and moves one partition after another;
        `nodes` shows the remaining topics. Partitions that no other node can hold stay. Only a restart of the lookup
        leader undoes it.

        Args:
            node: ``host:port`` of its TCP side, or its id in the cluster if it does not respond any more. Servers
                accept an unknown id, without an effect.

        Raises:
            InvalidInput: lookup lists no node with the address.
            OperationNotSupported, ConnectionFailed, LookupFailed: see `Admin`.
        """
        requests = self._open()
        await self._check_redesigned(requests, "remove_node")
        identity = node if _ID.fullmatch(node) else await node_id(requests, node)
        await requests.change_lookup("/cluster/node/remove", {"remove_node": identity})

    async def disable_writes(self, *, ordered_only: bool = False) -> None:
        """Make all nodes of the redesigned NSQ refuse publishes, until `enable_writes` or a restart.

        Args:
            ordered_only: refuse only publishes to ordered topics.

        Raises:
            ConnectionFailed, PartitionUnavailable: a node does not respond; the others are changed.
            OperationNotSupported, LookupFailed: see `Admin`.
        """
        await self._set_writes("disable_writes", "ordered" if ordered_only else "all")

    async def enable_writes(self) -> None:
        """Make all nodes accept publishes again; raises the errors of `disable_writes`."""
        await self._set_writes("enable_writes", "none")

    async def _set_writes(self, operation: str, kind: str) -> None:
        requests = self._open()
        await self._check_redesigned(requests, operation)
        await change_everywhere(requests, "/disable/write", {"type": kind}, lookupd=True)

    async def set_log_level(self, level: Literal["error", "warning", "info", "debug"]) -> None:
        """Set the log level of all nsqd nodes, and of the lookup nodes of the redesigned NSQ, until they restart.

        Raises:
            InvalidInput: the level is unknown.
            ConnectionFailed, PartitionUnavailable: a node does not respond; the others are changed.
            LookupFailed: no lookup node responds.
        """
        if level not in _LEVELS:
            raise InvalidInput(f"level={level!r} is none of {', '.join(_LEVELS)}")
        requests = self._open()
        infos = await requests.client.lists.nodes()
        if cluster_generation(infos) == "redesigned":
            await change_everywhere(requests, "/loglevel/set", {"loglevel": _LEVELS[level]}, lookupd=True)
            return
        value = _ORIGINAL_LEVELS.get(level, level).encode()
        await ask_each(infos, lambda info: option(requests, info, "log_level", value))

    async def node_option(self, node: str, name: str) -> object:
        """Return an option of an nsqd of either generation, as its JSON value; times are nanoseconds.

        Args:
            node: ``host:port`` of its TCP side.
            name: the option's flag, with underscores.

        Raises:
            InvalidInput: lookup lists no such node, or it has no such option.
            ConnectionFailed, LookupFailed: see `Admin`.
        """
        requests = self._open()
        return await option(requests, await node_info(requests, node), _option_name(name))

    async def set_node_option(self, node: str, name: str, value: object) -> object:
        """Change an option of an nsqd until it restarts, and return its new value.

        Nodes accept few options: ``log_level`` and ``nsqlookupd_tcp_addresses``, and on the redesigned NSQ ``verbose``,
        ``allow_ext_compatible``, ``allow_sub_ext_compatible``, ``max_conn_for_client`` and ``max_pub_waiting_size``.

        Args:
            node: ``host:port`` of its TCP side.
            value: text is sent unchanged, anything else as JSON.

        Raises:
            InvalidInput: lookup lists no such node, or it refuses option or value.
            ConnectionFailed, LookupFailed: see `Admin`.
        """
        try:
            sent = value.encode() if isinstance(value, str) else orjson.dumps(value)
        except TypeError as error:
            raise InvalidInput(f"{name}={value!r} cannot be sent as JSON: {error}", node=node) from None
        if not sent:
            raise InvalidInput(f"{name} is empty", node=node, hint="nodes refuse an empty value")
        requests = self._open()
        return await option(requests, await node_info(requests, node), _option_name(name), sent)

    async def _check_redesigned(self, requests: ClusterRequests, operation: str) -> None:
        if cluster_generation(await requests.client.lists.nodes()) == "original":
            raise OperationNotSupported(f"{operation} is not supported: the original NSQ cannot do this")


def _option_name(name: str) -> str:
    if not _OPTION.fullmatch(name):
        raise InvalidInput(f"{name!r} is not the name of an option", hint="write it as the flag, with underscores")
    return name


async def node_info(requests: ClusterRequests, node: str) -> NodeInfo:
    """Return the node with a TCP address."""
    infos = await requests.client.lists.nodes()
    for info in infos:
        if node == str(info.tcp):
            return info
    raise InvalidInput(
        f"no node has the TCP address {node!r}",
        hint=f"known: {outside_text(', '.join(str(info.tcp) for info in infos))}",
    )


async def node_id(requests: ClusterRequests, node: str) -> str:
    """Return a redesigned node's id, ``host:rpc_port:tcp_port:number``, from its options: lookup lists leaders only."""
    info = await node_info(requests, node)
    rpc_port, number = [await option(requests, info, name) for name in ("rpc_port", "id")]
    return f"{info.tcp.host}:{rpc_port}:{info.tcp.port}:{number}"


async def option(requests: ClusterRequests, info: NodeInfo, name: str, value: bytes = b"") -> Any:
    """Return an option of a node as its JSON value; with a value, change it first."""
    status, body = await requests.fetch(http_address(info), f"/config/{name}", {}, "PUT" if value else "GET", value)
    if status in (400, 404, 413):
        what = f"the node refuses {name}={value.decode()!r}" if value else f"the node has no option {name!r}"
        raise InvalidInput(f"{what}: {outside_text(body[:200].decode('utf-8', 'replace'))}", node=str(info.tcp))
    if status != 200:
        raise ConnectionFailed(f"/config/{name} returned {status}: {body[:200]!r}", node=str(info.tcp))
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")  # texts are not quoted


async def change_everywhere(
    requests: ClusterRequests, path: str, params: Mapping[str, str | int], *, lookupd: bool
) -> None:
    """Send a change to every nsqd, with ``lookupd`` also to lookup nodes; raise a node's error after all are asked."""
    nodes = [http_address(info) for info in await requests.client.lists.nodes()]
    if lookupd:
        nodes += [node.address for node in await requests.client.lookup_nodes()]

    async def change(node: Address) -> None:
        await requests.post(node, path, params)

    await ask_each(nodes, change)


async def move_partition(requests: ClusterRequests, topic: str, partition: int, source: str, target: str) -> None:
    """Move a replica or leader; see `nsqext.Admin.move_partition`."""
    where = await requests.led(topic)
    if partition not in where.leaders:
        raise no_partition(topic, partition)
    leads = str(where.leaders[partition]) == source
    if not leads and source not in await in_sync_replicas(requests, where, partition):
        raise InvalidInput(f"{source} has no replica of the partition", topic=topic, partition=partition)
    params: dict[str, str | int] = {
        "topic": topic,
        "partition": partition,
        "move_from": await node_id(requests, source),
        "move_to": await node_id(requests, target),
        "move_leader": "true" if leads else "false",
    }
    with suppress(LookupUnreachable):  # it responds after the move, maybe later than a request's timeout
        await requests.change_settled("/topic/partition/move", params, topic, bounded=False)

    async def check() -> None:
        now = await requests.led(topic)
        replicas = await in_sync_replicas(requests, now, partition)
        if target not in replicas or (leads and str(now.leaders[partition]) != target):
            raise PartitionUnavailable("the partition has not moved yet", topic=topic, partition=partition)

    await requests.settled(check, topic, bounded=False)
