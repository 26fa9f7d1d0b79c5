"""What lookup nodes answer, read into values: both envelopes, both generations, and what is no answer at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from attrs import field, frozen

from nsqext.errors import LookupFailed, NotLookupd, NsqError, TopicNotFound
from nsqext.protocol.names import MAX_PARTITION
from nsqext.types import Address, TopicMeta

__all__ = ("LookupAnswer", "LookupNode", "NodeInfo", "read_lookup", "read_lookup_nodes", "read_node", "unwrap")

_SHOWN = 120  # bytes of an unexpected answer that an error message shows


@frozen
class NodeInfo:
    """An nsqd as lookup names it.

    Attributes:
        tcp: where clients connect to.
        http: its HTTP side.
        version: its version; ``HA`` in it marks the redesigned generation.
        hostname: its name.
        topics: partitions that it holds by topic; empty tuples on the classic generation. Only ``/nodes`` reports them.
        tombstoned: topics that lookup hides on this node.
    """

    tcp: Address
    http: Address | None = None
    version: str = ""
    hostname: str = ""
    topics: Mapping[str, tuple[int, ...]] = field(factory=dict, hash=False)
    tombstoned: tuple[str, ...] = ()


@frozen
class LookupNode:
    """A lookup node as listlookup names it.

    Attributes:
        address: its HTTP side.
        epoch: grows with each election among the lookup nodes.
        leader: it is the one that changes the cluster.
    """

    address: Address
    epoch: int = 0
    leader: bool = False


@frozen
class LookupAnswer:
    """What one lookup node told about a topic, or why it did not.

    Attributes:
        source: the lookup node.
        epoch: its epoch, where listlookup tells one.
        meta: the topic's meta; None where the node does not tell (the original NSQ).
        partitions: leaders by partition.
        nodes: nodes that hold the topic without partitions (the original NSQ).
        channels: the topic's channels.
        error: `TopicNotFound` where the node does not know the topic, `LookupFailed` where it gave no usable answer.
    """

    source: Address
    epoch: int = 0
    meta: TopicMeta | None = None
    partitions: Mapping[int, NodeInfo] = field(factory=dict)
    nodes: tuple[NodeInfo, ...] = ()
    channels: tuple[str, ...] = ()
    error: NsqError | None = None

    @property
    def found(self) -> bool:
        """Whether the node knows the topic."""
        return self.error is None


def unwrap(status: int, body: bytes, source: Address) -> Any:
    """Return the data of an answer, out of the ``status_code`` envelope or bare.

    Raises:
        TopicNotFound: the node does not know the topic, or offers it to consumers only.
        LookupFailed: any other refusal, or an answer that is not JSON.
    """
    code, text = status, ""
    data: Any = {}
    if body.strip():
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError:
            # error texts are put into JSON without escaping by the redesigned server
            if status == 200 or not body.lstrip().startswith(b"{"):
                starting = LookupFailed if status >= 500 else NotLookupd  # a proxy whose server is not up yet
                raise _nonsense(f"HTTP {status} with {body[:_SHOWN]!r}", source, starting) from None
            text = body[:_SHOWN].decode("utf-8", "backslashreplace")
    if isinstance(data, dict) and "status_code" in data:
        code, text = data["status_code"], str(data.get("status_txt", ""))
        data = data.get("data")
    elif isinstance(data, dict) and not text:
        text = str(data.get("message", ""))
    if code != 200:
        raise _refusal(code, text, source)
    return {} if data is None else data


def _refusal(code: Any, text: str, source: Address) -> NsqError:
    node = str(source)
    if text in ("TOPIC_NOT_FOUND", "Key not found"):
        return TopicNotFound(
            "the lookup service does not know the topic", node=node, hint="create it, or check its name"
        )
    if text.startswith("Topic has no channel"):
        return TopicNotFound(
            "the topic has no channel, therefore lookup does not offer it to producers",
            node=node,
            hint="create a channel first",
        )
    if code == 404:
        return _nonsense(f"HTTP 404 {text}".rstrip(), source)
    return LookupFailed(f"the lookup node answers {code} {text or '(no text)'}", node=node)


def _nonsense(what: str, source: Address, kind: type[LookupFailed] = NotLookupd) -> LookupFailed:
    return kind(
        f"this is no lookup node's answer: {what}",
        node=str(source),
        hint="give the address of nsqlookupd's HTTP side (4161 by default)",
    )


def read_lookup(data: Any, source: Address, epoch: int = 0) -> LookupAnswer:
    """Read the data of ``/lookup``.

    A topic that a node of the redesigned generation does not know is answered to consumers with empty lists and a
    meta of zeros (captured: topic_delete).

    Raises:
        TopicNotFound: so it is.
        LookupFailed: the data cannot be that of a lookup.
    """
    try:
        meta = _read_meta(data.get("meta"))
        partitions = {_partition(key): read_node(node) for key, node in (data.get("partitions") or {}).items()}
        led = {node.tcp for node in partitions.values()}
        others = (read_node(node) for node in data.get("producers") or ())
        nodes = tuple(dict.fromkeys(node for node in others if node.tcp not in led))
        channels = tuple(map(str, data.get("channels") or ()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _nonsense(f"{orjson.dumps(data)[:_SHOWN]!r}", source) from error
    unknown = "partitions" in data or not data
    if unknown and not (partitions or nodes or channels or (meta and meta.partition_num)):
        raise _refusal(404, "TOPIC_NOT_FOUND", source)
    return LookupAnswer(source, epoch, meta, partitions, nodes, channels)


def _partition(key: str) -> int:
    partition = int(key)
    if not 0 <= partition <= MAX_PARTITION:
        raise ValueError(f"partition {partition}")
    return partition


def _read_meta(data: Any) -> TopicMeta | None:
    if data is None:
        return None
    return TopicMeta(
        partition_num=_count(data.get("partition_num")),
        replica=_count(data.get("replica")),
        extend_support=bool(data.get("extend_support")),
        ordered=bool(data.get("ordered")),
        multi_part=bool(data.get("multi_part")),
        disable_channel_auto_create=bool(data.get("disable_channel_auto_create")),
    )


def _count(value: Any) -> int:
    count = int(value or 0)
    if not 0 <= count <= MAX_PARTITION + 1:
        raise ValueError(f"{count} is out of bounds")
    return count


def read_node(data: Any) -> NodeInfo:
    """Read one node of an answer.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    host = data["broadcast_address"]
    return NodeInfo(
        tcp=_address(host, data["tcp_port"]),
        http=_address(host, data["http_port"]) if data.get("http_port") else None,
        version=str(data.get("version", "")),
        hostname=str(data.get("hostname", "")),
        topics=_read_topics(data),
        tombstoned=tuple(str(name) for name, hidden in _tombstones(data) if hidden),
    )


def _tombstones(data: Any) -> Iterable[tuple[Any, Any]]:
    return zip(data.get("topics") or (), data.get("tombstones") or (), strict=False)


def _read_topics(data: Any) -> dict[str, tuple[int, ...]]:
    partitions = data.get("partitions") or {}
    return {
        str(name): tuple(sorted(_partition(number) for number in partitions.get(name) or ()))
        for name in data.get("topics") or ()
    }


def _address(host: Any, port: Any) -> Address:
    number = int(port)
    if not isinstance(host, str) or not host or not 1 <= number <= 65535:
        raise ValueError(f"{host!r}:{port!r} is no address")
    return Address(host, number)


def read_lookup_nodes(data: Any, source: Address) -> tuple[LookupNode, ...]:
    """Read the data of ``/listlookup``; its ports are texts (captured: lookupd_basic).

    Raises:
        LookupFailed: the data cannot be that of a listlookup.
    """
    try:
        leader = (data.get("lookupdleader") or {}).get("ID")
        return tuple(
            LookupNode(
                _address(node["NodeIP"], node["HttpPort"]),
                int(node.get("Epoch") or 0),
                bool(leader) and node.get("ID") == leader,
            )
            for node in data.get("lookupdnodes") or ()
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _nonsense(f"{orjson.dumps(data)[:_SHOWN]!r}", source) from error
