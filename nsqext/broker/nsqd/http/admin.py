"""/ping, /info, /config and what else an operator asks of a node of the redesigned generation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from nsqext.broker.nsqd.http.site import Site
from nsqext.broker.nsqd.texts import parse_int
from nsqext.broker.web import Call, Form, HttpFault, route

if TYPE_CHECKING:
    from starlette.routing import Route

__all__ = ("admin_routes",)

_NS = 1_000_000_000
_SETTABLE: dict[str, tuple[str, type]] = {
    "nsqlookupd_tcp_addresses": ("lookupd_addresses", list),
    "verbose": ("verbose", bool),
    "log_level": ("log_level", int),
    "allow_ext_compatible": ("allow_ext_compatible", bool),
    "allow_sub_ext_compatible": ("allow_sub_ext_compatible", bool),
    "max_conn_for_client": ("max_connections", int),
    "max_pub_waiting_size": ("max_pub_waiting", int),
}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


class _Admin(Site):
    def ping(self, _: Call) -> str:
        return "OK"

    def info(self, _: Call) -> object:
        options = self.node.options
        return {
            "version": options.limits.version,
            "broadcast_address": options.broadcast_address,
            "hostname": options.hostname,
            "http_port": _port(self.addresses.http_address),
            "tcp_port": _port(self.addresses.tcp_address),
            "start_time": self.node.started // _NS,
            "ha_support": options.clustered,
        }

    def server_stats(self, _: Call) -> object:
        return {
            "version": self.node.limits.version,
            "health": "OK",
            "start_time": self.node.started // _NS,
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

    def config(self, call: Call) -> object:
        name = call.path["opt"]
        switches, options = self.node.switches, self.node.options
        if name in _SETTABLE:
            return getattr(switches, _SETTABLE[name][0])
        fixed: dict[str, Any] = {
            "broadcast_address": options.broadcast_address,
            "max_msg_size": options.limits.max_msg_size,
            "max_body_size": options.limits.max_body_size,
            "max_rdy_count": options.limits.max_rdy_count,
            "msg_timeout": round(options.limits.msg_timeout * _NS),
            "max_msg_timeout": round(options.limits.max_msg_timeout * _NS),
            "max_req_timeout": round(options.limits.max_req_timeout * _NS),
            "max_heartbeat_interval": round(options.limits.max_heartbeat_interval * _NS),
            "data_path": str(options.data_path or ""),
        }
        if name not in fixed:
            raise HttpFault(400, "INVALID_OPTION")
        return fixed[name]

    async def set_config(self, call: Call) -> object:
        body = await call.body()
        if not 0 < len(body) <= self.node.limits.max_msg_size:
            raise HttpFault(413, "INVALID_VALUE")
        name = call.path["opt"]
        if name not in _SETTABLE:
            raise HttpFault(400, "INVALID_OPTION")
        attribute, kind = _SETTABLE[name]
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise HttpFault(400, "INVALID_VALUE") from None
        texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) is not kind or not texts:
            raise HttpFault(400, "INVALID_VALUE")
        setattr(self.node.switches, attribute, value)
        return self.config(call)

    def checked_topic(self, call: Call) -> None:
        """Answer a request to clean up a topic: there is nothing to clean, but its arguments are checked."""
        self.topic(call)

    def fix_data(self, call: Call) -> None:
        try:
            self.topic(call)
        except HttpFault as fault:
            raise HttpFault(500, fault.text) from None

    def backup(self, call: Call) -> None:
        """Refuse to stream a delayed queue: it is no file of the format that the real server streams."""
        try:
            partition = parse_int(call.arg("partition"))
        except ValueError:
            raise HttpFault(400, "INVALID_REQUEST") from None
        if (call.arg("topic"), partition) not in self.node.hosted:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        raise HttpFault(400, "No delayed queue on this topic")

    def nothing(self, check: str, call: Call) -> None:
        """Answer a switch of something that this server has not, after the check of its argument."""
        if check:
            try:
                parse_int(call.arg(check))
            except ValueError as error:
                raise HttpFault(400, f"invalid block rate : {error}") from None


def admin_routes(site: Site) -> list[Route]:
    """Return the routes."""
    admin = _Admin(site.node, site.addresses)
    silent = partial(admin.nothing, "")
    return [
        route("GET", "/ping", admin.ping, Form.TEXT),
        route("GET", "/info", admin.info, Form.NEGOTIATED),
        route("GET", "/serverstats", admin.server_stats),
        route("GET", "/coordinator/stats", admin.coordinator_stats),
        route("POST", "/loglevel/set", admin.set_log_level),
        route("POST", "/disable/write", admin.disable_write),
        route("GET", "/config/{opt}", admin.config),
        route("PUT", "/config/{opt}", admin.set_config),
        route("POST", "/topic/cleanunused", silent),
        route("POST", "/topic/greedyclean", admin.checked_topic),
        route("POST", "/topic/fixdata", admin.fix_data),
        route("PUT", "/delayqueue/enable", silent),
        route("GET", "/delayqueue/backupto", admin.backup),
        route("PUT", "/filemeta_writer/enable", silent),
        route("POST", "/debug/freememory", silent),
        route("PUT", "/debug/setblockrate", partial(admin.nothing, "rate")),
    ]
