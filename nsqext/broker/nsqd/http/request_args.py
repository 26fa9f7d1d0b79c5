"""Arguments of HTTP requests: the topic, partition and channel that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nsqext.broker.listeners import split_address
from nsqext.http.api import Call, HttpFault, valid_channel, valid_topic
from nsqext.protocol.server.go_format import NANOSECONDS

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.nsqd.node import Hosted, Node

NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
NOT_WRITABLE = "E_FAILED_ON_NOT_WRITABLE"


class RequestArgs:
    """Finds what a request names, for the routes of a node."""

    def __init__(self, node: Node, addresses: Mapping[str, str]) -> None:
        self.node: Node = node
        # ``host:port`` that it listens on, by ``tcp``, ``http`` and ``https``
        self.addresses: Mapping[str, str] = addresses

    def port(self, name: str) -> int:
        return split_address(self.addresses[name]).port

    def about(self) -> dict[str, object]:
        """Return the members of ``/info`` that both generations have."""
        options = self.node.options
        return {
            "version": options.limits.version,
            "broadcast_address": options.broadcast_address,
            "hostname": options.hostname,
            "http_port": self.port("http"),
            "tcp_port": self.port("tcp"),
            "start_time": self.node.started // NANOSECONDS,
        }

    def topic(self, call: Call) -> Hosted:
        """Return the partition that ``topic`` and ``partition`` name; without a partition the node's default."""
        return self._find(*self._topic_args(call))

    def channel_args(self, call: Call) -> tuple[Hosted, str]:
        """Return the partition, and the name of a channel that may be unknown."""
        topic, partition = self._topic_args(call)
        channel = valid_channel(call.arg("channel", "MISSING_ARG_CHANNEL"))
        return self._find(topic, partition), channel

    def channel(self, call: Call) -> tuple[Hosted, Channel]:
        """Return the partition, and the channel that the argument ``channel`` names."""
        hosted, name = self.channel_args(call)
        channel = hosted.partition.channels.get(name)
        if channel is None:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        return hosted, channel

    def led_channel(self, call: Call) -> Channel:
        hosted, channel = self.channel(call)
        self.check_leader(hosted)
        return channel

    def check_leader(self, hosted: Hosted) -> None:
        """Raise the fault for a request that only the leader serves."""
        if not hosted.leader:
            raise HttpFault(400, NOT_LEADER)

    def _topic_args(self, call: Call) -> tuple[str, int]:
        return valid_topic(call.arg("topic", "MISSING_ARG_TOPIC")), call.number("partition", default="-1")

    def _find(self, topic: str, partition: int) -> Hosted:
        hosted = self.node.find(topic, partition)
        if hosted is None:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        return hosted
