"""Values shared by several parts of the package."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from attrs import field, frozen

__all__ = ("Address", "ProcessBound", "RawJson", "Receipt", "TopicMeta")


@frozen(order=True)
class Address:
    """Host and port of a server; ``str()`` returns ``host:port``, with brackets around IPv6."""

    host: str  #: name or IP address
    port: int
    #: the lookup node that listed the address, for errors; None for the user's addresses
    listed_by: str | None = field(default=None, eq=False, order=False, repr=False, kw_only=True)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ProcessBound:
    """A client whose connections and tasks belong to its process."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied, because its connections belong to this process: pass its addresses "
            "and settings, and create it there"
        )


class RawJson(str):
    """A header's value that servers store and JSON parsers refuse (``NaN``, ``1e400``, ``01``), as text."""

    __slots__ = ()


@frozen
class TopicMeta:
    """A topic's metadata (``meta`` of lookup responses)."""

    partition_num: int = 0  #: 0 if not reported (the original NSQ)
    replica: int = 0  #: copies of each partition
    extend_support: bool = False  #: messages may have JSON extend headers
    ordered: bool = False  #: SUB_ORDERED is required, and each publish names its partition
    multi_part: bool = False  #: a node may have several partitions
    disable_channel_auto_create: bool = False  #: channels must be registered at the lookup service first


class Receipt(NamedTuple):
    """Where a published message was stored; a named tuple, because a frozen attrs class takes eight times as long."""

    topic: str
    partition: int | None  #: None on the original NSQ
    node: str  #: ``host:port`` of the leader
    #: internal id; None without a trace id, as servers report it only for traced publishes
    message_id: int | None = None
    trace_id: int = 0  #: 0 without trace id
    offset: int | None = None  #: byte offset in the partition's queue; None without a trace id
    size: int | None = None  #: bytes of the record in that queue; None without a trace id
