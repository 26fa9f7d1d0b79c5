"""The server's side of IDENTIFY for both generations."""

from __future__ import annotations

from typing import Any

import orjson
from attrs import define, field, frozen

from nsqext.protocol.identify import DISPATCH_TYPES
from nsqext.protocol.json_fields import UnreadableFields, read_fields
from nsqext.protocol.names import MAX_TAG_BYTES
from nsqext.protocol.server.request_error import RequestError

Generation = str
"""``redesigned`` (youzan/nsq) or ``original`` (nsqio/nsq)."""


@frozen
class ServerLimits:
    """What a server allows and offers; sizes in bytes, times in seconds.

    Defaults are the redesigned server's. ``max_channel_consumers`` and ``max_connections`` are 0 for no limit. Without
    ``key_failover``, a consumer's dispatch type is ignored, as by released servers.
    """

    generation: Generation = "redesigned"
    version: str = "0.3.7-HA.1.13.0"
    max_msg_size: int = 1024 * 1024
    max_body_size: int = 5 * 1024 * 1024
    max_rdy_count: int = 2500
    msg_timeout: float = 60.0
    max_msg_timeout: float = 900.0
    max_req_timeout: float = 3 * 24 * 3600.0
    heartbeat_interval: float = 30.0
    max_heartbeat_interval: float = 60.0
    max_output_buffer_size: int = 64 * 1024
    output_buffer_size: int = 100
    output_buffer_timeout: float = 0.05
    min_output_buffer_timeout: float = 0.001
    max_output_buffer_timeout: float = 1.0
    tls: bool = False
    tls_required: bool = False
    snappy: bool = True
    deflate: bool = True
    max_deflate_level: int = 6
    auth: bool = False
    max_channel_consumers: int = 0
    max_connections: int = 0
    topology_region: str = ""
    topology_zone: str = ""
    key_failover: bool = True

    @classmethod
    def original(cls, **changes: Any) -> ServerLimits:
        """Return the original server's limits."""
        values: dict[str, Any] = {
            "generation": "original",
            "version": "1.3.0",
            "max_req_timeout": 3600.0,
            "output_buffer_size": 16 * 1024,
            "output_buffer_timeout": 0.25,
            "min_output_buffer_timeout": 0.025,
            "max_output_buffer_timeout": 30.0,
        }
        return cls(**(values | changes))


@define
class ClientSettings:
    """Settings of a connection after IDENTIFY; times in seconds."""

    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    feature_negotiation: bool = False
    heartbeat_interval: float = 30.0
    msg_timeout: float = 60.0
    output_buffer_size: int = 100
    output_buffer_timeout: float = 0.05
    sample_rate: int = 0
    tls: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = 0
    desired_tag: str = ""
    extend_support: bool = False
    ext_filter: dict[str, Any] = field(factory=dict)
    dispatch: str = ""
    key_header: str = ""
    raw: dict[str, Any] = field(factory=dict)

    @classmethod
    def defaults(cls, limits: ServerLimits) -> ClientSettings:
        """Return the settings before IDENTIFY."""
        timeout, original = limits.output_buffer_timeout, limits.generation == "original"
        return cls(
            heartbeat_interval=limits.heartbeat_interval,
            msg_timeout=limits.msg_timeout,
            output_buffer_size=limits.output_buffer_size,
            output_buffer_timeout=timeout if original else min(timeout, limits.max_output_buffer_timeout),
        )


_INT32 = (1 << 31) - 1
_FILTER_PAIR = {"filter_ext_key": str, "filter_data": str}
_FILTER = {"type": int, "inverse": bool, **_FILTER_PAIR, "filter_data_list": [_FILTER_PAIR]}
_SCHEMA: dict[str, Any] = {
    "client_id": str,
    "hostname": str,
    "user_agent": str,
    "feature_negotiation": bool,
    "heartbeat_interval": int,
    "output_buffer_size": int,
    "output_buffer_timeout": int,
    "tls_v1": bool,
    "deflate": bool,
    "deflate_level": int,
    "snappy": bool,
    "sample_rate": _INT32,
    "msg_timeout": int,
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "redesigned": _SCHEMA
    | {"short_id": str, "long_id": str, "desired_tag": str, "extend_support": bool, "ext_filter": _FILTER}
    | {"dispatch": str, "key_header": str},
    "original": _SCHEMA | {"topology_region": str, "topology_zone": str},
}


def negotiate(body: bytes, limits: ServerLimits, settings: ClientSettings) -> None:
    """Apply IDENTIFY to a connection's settings, with checks in the servers' order.

    Raises a fatal `RequestError` with the server's text (captured: identify_bounds, identify_malformed).
    """
    try:
        data = read_fields(body, _SCHEMAS[limits.generation])
    except UnreadableFields as error:
        raise RequestError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
    settings.raw = data
    settings.client_id = data.get("client_id") or data.get("short_id", "")
    settings.hostname = data.get("hostname") or data.get("long_id", "")
    settings.user_agent = data.get("user_agent", "")
    settings.feature_negotiation = data.get("feature_negotiation", False)
    _heartbeat(settings, limits, data.get("heartbeat_interval", 0))
    if limits.generation == "original":
        _buffer_timeout(settings, limits, data.get("output_buffer_timeout", 0))
        _buffer_size(settings, limits, data.get("output_buffer_size", 0))
    else:
        _buffer_size(settings, limits, data.get("output_buffer_size", 0))
        timeout = data.get("output_buffer_timeout", 0)
        _buffer_timeout(settings, limits, 10 if 0 < timeout < 10 else timeout)
    rate = data.get("sample_rate", 0)
    _check("sample rate", rate, 0, 99)
    settings.sample_rate = rate
    timeout = data.get("msg_timeout", 0)
    if timeout:
        _check("msg timeout", timeout, 1000, limits.max_msg_timeout * 1000)
        settings.msg_timeout = timeout / 1000
    if limits.generation == "redesigned":
        _tag(settings, data.get("desired_tag", ""))
        settings.extend_support = settings.extend_support or data.get("extend_support", False)
        settings.ext_filter = data.get("ext_filter", {})
        if limits.key_failover:
            _dispatch(settings, data.get("dispatch", ""), data.get("key_header", ""))
    _layers(settings, limits, data)


def _check(what: str, value: int, least: float, most: float) -> None:
    if not least <= value <= most:
        raise RequestError("E_BAD_BODY", f"IDENTIFY {what} ({value}) is invalid")


def _heartbeat(settings: ClientSettings, limits: ServerLimits, value: int) -> None:
    if value == -1:
        settings.heartbeat_interval = 0.0
    elif value:
        _check("heartbeat interval", value, 1000, limits.max_heartbeat_interval * 1000)
        settings.heartbeat_interval = value / 1000


def _buffer_size(settings: ClientSettings, limits: ServerLimits, value: int) -> None:
    largest = limits.max_output_buffer_size
    if value == -1:
        settings.output_buffer_size = 1
        if limits.generation == "original":
            settings.output_buffer_timeout = 0.0
    elif value > largest and limits.generation == "redesigned":
        settings.output_buffer_size = largest
    elif value:
        _check("output buffer size", value, 64, largest)
        settings.output_buffer_size = value


def _buffer_timeout(settings: ClientSettings, limits: ServerLimits, value: int) -> None:
    if value == -1:
        settings.output_buffer_timeout = 0.0
    elif value:
        shortest, longest = limits.min_output_buffer_timeout * 1000, limits.max_output_buffer_timeout * 1000
        _check("output buffer timeout", value, shortest, longest)
        settings.output_buffer_timeout = value / 1000


def _tag(settings: ClientSettings, tag: str) -> None:
    size = len(tag.encode())
    if size > MAX_TAG_BYTES:
        raise RequestError("E_BAD_BODY", f"IDENTIFY invalid tag len {size}, exceed limit {MAX_TAG_BYTES}")
    settings.desired_tag = tag or settings.desired_tag


def _dispatch(settings: ClientSettings, dispatch: str, key_header: str) -> None:
    """Set the dispatch type, which the real server ignores."""
    if dispatch and dispatch not in DISPATCH_TYPES:
        raise RequestError("E_BAD_BODY", f"IDENTIFY dispatch ({dispatch}) is invalid")
    settings.dispatch, settings.key_header = dispatch, key_header


def _layers(settings: ClientSettings, limits: ServerLimits, data: dict[str, Any]) -> None:
    wanted = settings.feature_negotiation
    settings.tls = wanted and limits.tls and data.get("tls_v1", False)
    settings.deflate = wanted and limits.deflate and data.get("deflate", False)
    settings.snappy = wanted and limits.snappy and data.get("snappy", False)
    level = data.get("deflate_level", 0)
    if limits.generation == "original":
        settings.deflate_level = min(level if settings.deflate and level > 0 else 6, limits.max_deflate_level)
    else:
        settings.deflate_level = min(max(level, -1), limits.max_deflate_level) if settings.deflate else 0
    if settings.deflate and settings.snappy:
        raise RequestError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")


def identify_reply(settings: ClientSettings, limits: ServerLimits) -> bytes:
    """Return the reply to IDENTIFY: ``OK``, or JSON in the server's order (captured: identify_negotiated)."""
    if not settings.feature_negotiation:
        return b"OK"
    reply: dict[str, Any] = {
        "max_rdy_count": limits.max_rdy_count,
        "version": limits.version,
        "max_msg_timeout": round(limits.max_msg_timeout * 1000),
        "msg_timeout": round(settings.msg_timeout * 1000),
        "tls_v1": settings.tls,
        "deflate": settings.deflate,
        "deflate_level": settings.deflate_level,
        "max_deflate_level": limits.max_deflate_level,
        "snappy": settings.snappy,
        "sample_rate": settings.sample_rate,
        "auth_required": limits.auth,
        "output_buffer_size": settings.output_buffer_size,
        "output_buffer_timeout": round(settings.output_buffer_timeout * 1000),
    }
    if limits.generation == "original":
        reply |= {"topology_region": limits.topology_region, "topology_zone": limits.topology_zone}
    elif settings.desired_tag:
        reply["desired_tag"] = settings.desired_tag
    if settings.dispatch:
        reply["dispatch"] = settings.dispatch
    return orjson.dumps(reply)
