"""Administer a cluster of either generation: topics, channels, nodes, statistics."""

from __future__ import annotations

from nsqext.admin.admin import Admin
from nsqext.admin.options import NewTopicSettings, TopicSettings
from nsqext.admin.results import (
    ChannelStats,
    ClientStats,
    KeyRange,
    NodeStatus,
    PartitionChannelStats,
    PartitionStats,
    StoredMessage,
    TopicInfo,
    TopicStats,
)

__all__ = (
    "Admin",
    "ChannelStats",
    "ClientStats",
    "KeyRange",
    "NewTopicSettings",
    "NodeStatus",
    "PartitionChannelStats",
    "PartitionStats",
    "StoredMessage",
    "TopicInfo",
    "TopicSettings",
    "TopicStats",
)
