"""The embedded reference cluster: nsqd and nsqlookupd of both generations.

Names are imported on first use: a single nsqd starts without importing a cluster.
"""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from nsqext.broker.cluster import Cluster, ClusterNode
    from nsqext.broker.cluster_fault_injection import ClusterFaults, ScriptedClock
    from nsqext.broker.options import ClusterOptions

__all__ = ("Cluster", "ClusterFaults", "ClusterNode", "ClusterOptions", "ScriptedClock")

_MODULES = {
    "Cluster": "nsqext.broker.cluster",
    "ClusterFaults": "nsqext.broker.cluster_fault_injection",
    "ClusterNode": "nsqext.broker.cluster",
    "ClusterOptions": "nsqext.broker.options",
    "ScriptedClock": "nsqext.broker.cluster_fault_injection",
}


def __getattr__(name: str) -> _typing.Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'nsqext.broker' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
