"""Faults of a simulation: what each does to links, disks and lookup nodes, and that its end undoes it."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from nsqext.testing.simulation.disk import SimulatedDisk
from nsqext.testing.simulation.faults import KINDS, Fault, FaultOptions, Injector, draw_faults
from nsqext.testing.simulation.network import Network

pytestmark = pytest.mark.anyio


class Lookup:
    """A lookup node, which shows nothing during a fault."""

    shows = "all"

    def show_nothing(self) -> None:
        self.shows = "nothing"

    def show_current(self) -> None:
        self.shows = "all"


class Scene:
    """An injector of two clients and two lookup nodes."""

    def __init__(self) -> None:
        self.network = Network(Random(1))
        self.disk = SimulatedDisk(self.network, Random(1))
        self.lookups = {"l1": Lookup(), "l2": Lookup()}
        runtime = SimpleNamespace(
            lookupds_named=lambda name: [*self.lookups.values()] if name is None else [self.lookups[name]]
        )
        cluster: Any = SimpleNamespace(disk=self.disk, runtime=runtime, heal=lambda: anyio.lowlevel.checkpoint())
        clock: Any = SimpleNamespace(jumped=0.0)
        selector: Any = None
        self.injector = Injector(1, cluster, self.network, clock, selector, clients=["c1", "c2"])

    def state(self) -> tuple[object, ...]:
        network, disk, shown = self.network, self.disk, [one.shows for one in self.lookups.values()]
        return set(network.blocked), set(network.slow), set(network.stalled), (set(disk.full), dict(disk.slow)), shown

    async def during(self, kind: str, target: str, chance: float) -> tuple[object, ...]:
        """Return the state during a fault; check that its end undoes it."""
        before = self.state()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.injector.inject, Fault(kind, 0.0, 0.05, target, chance))
            while (found := self.state()) == before:  # noqa: ASYNC110 - no event
                await anyio.sleep(0.001)
        assert self.state() == before
        return found


_TO, _FROM = {("c1", "n1"), ("c2", "n1")}, {("n1", "c1"), ("n1", "c2")}
_NONE: set[object] = set()
_WHOLE: tuple[set[object], dict[str, float]] = (set(), {})
_SHOWN = ["all", "all"]


@pytest.mark.parametrize(
    ("kind", "target", "chance", "state"),
    [
        ("partition", "n1", 0.0, (_TO | _FROM, _NONE, _NONE, _WHOLE, _SHOWN)),
        ("drop_to", "n1", 0.0, (_TO, _NONE, _NONE, _WHOLE, _SHOWN)),
        ("drop_from", "n1", 0.0, (_FROM, _NONE, _NONE, _WHOLE, _SHOWN)),
        ("partition_one", "n1", 0.9, ({("c2", "n1"), ("n1", "c2")}, _NONE, _NONE, _WHOLE, _SHOWN)),
        ("slow_link", "n1", 0.5, (_NONE, _TO | _FROM, _NONE, _WHOLE, _SHOWN)),
        ("stall", "n1", 0.4, (_NONE, _NONE, {"c1"}, _WHOLE, _SHOWN)),
        ("disk_full", "n1", 0.5, (_NONE, _NONE, _NONE, ({"n1"}, {}), _SHOWN)),
        ("disk_slow", "n1", 0.5, (_NONE, _NONE, _NONE, (_NONE, {"n1": 0.025}), _SHOWN)),
        ("lookup_empty", "l2", 0.4, (_NONE, _NONE, _NONE, _WHOLE, ["nothing", "nothing"])),
        ("lookup_empty", "l2", 0.5, (_NONE, _NONE, _NONE, _WHOLE, ["all", "nothing"])),
    ],
)
async def test_a_fault_acts_on_its_target_until_its_end(
    kind: str, target: str, chance: float, state: tuple[object, ...]
) -> None:
    assert await Scene().during(kind, target, chance) == state


async def test_the_heal_ends_faults_that_last() -> None:
    scene = Scene()
    before = scene.state()
    async with anyio.create_task_group() as tasks:
        for kind in ("partition", "slow_link", "stall"):
            tasks.start_soon(scene.injector.inject, Fault(kind, 0.0, 60.0, "n1", 0.5))
        while len(scene.injector.effective) < 3:  # noqa: ASYNC110 - no event
            await anyio.sleep(0.001)
        await scene.injector.heal()
        assert scene.state() == before
        tasks.cancel_scope.cancel()


def test_faults_are_drawn_in_the_order_of_their_times() -> None:
    for seed in range(20):
        found = draw_faults(seed, FaultOptions(count=(8, 8)), ["n1", "n2"], ["l1"])
        assert [fault.at for fault in found] == sorted(fault.at for fault in found)
        assert {fault.target for fault in found if fault.kind.startswith("lookup")} <= {"l1"}
        assert {fault.kind for fault in found} <= set(KINDS)
