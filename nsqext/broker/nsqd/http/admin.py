"""/ping, /info and the other routes for operators of the redesigned generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.listeners import split_address
from nsqext.broker.nsqd.http.request_args import RequestArgs
from nsqext.http.api import Call, Form, HttpFault, route, set_block_rate
from nsqext.protocol.server.go_format import NANOSECONDS, parse_int

if TYPE_CHECKING:
    from starlette.routing import Route

__all__ = ("admin_routes",)


class _Admin(RequestArgs):
    def ping(self, _: Call) -> str:
        return "OK"

    def info(self, _: Call) -> object:
        options = self.node.options
        return {
            "version": options.limits.version,
            "broadcast_address": options.broadcast_address,
            "hostname": options.hostname,
            "http_port": split_address(self.addresses.http_address).port,
            "tcp_port": split_address(self.addresses.tcp_address).port,
            "start_time": self.node.started // NANOSECONDS,
            "ha_support": options.clustered,
        }

    def server_stats(self, _: Call) -> object:
        return {
            "version": self.node.limits.version,
            "health": "OK",
            "start_time": self.node.started // NANOSECONDS,
            "server_pub_failed": self.node.publish_failed,
        }

    def coordinator_stats(self, call: Call) -> object:
        topic, text = call.arg("topic"), call.arg("partition")
        try:
            partition = parse_int(text) if text else -1
        except ValueError:
            raise HttpFault(400, "INVALID_REQUEST") from None
        if not self.node.options.clustered:
            raise HttpFault(500, "Coordinator is disabled.")
        return self.node.coordinator_stats(topic, partition)

    def disable_write(self, call: Call) -> None:
        kind = call.arg("type")
        self.node.switches.write_disabled = kind if kind in ("all", "ordered") else ""

    def set_log_level(self, call: Call) -> None:
        level = call.arg("loglevel", "MISSING_ARG_LEVEL")
        try:
            self.node.switches.log_level = parse_int(level)
        except ValueError:
            raise HttpFault(400, "BAD_LEVEL_STRING") from None

    def checked_topic(self, call: Call) -> None:
        """Check the arguments of a request to clean up a topic; this server has nothing to clean."""
        self.topic(call)

    def fix_data(self, call: Call) -> None:
        try:
            self.topic(call)
        except HttpFault as fault:
            raise HttpFault(500, fault.text) from None

    def backup(self, call: Call) -> None:
        """Refuse to stream a delayed queue: this server stores it in another format."""
        try:
            partition = parse_int(call.arg("partition"))
        except ValueError:
            raise HttpFault(400, "INVALID_REQUEST") from None
        if (call.arg("topic"), partition) not in self.node.hosted:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        raise HttpFault(400, "No delayed queue on this topic")

    def clean_unused(self, call: Call) -> None:
        """Check the arguments of a request to remove data of deleted topics; this server has none."""
        if call.arg("partition"):
            try:
                parse_int(call.arg("partition"))
            except ValueError:
                raise HttpFault(400, "INVALID_REQUEST") from None

    def read_only(self, call: Call) -> None:
        """Check the query of a request to switch a feature that this server does not have."""
        len(call.args)

    def nothing(self, _: Call) -> None:
        """Answer a request without effect in this server; its query is not checked."""


def admin_routes(args: RequestArgs) -> list[Route]:
    """Return the routes."""
    admin = _Admin(args.node, args.addresses)
    return [
        route("GET", "/ping", admin.ping, Form.TEXT),
        route("GET", "/info", admin.info, Form.NEGOTIATED),
        route("GET", "/serverstats", admin.server_stats),
        route("GET", "/coordinator/stats", admin.coordinator_stats),
        route("POST", "/loglevel/set", admin.set_log_level),
        route("POST", "/disable/write", admin.disable_write),
        route("POST", "/topic/cleanunused", admin.clean_unused),
        route("POST", "/topic/greedyclean", admin.checked_topic),
        route("POST", "/topic/fixdata", admin.fix_data),
        route("PUT", "/delayqueue/enable", admin.read_only),
        route("GET", "/delayqueue/backupto", admin.backup),
        route("PUT", "/filemeta_writer/enable", admin.read_only),
        route("POST", "/debug/freememory", admin.nothing),
        route("PUT", "/debug/setblockrate", set_block_rate),
    ]
