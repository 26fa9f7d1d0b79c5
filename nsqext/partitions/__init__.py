"""Partitions of the redesigned NSQ without a consumer: leaders, bounds of logs, positions, and reading connections.

The Spark source and `nsqext.arrow` use it. `LeaderLocator` finds leaders and sends requests to them; `PartitionReader`
subscribes to a channel at a leader, and leaves RDY and answers to its caller.
"""

from __future__ import annotations

from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader, SubscribeRequest
from nsqext.lookup.leaders import Leader
from nsqext.lookup.node_channels import LogBounds
from nsqext.partitions.leaders import LeaderLocator
from nsqext.partitions.nodes import ChannelPosition, MessagePosition, PartitionNodes

__all__ = (
    "ChannelPosition",
    "Leader",
    "LeaderLocator",
    "LogBounds",
    "MessagePosition",
    "PartitionNodes",
    "PartitionReader",
    "SubscribeRequest",
)
