"""Values that several parts of the package share."""

from __future__ import annotations

from typing import NamedTuple

from attrs import field, frozen

__all__ = ("Address", "RawJson", "Receipt", "TopicMeta")


@frozen(order=True)
class Address:
    """Host and port of a server; ``str()`` gives ``host:port``, with brackets around an IPv6 host."""

    host: str  #: name or IP address
    port: int  #: the port
    #: the lookup node that listed the address, for errors; None for one that the user gave
    listed_by: str | None = field(default=None, eq=False, order=False, repr=False, kw_only=True)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RawJson(str):
    """Text of a header's value that servers store and JSON parsers refuse, such as ``NaN``, ``1e400`` or ``01``."""

    __slots__ = ()


@frozen
class TopicMeta:
    """Metadata of a topic (the ``meta`` member of lookup responses)."""

    partition_num: int = 0  #: number of partitions; 0 if the server does not report it (the original NSQ)
    replica: int = 0  #: copies of each partition
    extend_support: bool = False  #: messages may carry JSON extend headers
    ordered: bool = False  #: SUB_ORDERED is required, and each publish names its partition
    multi_part: bool = False  #: several partitions may be on one node
    disable_channel_auto_create: bool = False  #: channels must be registered at the lookup service first


class Receipt(NamedTuple):
    """Where a published message was stored.

    A named tuple, because each publish makes one: a frozen attrs class takes eight times as long.
    """

    topic: str  #: its topic
    partition: int | None  #: its partition; None on the original NSQ, which has no partitions
    node: str  #: ``host:port`` of the leader that stored it
    #: internal id; None without a trace id, because servers report it for traced publishes only
    message_id: int | None = None
    trace_id: int = 0  #: the trace id of the message; 0 without one
    offset: int | None = None  #: byte offset in the partition's queue; None without a trace id
    size: int | None = None  #: bytes of the record in that queue; None without a trace id
