"""Tools for tests of applications: the pytest plugin `nsqext.testing.plugin`, and `simulate`.

`simulate` and its classes need the extra ``broker``; they are imported lazily.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqext.testing.simulation import FaultOptions, NetworkOptions, SimulationFailed, World, simulate

__all__ = ("FaultOptions", "NetworkOptions", "SimulationFailed", "World", "simulate")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nsqext.testing' has no attribute {name!r}")
    return getattr(import_module("nsqext.testing.simulation"), name)
