"""What happens inside a partition when its leader changes."""

from __future__ import annotations

import logging

from nsqext.broker.engine.channel_types import set_kind
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.partition import Partition, Stored

__all__ = ("commit_all", "mirror_channels", "pass_channels")

_LOG = logging.getLogger(__name__)


def commit_all(partition: Partition) -> None:
    """Let channels read whatever the queue holds, because all in-sync replicas hold it."""
    last = partition.log.at(partition.log.end_count)
    if last is not None and last.count > partition.readable:
        partition.commit(Stored(last.record.internal_id, last.offset, last.size, [last]))


def mirror_channels(leader: Partition, follower: Partition) -> None:
    """Give a follower the leader's channels, so that it keeps the messages that they have before them."""
    for name in [name for name in follower.channels if name not in leader.channels]:
        follower.delete_channel(name)
    for name, channel in list(leader.channels.items()):
        if channel.ephemeral:
            continue
        state = channel.state()
        is_new = name not in follower.channels
        twin = set_kind(follower, name, channel.kind)
        if is_new or twin.state() != state:
            twin.hand = None
            twin.restore(state, ())
            follower.note_progress()


def pass_channels(old: Partition, new: Partition) -> None:
    """Give the new leader the channels of the old one, with what they finished; what was on its way comes again."""
    mirror_channels(old, new)
    for name, channel in old.channels.items():
        if channel.ephemeral:
            continue
        mine, theirs = new.channels[name].backlog, channel.backlog
        mine.ordered = theirs.ordered
        mine.delayed.clear()
        for delayed in theirs.delayed.messages.values():
            try:
                mine.delayed.put(delayed)
            except Refusal as refusal:
                _LOG.warning("a delayed message is kept in memory only: %s", refusal.text)
                mine.delayed.restore(delayed)
        new.channels[name].hand = None
        mine.rewind(forget=False)
