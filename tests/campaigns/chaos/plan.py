"""The faults of a schedule and their times: they depend on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from attrs import define, field, frozen

from nsqext.errors import NsqError

if TYPE_CHECKING:
    from nsqext.broker import Cluster

__all__ = ("KINDS", "PARTITIONS", "TOPICS", "Plan", "Step", "World", "make_plan")

NODES = ("n1", "n2", "n3")
LOOKUPDS = ("l1", "l2")
TOPICS = ("plain", "keyed", "ordered", "tagged")
PARTITIONS = 2
LENGTH = 1.0
"""Seconds within which every fault begins."""


@define
class World:
    """The cluster and the state of its servers.

    Attributes:
        cluster: the cluster.
        down: names of killed nodes and lookup nodes.
        refused: number of leader moves that the cluster refused because a node was down.
    """

    cluster: Cluster
    down: set[str] = field(factory=set)
    refused: int = 0

    def kill(self, name: str) -> None:
        """Kill a server unless it is down already."""
        if name not in self.down:
            self.down.add(name)
            self.cluster.kill(name)

    def restart(self, name: str) -> None:
        """Start a killed server again."""
        if name in self.down:
            self.cluster.restart(name)
            self.down.discard(name)

    def move(self, topic: str, partition: int, name: str) -> None:
        """Move a leader, unless the cluster refuses."""
        try:
            self.cluster.move_leader(topic, partition, name)
        except NsqError:
            self.refused += 1

    def heal(self) -> None:
        """End all faults, and return when every partition accepts writes."""
        for name in tuple(self.down):
            self.restart(name)
        self.cluster.faults.heal()
        for topic in TOPICS:
            for partition in range(PARTITIONS):
                self.cluster.wait_writable(topic, partition)


@frozen
class Step:
    """Start or end of a fault.

    Attributes:
        at: seconds since the schedule began.
        name: description for the output.
        act: blocking function that performs the step.
    """

    at: float
    name: str
    act: Callable[[World], object]


@frozen
class Plan:
    """A schedule.

    Attributes:
        seed: seed that decides everything else.
        on_unknown: whether producers retry or raise if the outcome of a publish is unknown.
        replicas: copies of each partition; with one node down, two accept no writes and three do.
        faults: number of faults.
        steps: starts and ends of faults, by time.
    """

    seed: int
    on_unknown: Literal["retry", "raise"]
    replicas: int
    faults: int
    steps: tuple[Step, ...]


def _kill(rng: random.Random, at: float) -> list[Step]:
    topic, partition = rng.choice(TOPICS), rng.randrange(PARTITIONS)
    names: list[str] = []

    def kill(world: World) -> None:
        names.append(world.cluster.leader(topic, partition))
        world.kill(names[0])

    def restart(world: World) -> None:
        for name in names:
            world.restart(name)

    end = at + rng.uniform(0.2, 0.9)
    return [Step(at, f"kill the leader of {topic}[{partition}]", kill), Step(end, "restart it", restart)]


def _move(rng: random.Random, at: float) -> list[Step]:
    topic, partition, name = rng.choice(TOPICS), rng.randrange(PARTITIONS), rng.choice(NODES)
    return [Step(at, f"move {topic}[{partition}] to {name}", lambda world: world.move(topic, partition, name))]


def _cut(rng: random.Random, at: float) -> list[Step]:
    name, count = rng.choice(NODES), rng.randint(1, 3)
    direction: Literal["in", "out"] = rng.choice(("in", "out"))
    text = f"cut {count} connections of {name} in the middle of a frame ({direction})"
    return [Step(at, text, lambda world: world.cluster.faults.cut(name, direction, connections=count))]


def _delay(rng: random.Random, at: float) -> list[Step]:
    name, seconds = rng.choice(NODES), rng.uniform(0.002, 0.03)
    direction: Literal["in", "out"] = rng.choice(("in", "out"))
    text = f"delay bytes of {name} by {seconds:.3f} s ({direction})"
    return [Step(at, text, lambda world: world.cluster.faults.delay(name, direction, seconds))]


def _freeze(rng: random.Random, at: float) -> list[Step]:
    name = rng.choice(NODES)

    def freeze(world: World) -> None:
        if world.cluster.state(name) != "down":
            world.cluster.faults.freeze(name)

    return [
        Step(at, f"freeze {name}", freeze),
        Step(at + rng.uniform(0.1, 0.8), f"thaw {name}", lambda world: world.cluster.faults.thaw(name)),
    ]


def _refuse(rng: random.Random, at: float) -> list[Step]:
    name = rng.choice(NODES)
    return [
        Step(at, f"{name} refuses connections", lambda world: world.cluster.faults.refuse(name)),
        Step(at + 0.4, f"{name} accepts connections", lambda world: world.cluster.faults.refuse(name, False)),
    ]


def _answer(rng: random.Random, at: float) -> list[Step]:
    name, times = rng.choice(NODES), rng.randint(1, 5)
    code = rng.choice(("E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_PUB_FAILED"))
    command = rng.choice(("PUB", "PUB_EXT"))
    text = f"{name} answers {times} {command} commands with {code}"
    return [Step(at, text, lambda world: world.cluster.faults.answer(name, code, times=times, command=command))]


def _stale(rng: random.Random, at: float) -> list[Step]:
    name = rng.choice((None, *LOOKUPDS))
    return [
        Step(at, f"{name or 'lookup'} is stale", lambda world: world.cluster.faults.stale_lookup(name)),
        Step(at + 0.6, f"{name or 'lookup'} is repaired", lambda world: world.cluster.faults.heal_lookup(name)),
    ]


def _empty(rng: random.Random, at: float) -> list[Step]:
    name = rng.choice((None, *LOOKUPDS))
    return [
        Step(at, f"{name or 'lookup'} is empty", lambda world: world.cluster.faults.empty_lookup(name)),
        Step(at + 0.6, f"{name or 'lookup'} is repaired", lambda world: world.cluster.faults.heal_lookup(name)),
    ]


def _slow(rng: random.Random, at: float) -> list[Step]:
    seconds = rng.uniform(0.05, 0.5)
    return [
        Step(at, f"lookup takes {seconds:.2f} s", lambda world: world.cluster.faults.slow_lookup(seconds)),
        Step(at + 0.6, "lookup is repaired", lambda world: world.cluster.faults.heal_lookup()),
    ]


def _away(rng: random.Random, at: float) -> list[Step]:
    names = rng.choice((("l1",), ("l2",), LOOKUPDS))
    steps = []
    for name in names:
        steps.append(Step(at, f"kill {name}", partial(World.kill, name=name)))
        steps.append(Step(at + 0.5, f"restart {name}", partial(World.restart, name=name)))
    return steps


# a lost packet is a frozen node: TCP never leaves bytes out of a stream
KINDS: dict[str, Callable[[random.Random, float], list[Step]]] = {
    "kill": _kill,
    "move": _move,
    "cut": _cut,
    "delay": _delay,
    "freeze": _freeze,
    "refuse": _refuse,
    "error answers": _answer,
    "stale lookup": _stale,
    "empty lookup": _empty,
    "slow lookup": _slow,
    "lookup away": _away,
}


def make_plan(seed: int) -> Plan:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    kinds = [*rng.choices(("kill", "move"), k=2), *rng.choices(tuple(KINDS), k=rng.randint(2, 6))]
    steps: list[Step] = []
    for kind in kinds:
        steps += KINDS[kind](rng, rng.uniform(0.05, LENGTH))
    steps.sort(key=lambda step: step.at)
    return Plan(seed, rng.choice(("retry", "raise")), rng.choice((2, 3)), len(kinds), tuple(steps))
