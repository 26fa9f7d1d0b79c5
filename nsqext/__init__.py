"""nsqext: a smart client, a reference cluster and a Spark source for the redesigned and the original NSQ."""

from __future__ import annotations

from nsqext._version import __version__

__all__ = ("__version__",)
