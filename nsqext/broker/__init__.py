"""The reference cluster: nsqd and nsqlookupd of both generations in this process."""

from __future__ import annotations

from nsqext.broker.cluster import Cluster, ClusterNode
from nsqext.broker.cluster_faults import ClusterFaults, ScriptedClock
from nsqext.broker.options import ClusterOptions

__all__ = ("Cluster", "ClusterFaults", "ClusterNode", "ClusterOptions", "ScriptedClock")
