"""The HTTP application of a node, for both generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqext.broker.nsqd.classic.http_routes import ClassicRoutes, refusing_route
from nsqext.broker.nsqd.classic.stats import ClassicStatsRoutes
from nsqext.broker.nsqd.http.admin import AdminRoutes
from nsqext.broker.nsqd.http.channels import ChannelRoutes
from nsqext.broker.nsqd.http.config import ConfigRoutes
from nsqext.broker.nsqd.http.messages import MessageRoutes
from nsqext.broker.nsqd.http.metrics import MetricsRoutes
from nsqext.broker.nsqd.http.publish import PublishRoutes
from nsqext.broker.nsqd.http.stats import StatsRoutes
from nsqext.http import api as web

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from nsqext.broker.nsqd.node import Node

_CLASSIC = (ClassicRoutes, ConfigRoutes, ClassicStatsRoutes, MetricsRoutes)
_REDESIGNED = (AdminRoutes, ConfigRoutes, PublishRoutes, ChannelRoutes, MessageRoutes, StatsRoutes, MetricsRoutes)


def application(node: Node, addresses: Mapping[str, str], *, secure: bool = False) -> Starlette:
    """Make the web application of a node that listens on these addresses; ``secure`` over HTTPS."""
    original = node.options.original
    if original and node.options.https_only and not secure:
        return web.application([refusing_route(addresses)], original=True)
    kinds = _CLASSIC if original else _REDESIGNED
    return web.application([found for kind in kinds for found in kind(node, addresses).table()], original=original)
