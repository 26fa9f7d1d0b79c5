"""Deterministic simulation: clients, services and a cluster in a process, with virtual time and seeded faults.

The same seed gives the same events, byte for byte.
"""

from __future__ import annotations

from nsqext.testing.simulation.faults import KINDS, Fault, FaultOptions
from nsqext.testing.simulation.network import NetworkOptions
from nsqext.testing.simulation.results import Run, SimulationFailed
from nsqext.testing.simulation.runner import ClientProcess, World, run_seed, simulate

__all__ = (
    "KINDS",
    "ClientProcess",
    "Fault",
    "FaultOptions",
    "NetworkOptions",
    "Run",
    "SimulationFailed",
    "World",
    "run_seed",
    "simulate",
)
