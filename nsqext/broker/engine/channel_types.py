"""Create channels of a type, and change the type of existing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.channel.kind import PLAIN, ChannelKind
from nsqext.broker.engine.errors import Refusal
from nsqext.protocol.identify import KEY_FAILOVER

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.partition import Partition


def set_kind(partition: Partition, name: str, kind: ChannelKind) -> Channel:
    """Return a channel of this type: created if it is missing, otherwise converted at its acknowledged position.

    Messages in flight are redelivered, so the channel must have no subscriber.
    """
    old = partition.channels.get(name)
    if old is None or old.kind == kind:
        return partition.channel(name, kind)
    if old.kind.same(kind):
        old.kind = kind
        partition.note_channels()
        return old
    return partition.replace_channel(old, kind)


def check_kind(partition: Partition, name: str, wanted: ChannelKind) -> None:
    """Raise `Refusal` unless a channel, which may not exist yet, can have a type."""
    channel = partition.channels.get(name)
    kind = channel.kind if channel else PLAIN
    if kind.same(wanted):
        return
    if channel and (channel.clients or (kind.fixed and not wanted.fixed)):
        raise Refusal(f"channel {name} of topic {partition.topic} is dispatched by {kind}, not {wanted}")
    if wanted.type == KEY_FAILOVER and (partition.ordered or (channel and channel.ordered)):
        raise Refusal(f"channel {name} of topic {partition.topic} is ordered and cannot become {wanted}")


def admit(partition: Partition, name: str, wanted: ChannelKind | None) -> Channel:
    """Return the channel for a subscriber, or for a request to create it; raises `Refusal` as `check_kind`.

    Without a wanted type the channel keeps its own. The first subscriber chooses the type, unless it was chosen when
    the channel was created.
    """
    channel = partition.channel(name)
    if wanted is None or (channel.kind.same(wanted) and channel.kind.fixed):
        return channel
    check_kind(partition, name, wanted)
    return set_kind(partition, name, wanted)
