"""The HTTP application of a node, for both generations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.nsqd.classic.http_routes import classic_routes, refusing_routes
from nsqext.broker.nsqd.classic.stats import classic_stats_routes
from nsqext.broker.nsqd.http.admin import admin_routes
from nsqext.broker.nsqd.http.channels import channel_routes
from nsqext.broker.nsqd.http.config import config_routes
from nsqext.broker.nsqd.http.messages import message_routes
from nsqext.broker.nsqd.http.metrics import metrics_routes
from nsqext.broker.nsqd.http.publish import publish_routes
from nsqext.broker.nsqd.http.request_args import Addresses, RequestArgs
from nsqext.broker.nsqd.http.stats import stats_routes
from nsqext.http import api as web

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from nsqext.broker.nsqd.node import Node

__all__ = ("application",)


def application(node: Node, addresses: Addresses, *, secure: bool = False) -> Starlette:
    """Make the web application of a node; ``secure`` over HTTPS."""
    args = RequestArgs(node, addresses)
    if node.options.original:
        routes = [
            *classic_routes(args),
            *config_routes(args),
            *classic_stats_routes(args),
            *metrics_routes(args),
        ]
        refuse_all = node.options.https_only and not secure
        return web.application(refusing_routes(args) if refuse_all else routes, original=True)
    return web.application(
        [
            *admin_routes(args),
            *config_routes(args),
            *publish_routes(args),
            *channel_routes(args),
            *message_routes(args),
            *stats_routes(args),
            *metrics_routes(args),
        ]
    )
