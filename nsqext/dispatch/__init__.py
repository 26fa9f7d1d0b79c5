"""Who serves which keys: ranges of the hash space, used by broker and client alike (Key_Failover note)."""

from __future__ import annotations

from nsqext.dispatch.ranges import KeyRange, KeyRanges, position_of

__all__ = ("KeyRange", "KeyRanges", "position_of")
