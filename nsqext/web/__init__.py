"""The web page of a cluster: topics, partitions, channels, consumers and nodes, with live numbers and actions.

Rendered on the server (extra ``web``). Start it with ``nsqext web`` or ``nsqext broker --web``.
"""

from __future__ import annotations

from nsqext.web.app import WebPage
from nsqext.web.security import WebOptions

__all__ = ("WebOptions", "WebPage")
