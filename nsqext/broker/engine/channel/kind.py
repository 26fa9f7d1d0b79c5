"""Types of channels: how messages are distributed to clients."""

from __future__ import annotations

from attrs import frozen

from nsqext.broker.engine.errors import Refusal
from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import DISPATCH_TYPES, KEY_FAILOVER, SHARED


@frozen
class ChannelKind:
    """How a channel distributes messages."""

    type: str = SHARED  # ``shared``, or ``key_failover``
    key_header: str = KEY_HEADER  # extend header that carries the key
    fixed: bool = False  # the type was chosen when the channel was created; otherwise the first subscriber chooses

    def __str__(self) -> str:
        other = f" with keys in {self.key_header}" if self.key_header != KEY_HEADER else ""
        return self.type + other

    def same(self, other: ChannelKind) -> bool:
        """Return whether messages are distributed in the same way."""
        return self.type == other.type and (self.type == SHARED or self.key_header == other.key_header)


PLAIN = ChannelKind()


def make_kind(dispatch: str, key_header: str = "", *, fixed: bool = False) -> ChannelKind | None:
    """Return the requested type, None if no type is requested; raises `Refusal` for an unknown one."""
    if not dispatch:
        return None
    if dispatch not in DISPATCH_TYPES:
        raise Refusal(f"dispatch type {dispatch} is unknown, use {' or '.join(DISPATCH_TYPES)}")
    return ChannelKind(dispatch, (dispatch == KEY_FAILOVER and key_header) or KEY_HEADER, fixed)
