"""The HTTP routes of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker import web
from nsqext.broker.nsqd.http.admin import admin_routes
from nsqext.broker.nsqd.http.channels import channel_routes
from nsqext.broker.nsqd.http.messages import message_routes
from nsqext.broker.nsqd.http.publish import publish_routes
from nsqext.broker.nsqd.http.site import Addresses, Site
from nsqext.broker.nsqd.http.stats import stats_routes

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from nsqext.broker.nsqd.node import Node

__all__ = ("application",)


def application(node: Node, addresses: Addresses) -> Starlette:
    """Make the web application of a node.

    Args:
        node: the node.
        addresses: where it listens.
    """
    site = Site(node, addresses)
    return web.application(
        [
            *admin_routes(site),
            *publish_routes(site),
            *channel_routes(site),
            *message_routes(site),
            *stats_routes(site),
        ]
    )
