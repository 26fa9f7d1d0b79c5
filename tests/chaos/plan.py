"""What goes wrong in a schedule, and when: drawn from its seed alone."""

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
"""Seconds in which faults begin."""


@define
class World:
    """The cluster, and which of its servers are down.

    Attributes:
        cluster: the cluster.
        down: names of killed nodes and lookup nodes.
        refused: moves that the cluster would not make, because a node was away.
    """

    cluster: Cluster
    down: set[str] = field(factory=set)
    refused: int = 0

    def kill(self, name: str) -> None:
        """Kill a server, once."""
        if name not in self.down:
            self.down.add(name)
            self.cluster.kill(name)

    def restart(self, name: str) -> None:
        """Start a killed server again."""
        if name in self.down:
            self.cluster.restart(name)
            self.down.discard(name)

    def move(self, topic: str, partition: int, name: str) -> None:
        """Move a leader, where the cluster can."""
        try:
            self.cluster.move_leader(topic, partition, name)
        except NsqError:
            self.refused += 1

    def mend(self) -> None:
        """Undo everything; returns when every partition takes writes."""
        for name in tuple(self.down):
            self.restart(name)
        self.cluster.faults.heal()
        for topic in TOPICS:
            for partition in range(PARTITIONS):
                self.cluster.wait_writable(topic, partition)


@frozen
class Step:
    """One thing that is done to the cluster.

    Attributes:
        at: seconds since the schedule began.
        name: what is done, for people.
        act: does it, blocking.
    """

    at: float
    name: str
    act: Callable[[World], object]


@frozen
class Plan:
    """A schedule.

    Attributes:
        seed: what it was drawn from.
        on_unknown: what producers do with publishes whose fate is unknown.
        replicas: copies of each partition: of two, the remaining one accepts no writes; of three, two continue.
        faults: how many things go wrong.
        steps: faults and their ends, by time.
    """

    seed: int
    on_unknown: Literal["retry", "raise"]
    replicas: int
    faults: int
    steps: tuple[Step, ...]


def _kill(chance: random.Random, at: float) -> list[Step]:
    topic, partition = chance.choice(TOPICS), chance.randrange(PARTITIONS)
    names: list[str] = []

    def kill(world: World) -> None:
        names.append(world.cluster.leader(topic, partition))
        world.kill(names[0])

    def restart(world: World) -> None:
        for name in names:
            world.restart(name)

    end = at + chance.uniform(0.2, 0.9)
    return [Step(at, f"kill the leader of {topic}[{partition}]", kill), Step(end, "restart it", restart)]


def _move(chance: random.Random, at: float) -> list[Step]:
    topic, partition, name = chance.choice(TOPICS), chance.randrange(PARTITIONS), chance.choice(NODES)
    return [Step(at, f"move {topic}[{partition}] to {name}", lambda world: world.move(topic, partition, name))]


def _cut(chance: random.Random, at: float) -> list[Step]:
    name, count = chance.choice(NODES), chance.randint(1, 3)
    direction: Literal["in", "out"] = chance.choice(("in", "out"))
    text = f"cut {count} connections of {name} in the middle of a frame ({direction})"
    return [Step(at, text, lambda world: world.cluster.faults.cut(name, direction, connections=count))]


def _delay(chance: random.Random, at: float) -> list[Step]:
    name, seconds = chance.choice(NODES), chance.uniform(0.002, 0.03)
    direction: Literal["in", "out"] = chance.choice(("in", "out"))
    text = f"delay bytes of {name} by {seconds:.3f} s ({direction})"
    return [Step(at, text, lambda world: world.cluster.faults.delay(name, direction, seconds))]


def _freeze(chance: random.Random, at: float) -> list[Step]:
    name = chance.choice(NODES)
    return [
        Step(at, f"freeze {name}", lambda world: world.cluster.faults.freeze(name)),
        Step(at + chance.uniform(0.1, 0.8), f"thaw {name}", lambda world: world.cluster.faults.thaw(name)),
    ]


def _refuse(chance: random.Random, at: float) -> list[Step]:
    name = chance.choice(NODES)
    return [
        Step(at, f"{name} refuses connections", lambda world: world.cluster.faults.refuse(name)),
        Step(at + 0.4, f"{name} takes them", lambda world: world.cluster.faults.refuse(name, False)),
    ]


def _answer(chance: random.Random, at: float) -> list[Step]:
    name, times = chance.choice(NODES), chance.randint(1, 5)
    code = chance.choice(("E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_PUB_FAILED"))
    command = chance.choice(("PUB", "PUB_EXT"))
    text = f"{name} answers {times} {command} with {code}"
    return [Step(at, text, lambda world: world.cluster.faults.answer(name, code, times=times, command=command))]


def _stale(chance: random.Random, at: float) -> list[Step]:
    name = chance.choice((None, *LOOKUPDS))
    return [
        Step(at, f"{name or 'lookup'} is stale", lambda world: world.cluster.faults.stale_lookup(name)),
        Step(at + 0.6, f"{name or 'lookup'} is repaired", lambda world: world.cluster.faults.heal_lookup(name)),
    ]


def _empty(chance: random.Random, at: float) -> list[Step]:
    name = chance.choice((None, *LOOKUPDS))
    return [
        Step(at, f"{name or 'lookup'} is empty", lambda world: world.cluster.faults.empty_lookup(name)),
        Step(at + 0.6, f"{name or 'lookup'} is repaired", lambda world: world.cluster.faults.heal_lookup(name)),
    ]


def _slow(chance: random.Random, at: float) -> list[Step]:
    seconds = chance.uniform(0.05, 0.5)
    return [
        Step(at, f"lookup takes {seconds:.2f} s", lambda world: world.cluster.faults.slow_lookup(seconds)),
        Step(at + 0.6, "lookup is repaired", lambda world: world.cluster.faults.heal_lookup()),
    ]


def _away(chance: random.Random, at: float) -> list[Step]:
    names = chance.choice((("l1",), ("l2",), LOOKUPDS))
    steps = []
    for name in names:
        steps.append(Step(at, f"kill {name}", partial(World.kill, name=name)))
        steps.append(Step(at + 0.5, f"restart {name}", partial(World.restart, name=name)))
    return steps


# a black hole is a frozen node: bytes that are missing in the middle of a stream are what TCP never does
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
    chance = random.Random(seed)
    kinds = [*chance.choices(("kill", "move"), k=2), *chance.choices(tuple(KINDS), k=chance.randint(2, 6))]
    steps: list[Step] = []
    for kind in kinds:
        steps += KINDS[kind](chance, chance.uniform(0.05, LENGTH))
    steps.sort(key=lambda step: step.at)
    return Plan(seed, chance.choice(("retry", "raise")), chance.choice((2, 3)), len(kinds), tuple(steps))
