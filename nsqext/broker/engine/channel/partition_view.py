"""The part of a partition that its channels use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nsqext.broker.engine.options import PartitionOptions
    from nsqext.broker.engine.storage.delayed_queue import DelayedJournal
    from nsqext.broker.engine.storage.log import Log


class PartitionView(Protocol):
    """A partition as a channel sees it; its members are described in `nsqext.broker.engine.partition.Partition`."""

    topic: str
    options: PartitionOptions
    log: Log
    extend: bool
    ordered: bool
    suspended: bool
    readable: int
    readable_offset: int
    touched: bool

    @property
    def journal(self) -> DelayedJournal | None: ...
    def touch(self) -> None: ...
    def delete_channel(self, name: str) -> None: ...
    def note_progress(self) -> None: ...
    def note_restored(self) -> None: ...
    def note_channels(self) -> None: ...
