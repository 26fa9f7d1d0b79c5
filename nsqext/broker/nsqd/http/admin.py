"""/ping, /info and the other routes for operators of the redesigned generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.nsqd.http.request_args import RequestArgs
from nsqext.http.api import Call, Form, HttpFault, route, set_block_rate
from nsqext.protocol.server.go_format import NANOSECONDS

if TYPE_CHECKING:
    from starlette.routing import Route


class AdminRoutes(RequestArgs):
    """Routes for operators."""

    def info(self, _: Call) -> object:
        return self.about() | {"ha_support": self.node.options.clustered}

    def server_stats(self, _: Call) -> object:
        return {
            "version": self.node.limits.version,
            "health": "OK",
            "start_time": self.node.started // NANOSECONDS,
            "server_pub_failed": self.node.publish_failed,
        }

    def coordinator_stats(self, call: Call) -> object:
        topic, partition = call.arg("topic"), call.number("partition", "INVALID_REQUEST", default="-1")
        if self.node.coordinator_stats is None:
            raise HttpFault(500, "Coordinator is disabled.")
        return self.node.coordinator_stats(topic, partition)

    def disable_write(self, call: Call) -> None:
        kind = call.arg("type")
        self.node.switches.write_disabled = kind if kind in ("all", "ordered") else ""

    def set_log_level(self, call: Call) -> None:
        self.node.switches.log_level = call.number("loglevel", "BAD_LEVEL_STRING", missing="MISSING_ARG_LEVEL")

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
        partition = call.number("partition", "INVALID_REQUEST")
        if (call.arg("topic"), partition) not in self.node.hosted:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        raise HttpFault(400, "No delayed queue on this topic")

    def clean_unused(self, call: Call) -> None:
        """Check the arguments of a request to remove data of deleted topics; this server has none."""
        call.number("partition", "INVALID_REQUEST", default="0")

    def read_only(self, call: Call) -> None:
        """Check the query of a request to switch a feature that this server does not have."""
        len(call.args)

    def table(self) -> list[Route]:
        return [
            route("GET", "/ping", lambda _: "OK", Form.TEXT),
            route("GET", "/info", self.info, Form.NEGOTIATED),
            route("GET", "/serverstats", self.server_stats),
            route("GET", "/coordinator/stats", self.coordinator_stats),
            route("POST", "/loglevel/set", self.set_log_level),
            route("POST", "/disable/write", self.disable_write),
            route("POST", "/topic/cleanunused", self.clean_unused),
            route("POST", "/topic/greedyclean", self.checked_topic),
            route("POST", "/topic/fixdata", self.fix_data),
            route("PUT", "/delayqueue/enable", self.read_only),
            route("GET", "/delayqueue/backupto", self.backup),
            route("PUT", "/filemeta_writer/enable", self.read_only),
            route("POST", "/debug/freememory", lambda _: None),  # its query is not checked
            route("PUT", "/debug/setblockrate", set_block_rate),
        ]
