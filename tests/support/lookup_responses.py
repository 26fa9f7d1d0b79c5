"""Answers of lookup nodes, made short, for the tests of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from nsqext.errors import LookupFailed, TopicNotFound
from nsqext.lookup.responses import LookupAnswer, NodeInfo
from nsqext.types import Address, TopicMeta

DATA = Path(__file__).parents[1] / "lookup" / "data"


def recorded(file: str) -> list[dict[str, Any]]:
    """Return the recorded answers of a server, as path, Accept header, status and body."""
    answers: list[dict[str, Any]] = orjson.loads((DATA / file).read_bytes())
    return answers


def node(name: str) -> NodeInfo:
    """Return a node ``n1`` with its usual ports."""
    return NodeInfo(tcp(name), Address(name, 4151))


def tcp(name: str) -> Address:
    """Return a node's TCP address."""
    return Address(name, 4150)


def told(
    source: str,
    partitions: Mapping[int, str] | None = None,
    *,
    num: int = 0,
    nodes: Sequence[str] = (),
    epoch: int = 0,
    extend: bool = False,
) -> LookupAnswer:
    """Return an answer of a lookup node that knows the topic."""
    meta = TopicMeta(partition_num=num, replica=1, extend_support=extend) if num else None
    leaders = {partition: node(name) for partition, name in (partitions or {}).items()}
    return LookupAnswer(Address(source, 4161), epoch, meta, leaders, tuple(map(node, nodes)))


def failed(source: str) -> LookupAnswer:
    """Return what stands for a lookup node that did not answer."""
    return LookupAnswer(Address(source, 4161), error=LookupFailed("no answer"))


def unknown(source: str) -> LookupAnswer:
    """Return the answer of a lookup node that does not know the topic."""
    return LookupAnswer(Address(source, 4161), error=TopicNotFound("unknown"))


def lookup_json(
    partitions: Mapping[int, str] | None = None,
    *,
    num: int = 0,
    nodes: Sequence[str] = (),
    extend: bool = False,
) -> dict[str, Any]:
    """Return the data of ``/lookup`` as the redesigned server gives it; node names are ``host:port``."""
    leaders = {str(key): node_json(name) for key, name in (partitions or {}).items()}
    producers = {node["broadcast_address"] + str(node["tcp_port"]): node for node in leaders.values()}
    return {
        "channels": ["ch"] if leaders or nodes else [],
        "meta": {
            "disable_channel_auto_create": False,
            "extend_support": extend,
            "multi_part": False,
            "ordered": False,
            "partition_num": num,
            "replica": 1 if num else 0,
        },
        "partitions": leaders,
        "producers": [*producers.values(), *map(node_json, nodes)],
    }


def node_json(address: str) -> dict[str, Any]:
    """Return a node as lookup gives it."""
    host, _, port = address.rpartition(":")
    return {
        "broadcast_address": host,
        "hostname": host,
        "tcp_port": int(port),
        "http_port": int(port) + 1,
        "version": "0.3.7-HA.1.13.0",
    }


def list_json(*addresses: str, leader: str = "", epochs: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the data of ``/listlookup``."""
    nodes = [
        {
            "ID": address,
            "NodeIP": address.rpartition(":")[0],
            "TcpPort": "4160",
            "HttpPort": address.rpartition(":")[2],
            "RpcPort": "4260",
            "Epoch": (epochs or {}).get(address, 0),
        }
        for address in addresses
    ]
    first = next((node for node in nodes if node["ID"] == leader), {})
    return {"lookupdleader": first, "lookupdnodes": nodes}
