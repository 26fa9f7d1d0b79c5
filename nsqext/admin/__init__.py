"""Administer a cluster of either generation: topics, channels, nodes, statistics."""

from __future__ import annotations

from nsqext.admin.admin import Admin
from nsqext.admin.options import NewTopicSettings, TopicSettings
from nsqext.admin.results import NodeStatus, StoredMessage, TopicInfo, TopicStats
from nsqext.lookup.node_stats import ChannelStats, ClientStats, KeyRange, PartitionChannelStats, PartitionStats

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
