"""What users' own tests need: the pytest plugin `nsqext.testing.plugin`, which pytest finds by itself."""

from __future__ import annotations

__all__ = ()
