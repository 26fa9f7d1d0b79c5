"""Assignment of keys to consumers by ranges of the hash space, for broker and client (Key_Failover note)."""

from __future__ import annotations

from nsqext.dispatch.buckets import KeyRanges, position_of

__all__ = ("KeyRanges", "position_of")
