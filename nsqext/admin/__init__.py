"""Administer a cluster of either generation: topics, channels, nodes, statistics."""

from __future__ import annotations

from nsqext.admin.admin import Admin
from nsqext.admin.results import (
    ChannelStats,
    ClientStats,
    NodeStatus,
    PartitionChannelStats,
    PartitionStats,
    TopicInfo,
    TopicStats,
)

__all__ = (
    "Admin",
    "ChannelStats",
    "ClientStats",
    "NodeStatus",
    "PartitionChannelStats",
    "PartitionStats",
    "TopicInfo",
    "TopicStats",
)
