"""Arguments of HTTP requests: the topic, partition and channel that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

from nsqext.http.api import Call, HttpFault
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.go_format import parse_int

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.errors import Refusal
    from nsqext.broker.nsqd.node import Hosted, Node

__all__ = ("Addresses", "RequestArgs", "refuse")

NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
NOT_WRITABLE = "E_FAILED_ON_NOT_WRITABLE"


class Addresses(Protocol):
    """Addresses that a node listens on."""

    @property
    def tcp_address(self) -> str:
        """``host:port`` of TCP."""
        ...

    @property
    def http_address(self) -> str:
        """``host:port`` of HTTP."""
        ...

    @property
    def https_address(self) -> str | None:
        """``host:port`` of HTTPS, None without."""
        ...


def refuse(refusal: Refusal) -> NoReturn:
    """Raise the fault for a refusal of the engine, with status 500 and its text."""
    raise HttpFault(500, refusal.text) from None


class RequestArgs:
    """Finds what a request names, for the routes of a node."""

    def __init__(self, node: Node, addresses: Addresses) -> None:
        self.node: Node = node
        self.addresses: Addresses = addresses  # addresses that it listens on

    def topic(self, call: Call) -> Hosted:
        """Return the partition that ``topic`` and ``partition`` name; without a partition the node's default."""
        return self._find(*self._topic_args(call))

    def channel_args(self, call: Call) -> tuple[Hosted, str]:
        """Return the partition, and the name of a channel that may be unknown."""
        topic, partition = self._topic_args(call)
        channel = call.arg("channel", "MISSING_ARG_CHANNEL")
        if not is_valid_channel(channel):
            raise HttpFault(400, "INVALID_ARG_CHANNEL")
        return self._find(topic, partition), channel

    def channel(self, call: Call) -> tuple[Hosted, Channel]:
        """Return the partition, and the channel that the argument ``channel`` names."""
        hosted, name = self.channel_args(call)
        channel = hosted.partition.channels.get(name)
        if channel is None:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        return hosted, channel

    def led_channel(self, call: Call) -> Channel:
        """Return a channel of a partition that this node leads."""
        hosted, channel = self.channel(call)
        self.check_leader(hosted)
        return channel

    def check_leader(self, hosted: Hosted) -> None:
        """Raise the fault for a request that only the leader serves."""
        if not hosted.leader:
            raise HttpFault(400, NOT_LEADER)

    def _topic_args(self, call: Call) -> tuple[str, int]:
        topic = call.arg("topic", "MISSING_ARG_TOPIC")
        if not is_valid_topic(topic):
            raise HttpFault(400, "INVALID_ARG_TOPIC")
        try:
            return topic, parse_int(call.arg("partition") or "-1")
        except ValueError as error:
            raise HttpFault(400, str(error)) from None

    def _find(self, topic: str, partition: int) -> Hosted:
        hosted = self.node.find(topic, partition)
        if hosted is None:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        return hosted
