"""Types of channels: who chooses, and what happens to a channel whose type is chosen anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.broker.engine.errors import Refusal
from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import DISPATCH_TYPES, KEY_FAILOVER, SHARED

if TYPE_CHECKING:
    from nsqext.broker.engine.channel import Channel
    from nsqext.broker.engine.partition import Partition

__all__ = ("PLAIN", "ChannelKind", "admit", "check_kind", "make_kind", "set_kind")


@frozen
class ChannelKind:
    """How a channel gives out messages.

    Attributes:
        type: ``shared``, or ``key_failover``.
        key_header: the extend header that carries the key.
        fixed: it was chosen when the channel was created; otherwise the first subscriber chooses.
    """

    type: str = SHARED
    key_header: str = KEY_HEADER
    fixed: bool = False

    def __str__(self) -> str:
        other = f" with keys in {self.key_header}" if self.key_header != KEY_HEADER else ""
        return self.type + other

    def same(self, other: ChannelKind) -> bool:
        """Return whether messages are given out in the same way."""
        return self.type == other.type and (self.type == SHARED or self.key_header == other.key_header)


PLAIN = ChannelKind()


def make_kind(dispatch: str, key_header: str = "", *, fixed: bool = False) -> ChannelKind | None:
    """Return the type that is asked for, None when nothing is.

    Raises:
        Refusal: there is no such type.
    """
    if not dispatch:
        return None
    if dispatch not in DISPATCH_TYPES:
        raise Refusal(f"dispatch type {dispatch} is not known, use {' or '.join(DISPATCH_TYPES)}")
    return ChannelKind(dispatch, (dispatch == KEY_FAILOVER and key_header) or KEY_HEADER, fixed)


def set_kind(partition: Partition, name: str, kind: ChannelKind) -> Channel:
    """Make a channel one of this type; it is made where it is not there, and goes on where it is.

    What was on its way comes again, so nobody may be subscribed.
    """
    old = partition.channels.get(name)
    if old is None or old.kind == kind:
        return partition.channel(name, kind)
    if old.kind.same(kind):
        old.kind = kind
        partition.note_channels()
        return old
    return partition.remake(old, kind)


def check_kind(partition: Partition, name: str, wanted: ChannelKind) -> None:
    """Look whether a channel, which may be missing, can be of a type.

    Raises:
        Refusal: it is of another type, and somebody relies on that, or the order of messages does not allow it.
    """
    channel = partition.channels.get(name)
    kind = channel.kind if channel else PLAIN
    if kind.same(wanted):
        return
    if channel and (channel.clients or (kind.fixed and not wanted.fixed)):
        raise Refusal(f"channel {name} of topic {partition.topic} is dispatched by {kind}, not {wanted}")
    if wanted.type == KEY_FAILOVER and (partition.ordered or (channel and channel.ordered)):
        raise Refusal(f"channel {name} of topic {partition.topic} is ordered and cannot become {wanted}")


def admit(partition: Partition, name: str, wanted: ChannelKind | None) -> Channel:
    """Return the channel for a subscriber, or for a request to create it.

    Who asks for no type takes what there is. Who comes while nobody is subscribed chooses, unless the type was chosen
    when the channel was created.

    Raises:
        Refusal: the channel is of another type, and somebody relies on that.
    """
    channel = partition.channel(name)
    if wanted is None or (channel.kind.same(wanted) and (channel.kind.fixed or not wanted.fixed)):
        return channel
    check_kind(partition, name, wanted)
    return set_kind(partition, name, wanted)
