"""IDENTIFY: what a client requests, and what the server grants."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import orjson
from attrs import field, frozen

from nsqext._version import __version__
from nsqext.arguments import is_number
from nsqext.errors import InvalidSetting, ProtocolError, outside_text

__all__ = (
    "DISPATCH_TYPES",
    "FILTER_EQUAL",
    "FILTER_GLOB",
    "FILTER_MULTI",
    "FILTER_REGEXP",
    "KEY_FAILOVER",
    "SHARED",
    "ExtFilter",
    "IdentifyRequest",
    "Negotiated",
)

SHARED = "shared"
KEY_FAILOVER = "key_failover"
DISPATCH_TYPES = (SHARED, KEY_FAILOVER)
"""How a channel distributes messages; the second type is an addition (Key_Failover note)."""

_FOREVER = 1e9  # seconds, beyond what servers accept

_REPLY = {
    "version": str,
    "max_rdy_count": int,
    "msg_timeout": int,
    "max_msg_timeout": int,
    "tls_v1": bool,
    "snappy": bool,
    "deflate": bool,
    "deflate_level": int,
    "auth_required": bool,
    "sample_rate": int,
    "desired_tag": str,
    "dispatch": str,
}

_AS_GRANTED = ("version", "max_rdy_count", "snappy", "auth_required", "sample_rate", "desired_tag", "dispatch")

FILTER_EQUAL = 1
FILTER_REGEXP = 2
FILTER_GLOB = 3
FILTER_MULTI = 4


@frozen
class ExtFilter:
    """A filter on an extend header: the server finishes messages that do not match (captured: ext_filter)."""

    type: int  #: 1 equal, 2 regular expression, 3 glob, 4 several equal
    key: str  #: header name; for type 4 the relation, ``any`` or ``all``
    data: str = ""  #: value, expression or glob; empty for type 4
    pairs: tuple[tuple[str, str], ...] = ()  #: header name and value, for type 4
    inverse: bool = False  #: deliver messages that do not match

    def as_json(self) -> dict[str, Any]:
        """Return the member ``ext_filter`` of IDENTIFY."""
        out: dict[str, Any] = {
            "type": self.type,
            "inverse": self.inverse,
            "filter_ext_key": self.key,
            "filter_data": self.data,
        }
        if self.pairs:
            out["filter_data_list"] = [{"filter_ext_key": key, "filter_data": data} for key, data in self.pairs]
        return out


def _milliseconds(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if not is_number(seconds) or seconds >= _FOREVER:
        raise InvalidSetting(f"{name}={seconds!r} is not a time in seconds")
    return round(seconds * 1000)


@frozen
class IdentifyRequest:
    """Body of IDENTIFY; the server chooses unset values."""

    client_id: str = ""  #: empty for the host's short name with the process id
    hostname: str = ""  #: empty for the name of this host
    user_agent: str = f"nsqext/{__version__}"  #: program and version
    heartbeat_interval: float | None = None  #: seconds between two heartbeats; servers accept 1 to 60
    msg_timeout: float | None = None  #: seconds that a message may be in flight; servers accept 1 to 900
    sample_rate: int = 0  #: percentage of messages delivered, 1 to 99; 0 for all
    output_buffer_size: int | None = None  #: bytes that the server buffers before it sends
    output_buffer_timeout: float | None = None  #: longest time in the server's buffer, in seconds
    tls: bool = False
    snappy: bool = False
    deflate_level: int = 0  #: 0 for no deflate
    desired_tag: str | None = None  #: deliver only messages with this tag
    #: the client reads extend headers; must equal the topic's ``extend_support``
    extend_support: bool = False
    ext_filter: ExtFilter | None = None
    topology_region: str = ""  #: original nsqd only
    topology_zone: str = ""  #: original nsqd only
    extra: Mapping[str, Any] = field(factory=dict)  #: further members, for other servers

    def __attrs_post_init__(self) -> None:
        if self.snappy and self.deflate_level:
            raise InvalidSetting("snappy and deflate cannot be used together", hint="choose one")
        if not 0 <= self.sample_rate <= 99:
            raise InvalidSetting(f"sample_rate={self.sample_rate!r} is not within 0..99")
        if not 0 <= self.deflate_level <= 9:
            raise InvalidSetting(f"deflate_level={self.deflate_level!r} is not within 0..9")

    def encode(self) -> bytes:
        """Return the JSON body of IDENTIFY.

        Raises:
            InvalidSetting: invalid time, or a member that JSON cannot express.
        """
        hostname = self.hostname or socket.gethostname()
        members: dict[str, Any] = {
            "client_id": self.client_id or f"{hostname.partition('.')[0]}-{os.getpid()}",
            "hostname": hostname,
            "user_agent": self.user_agent,
            "feature_negotiation": True,
            "heartbeat_interval": _milliseconds("heartbeat_interval", self.heartbeat_interval),
            "msg_timeout": _milliseconds("msg_timeout", self.msg_timeout),
            "sample_rate": self.sample_rate or None,
            "output_buffer_size": self.output_buffer_size,
            "output_buffer_timeout": _milliseconds("output_buffer_timeout", self.output_buffer_timeout),
            "tls_v1": self.tls or None,
            "snappy": self.snappy or None,
            "deflate": bool(self.deflate_level) or None,
            "deflate_level": self.deflate_level or None,
            "desired_tag": self.desired_tag,
            "extend_support": self.extend_support or None,
            "ext_filter": self.ext_filter.as_json() if self.ext_filter else None,
            "topology_region": self.topology_region or None,
            "topology_zone": self.topology_zone or None,
            **self.extra,
        }
        try:
            return orjson.dumps({name: value for name, value in members.items() if value is not None})
        except TypeError as error:
            raise InvalidSetting(f"IDENTIFY cannot be written as JSON: {error}", hint="use text and numbers") from error


@frozen
class Negotiated:
    """Response to IDENTIFY: what the server granted."""

    version: str = ""  #: the server's; ``HA`` in it marks the redesigned generation
    max_rdy_count: int = 2500
    msg_timeout: float = 60.0  #: seconds that a message may be in flight
    max_msg_timeout: float = 900.0  #: the same with TOUCH
    tls: bool = False  #: a TLS handshake follows
    snappy: bool = False  #: a snappy layer follows
    deflate_level: int = 0  #: level of the deflate layer that follows; 0 for none
    auth_required: bool = False  #: AUTH must follow
    sample_rate: int = 0  #: percentage of messages delivered; 0 for all
    desired_tag: str = ""  #: as the server read it
    dispatch: str = ""  #: the channel's dispatch type; empty for a server without dispatch types

    @property
    def redesigned(self) -> bool:
        return "-HA." in self.version

    @classmethod
    def decode(cls, data: bytes) -> Negotiated:
        """Parse the response: JSON, or ``OK`` from a server without negotiation; raises ProtocolError."""
        if data == b"OK":
            return cls()
        try:
            sent = orjson.loads(data)
            reply = {name: value for name in _REPLY if (value := sent.get(name)) is not None}
        except (AttributeError, orjson.JSONDecodeError) as error:
            raise ProtocolError(f"the response to IDENTIFY is neither JSON nor OK: {data[:120]!r}") from error
        wrong = [name for name, value in reply.items() if type(value) is not _REPLY[name]]
        if wrong:
            raise ProtocolError(f"the response to IDENTIFY has a wrong type of {wrong[0]}: {data[:120]!r}")
        values = {name: reply[name] for name in _AS_GRANTED if name in reply}
        values |= {name: outside_text(text) for name, text in values.items() if isinstance(text, str)}
        values |= {name: reply[name] / 1000 for name in ("msg_timeout", "max_msg_timeout") if reply.get(name)}
        # for deflate without a level, the redesigned server reports level 0 and deflates
        level = (reply.get("deflate_level") or 6) if reply.get("deflate") else 0
        granted = cls(**values, tls=reply.get("tls_v1", False), deflate_level=level)
        if granted.max_rdy_count < 1 or granted.msg_timeout < 0 or not -1 <= granted.deflate_level <= 9:
            raise ProtocolError(f"the response to IDENTIFY has values out of range: {data[:120]!r}")
        return granted
