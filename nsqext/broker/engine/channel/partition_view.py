"""The part of a partition that its channels use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nsqext.broker.engine.options import PartitionOptions
    from nsqext.broker.engine.storage.delayed_queue import Journal
    from nsqext.broker.engine.storage.log import Log

__all__ = ("PartitionView",)


class PartitionView(Protocol):
    """A partition as a channel sees it; for the attributes see `nsqext.broker.engine.partition.Partition`."""

    @property
    def topic(self) -> str:
        """Name of the topic."""

    @property
    def options(self) -> PartitionOptions:
        """Settings."""

    @property
    def log(self) -> Log:
        """The queue."""

    @property
    def extend(self) -> bool:
        """Messages carry extend headers."""

    @property
    def ordered(self) -> bool:
        """Channels are consumed with SUB_ORDERED only."""

    @property
    def suspended(self) -> bool:
        """Another node leads the partition."""

    @property
    def readable(self) -> int:
        """Number of the last message that channels may read."""

    @property
    def readable_offset(self) -> int:
        """Offset behind that message."""

    @property
    def touched(self) -> bool:
        """`touch` was called since the last tick."""

    def touch(self) -> None:
        """Schedule a tick, because a deadline may have changed."""

    def delete_channel(self, name: str) -> None:
        """Remove a channel."""

    def journal(self, channel: str) -> Journal | None:
        """Return the journal of a channel's delayed queue; None without a disk."""

    def note_progress(self) -> None:
        """Write the channels' positions with the next interval."""

    def note_restored(self) -> None:
        """Write the channels' positions: at once after a channel was created on a replica, else with the interval."""

    def note_channels(self) -> None:
        """Write the channels' state at once, because channels were created, deleted or switched."""
