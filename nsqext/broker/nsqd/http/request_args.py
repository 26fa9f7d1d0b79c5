"""What the HTTP routes of a node share: how arguments lead to a topic and a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

from nsqext.broker.go_format import parse_int
from nsqext.broker.http_api import Call, HttpFault
from nsqext.protocol.names import is_valid_channel, is_valid_topic

if TYPE_CHECKING:
    from nsqext.broker.engine.channel import Channel
    from nsqext.broker.engine.errors import Refusal
    from nsqext.broker.nsqd.node import Hosted, Node

__all__ = ("Addresses", "RequestArgs", "refuse")

NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
NOT_WRITABLE = "E_FAILED_ON_NOT_WRITABLE"


class Addresses(Protocol):
    """Where a node listens."""

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
    """Answer a refusal of the engine: status 500 and its text."""
    raise HttpFault(500, refusal.text) from None


class RequestArgs:
    """A node as its routes see it.

    Args:
        node: the node.
        addresses: where it listens.
    """

    def __init__(self, node: Node, addresses: Addresses) -> None:
        self.node: Node = node
        self.addresses: Addresses = addresses

    def topic(self, call: Call) -> Hosted:
        """Return the partition that the arguments ``topic`` and ``partition`` name; without one the node's default.

        Raises:
            HttpFault: 400 for bad arguments, 404 for a partition that is not here.
        """
        return self._find(*self._topic_args(call))

    def channel_args(self, call: Call) -> tuple[Hosted, str]:
        """Return the partition, and the name of a channel that may be missing."""
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
        """Refuse what only the leader does."""
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
