"""What happens inside a partition when its leader changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.kinds import set_kind
from nsqext.broker.engine.partition import Partition, Stored

if TYPE_CHECKING:
    from nsqext.broker.engine.channel import Channel

__all__ = ("commit_all", "pass_channels")


def commit_all(partition: Partition) -> None:
    """Let channels read whatever the queue holds, because all in-sync replicas hold it."""
    last = partition.log.at(partition.log.end_count)
    if last is not None and last.count > partition.readable:
        partition.commit(Stored(last.record.internal_id, last.offset, last.size, [last]))


def pass_channels(old: Partition, new: Partition) -> None:
    """Give the new leader the channels of the old one, with what they finished; what was on its way comes again."""
    for name in [name for name in new.channels if name not in old.channels]:
        new.delete_channel(name)
    for name, channel in old.channels.items():
        if not channel.ephemeral:
            _pass(channel, set_kind(new, name, channel.kind))


def _pass(old: Channel, new: Channel) -> None:
    mine, theirs = new.backlog, old.backlog
    mine.confirmed.restore(theirs.confirmed.offset, theirs.confirmed.count, theirs.confirmed.intervals)
    mine.ordered = theirs.ordered
    mine.delayed.clear()
    for delayed in theirs.delayed.messages.values():
        mine.delayed.put(delayed)
    mine.rewind(forget=False)
    new.hand = None
    new.paused, new.skipped = old.paused, old.skipped
