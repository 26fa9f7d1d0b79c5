"""Requests to lookup nodes and nodes, and their responses: both envelopes, both generations, and invalid input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import orjson
from attrs import field, frozen

from nsqext.errors import (
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    NotLookupd,
    NsqError,
    PartitionUnavailable,
    TopicNotFound,
    TopicNotReady,
    outside_text,
)
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.lookup.options import url_of
from nsqext.protocol.names import MAX_PARTITION
from nsqext.types import Address, TopicMeta

if TYPE_CHECKING:
    import httpx

    from nsqext.http.client import Reason
    from nsqext.lookup.options import LookupOptions


MapAddress = Callable[[Address], Address]
_SHOWN = 120  # quoted bytes of an unexpected response
_MAX_HOST = 255  # characters of a host name
_MAX_CHANNELS = 10_000  # per topic; only listed to the user
_SHARED_NODES = 4096  # nodes without topics, which many responses share
_SHARED_TEXT = 500  # longest text of a shared node
_GATEWAY_ERRORS = (502, 503, 504)  # of proxies whose server is down


@frozen(cache_hash=True)
class NodeInfo:
    """An nsqd as the lookup service reports it."""

    tcp: Address
    http: Address | None = None
    version: str = ""  #: contains ``HA`` in the redesigned generation
    hostname: str = ""
    #: partitions on the node by topic; empty tuples on the original NSQ. Only ``/nodes`` returns them.
    topics: Mapping[str, tuple[int, ...]] = field(factory=dict, hash=False)
    tombstoned: tuple[str, ...] = ()  #: topics hidden on this node by the lookup service

    @property
    def redesigned(self) -> bool:
        return "HA" in self.version


@frozen
class LookupNode:
    """A lookup node in ``/listlookup``."""

    address: Address  #: HTTP address
    epoch: int = 0  #: increases with each election of a lookup leader
    leader: bool = False  #: only the leader changes the cluster


@frozen
class LookupAnswer:
    """Response of a lookup node about a topic, or its error."""

    source: Address  #: the lookup node
    epoch: int = 0  #: from ``/listlookup``
    meta: TopicMeta | None = None  #: None if not sent (the original NSQ)
    partitions: Mapping[int, NodeInfo] = field(factory=dict)  #: leaders by partition
    nodes: tuple[NodeInfo, ...] = ()  #: nodes with the topic without partitions (the original NSQ)
    channels: tuple[str, ...] = ()
    error: NsqError | None = None  #: `TopicNotFound`, `TopicNotReady` or `LookupFailed`

    @property
    def found(self) -> bool:
        return self.error is None


def unwrap(status: int, body: bytes, source: Address) -> Any:
    """Return the data of a response, with or without the ``status_code`` envelope.

    Raises TopicNotFound, TopicNotReady, NotLookupd or LookupFailed.
    """
    code, text = status, ""
    data: Any = {}
    if body.strip():
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError:
            # the redesigned server does not escape error texts in JSON
            if status == 200 or not body.lstrip().startswith(b"{"):
                kind = LookupUnreachable if status >= 500 else NotLookupd  # a proxy whose server is not up yet
                raise _unexpected(f"HTTP {status} with {body[:_SHOWN]!r}", source, kind) from None
            text = body[:_SHOWN].decode("utf-8", "backslashreplace")
    if isinstance(data, dict) and "status_code" in data:
        code, text = data["status_code"], str(data.get("status_txt", ""))
        data = data.get("data")
    elif isinstance(data, dict) and not text:
        text = str(data.get("message", ""))
    if code != 200:
        raise _refusal(outside_text(str(code), _SHOWN) if type(code) is not int else code, text, source)
    return {} if data is None else data


def _refusal(code: Any, text: str, source: Address) -> NsqError:
    node, text = str(source), outside_text(text, _SHOWN)
    if text in ("TOPIC_NOT_FOUND", "Key not found"):
        return TopicNotFound(
            "the lookup service does not know the topic", node=node, hint="create it, or check its name"
        )
    if text.startswith("Topic has no channel"):
        return TopicNotReady(
            "the topic exists but has no channel, so that the lookup service does not offer it to producers",
            node=node,
            hint="create a channel: nsqext channel create TOPIC NAME, or start a consumer",
        )
    if code == 404:
        return _unexpected(f"HTTP 404 {text}".rstrip(), source)
    if code in (401, 403):
        return LookupFailed(
            f"the lookup node refuses access: {code} {text or '(no text)'}",
            node=node,
            hint="check auth_secret; it is sent over HTTPS and to loopback only, unless auth_over_http is set",
        )
    kind = LookupUnreachable if code in _GATEWAY_ERRORS else LookupFailed
    return kind(f"the lookup node responded {code} {text or '(no text)'}", node=node)


def _unexpected(what: str, source: Address, kind: type[LookupFailed] = NotLookupd) -> LookupFailed:
    hint = "give the address of nsqlookupd's HTTP side (4161 by default)"
    if kind is LookupUnreachable:
        hint = "is nsqlookupd up behind this address?"
    return kind(f"not a response of nsqlookupd: {what}", node=str(source), hint=hint)


def read_lookup(
    data: Any, source: Address, epoch: int = 0, max_nodes: int = 1024, mapped: MapAddress | None = None
) -> LookupAnswer:
    """Parse the data of ``/lookup``; raises TopicNotFound or LookupFailed.

    The redesigned generation returns empty lists and a meta of zeros to consumers of an unknown topic (captured:
    topic_delete).
    """
    try:
        meta = _read_meta(data.get("meta"))
        listed = (data.get("partitions") or {}).items()
        partitions = {_number(key): read_node(node, source, mapped) for key, node in islice(listed, MAX_PARTITION + 1)}
        led = {node.tcp for node in partitions.values()}
        listed_nodes = islice(data.get("producers") or (), max_nodes + len(led))
        producers = [read_node(node, source, mapped) for node in listed_nodes]
        # a redesigned node without a partition led one before, or will: it stores nothing of the topic by itself
        placed = bool(partitions or (meta and meta.partition_num))
        others = (node for node in producers if node.tcp not in led and not (placed and node.redesigned))
        nodes = tuple(dict.fromkeys(others))[:max_nodes]
        channels = tuple(outside_text(str(name)) for name in islice(data.get("channels") or (), _MAX_CHANNELS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unexpected(f"{orjson.dumps(data)[:_SHOWN]!r}", source) from error
    maybe_unknown = "partitions" in data or not data
    if maybe_unknown and not (partitions or nodes or channels or (meta and meta.partition_num)):
        raise _refusal(404, "TOPIC_NOT_FOUND", source)
    return LookupAnswer(source, epoch, meta, partitions, nodes, channels)


def _number(value: Any, most: int = MAX_PARTITION, least: int = 0) -> int:
    if type(value) is not int and not (isinstance(value, str) and value.isascii() and value.isdecimal()):
        raise ValueError(f"{str(value)[:_SHOWN]!r} is not a whole number")
    number = int(value)
    if not least <= number <= most:
        raise ValueError(f"{number} is out of range")
    return number


def _read_meta(data: Any) -> TopicMeta | None:
    if data is None:
        return None
    return TopicMeta(
        partition_num=_number(data.get("partition_num") or 0, MAX_PARTITION + 1),
        replica=_number(data.get("replica") or 0, MAX_PARTITION + 1),
        extend_support=bool(data.get("extend_support")),
        ordered=bool(data.get("ordered")),
        multi_part=bool(data.get("multi_part")),
        disable_channel_auto_create=bool(data.get("disable_channel_auto_create")),
    )


def read_node(data: Any, source: Address, mapped: MapAddress | None = None) -> NodeInfo:
    """Parse a node of a response; raises KeyError, TypeError, ValueError or AttributeError."""
    host = data["broadcast_address"]
    tcp, http = _address(host, data["tcp_port"], source, mapped), None
    if data.get("http_port"):
        http = _address(host, data["http_port"], source, mapped)
    version, hostname = outside_text(str(data.get("version", ""))), outside_text(str(data.get("hostname", "")))
    partitions = data.get("partitions") or {}
    topics = {
        outside_text(str(name)): tuple(sorted(_number(number) for number in partitions.get(name) or ()))
        for name in data.get("topics") or ()
    }
    marks = zip(data.get("topics") or (), data.get("tombstones") or (), strict=False)
    tombstoned = tuple(outside_text(str(name)) for name, hidden in marks if hidden)
    if topics or tombstoned or len(tcp.host) + len(version) + len(hostname) > _SHARED_TEXT:
        return NodeInfo(tcp, http, version, hostname, topics, tombstoned)
    return _shared_node(tcp, http, version, hostname)


@lru_cache(_SHARED_NODES)
def _shared_node(tcp: Address, http: Address | None, version: str, hostname: str) -> NodeInfo:
    return NodeInfo(tcp, http, version, hostname)


def _address(host: Any, port: Any, source: Address, mapped: MapAddress | None) -> Address:
    number = _number(port, 65535, 1)
    if not isinstance(host, str) or not host or outside_text(host, _MAX_HOST) != host:
        raise ValueError(f"{str(host)[:_SHOWN]!r}:{number} is not an address")
    listed = Address(host, number, listed_by=str(source))
    return listed if mapped is None else mapped(listed)


def read_lookup_nodes(
    data: Any, source: Address, max_nodes: int = 64, mapped: MapAddress | None = None
) -> tuple[LookupNode, ...]:
    """Parse the data of ``/listlookup`` (captured: lookupd_basic), always with the leader; raises LookupFailed."""
    try:
        leader = (data.get("lookupdleader") or {}).get("ID")
        listed = data.get("lookupdnodes") or ()
        if len(listed) > max_nodes:
            listed = sorted(listed, key=lambda node: not leader or node.get("ID") != leader)[:max_nodes]
        return tuple(
            LookupNode(
                _address(node["NodeIP"], node["HttpPort"], source, mapped),
                int(node.get("Epoch") or 0),
                bool(leader) and node.get("ID") == leader,
            )
            for node in listed
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unexpected(f"{orjson.dumps(data)[:_SHOWN]!r}", source) from error


_BARE = {"Accept": "application/vnd.nsq; version=1.0"}  # without envelope, with true status codes
_ERRORS: dict[Reason, tuple[type[LookupFailed], str | None]] = {
    "unreachable": (LookupUnreachable, "check that the node runs"),
    "not HTTP": (NotLookupd, "give the address of nsqlookupd's HTTP side (4161 by default)"),
    "untrusted": (
        NotLookupd,
        "give the CA certificates of the lookup service: LookupOptions(ca=...) or NSQEXT_LOOKUP_CA",
    ),
    "too long": (LookupFailed, "raise max_answer_size"),
}


class LookupHttp:
    """HTTP requests to nsqlookupd and nsqd."""

    def __init__(self, options: LookupOptions, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._options = options
        self._client = HttpClient(
            options.request_timeout, most=options.max_answer_size, tls=options.tls_context, transport=transport
        )

    async def ask(self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET") -> Any:
        """Return the data of a response; raises TopicNotFound, LookupFailed or InvalidState."""
        status, body = await self.fetch(address, path, params, method)
        return unwrap(status, body, address)

    async def fetch(
        self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body of a response; raises LookupUnreachable, LookupFailed, NotLookupd or InvalidState."""
        options, headers = self._options, _BARE
        if options.auth_secret is not None and options.may_authenticate(address):
            headers = {**_BARE, "Authorization": f"Bearer {options.auth_secret}"}
        try:
            url = f"{url_of(address)}{path}{'?' if params else ''}{urlencode(params)}"
            reply = await self._client.request(method, url, headers=headers, content=body)
        except (HttpRequestFailed, UnicodeError) as error:
            raise _lookup_error(error, str(address)) from error.__cause__
        return reply.status, reply.content

    async def fetch_node(
        self,
        address: Address,
        path: str,
        params: Mapping[str, str | int],
        method: str = "GET",
        body: bytes = b"",
        *,
        failure: type[NsqError] = PartitionUnavailable,
        **where: Any,
    ) -> tuple[int, bytes]:
        """Return status and body of an nsqd's response; raises ``failure`` or InvalidState."""
        try:
            return await self.fetch(address, path, params, method, body)
        except LookupFailed as error:
            hint = error.hint or "check that the node's HTTP side can be reached"
            raise failure(f"no response to {path}: {error.message}", node=error.node, hint=hint, **where) from error

    async def aclose(self) -> None:
        await self._client.aclose()


def _lookup_error(error: HttpRequestFailed | UnicodeError, node: str) -> LookupFailed | InvalidState:
    if isinstance(error, UnicodeError):
        return LookupFailed(f"no response: {error}", node=node)
    if error.reason == "closed":
        return InvalidState(error.text.replace("the client", "the lookup client"), node=node)
    kind, hint = _ERRORS.get(error.reason, (LookupFailed, None))
    return kind(error.text, node=node, hint=hint)
