"""Faults of a simulation, drawn from the seed as data that can be shortened."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, evolve, field, frozen

from nsqext.arguments import check_time
from nsqext.broker.fault_injection import Rule
from nsqext.broker.lookupd.lookupd import ClusterSnapshot, ListedPartition
from nsqext.errors import InvalidSetting
from nsqext.testing.simulation.cluster import COORDINATOR, SimulatedCluster, as_server
from nsqext.testing.simulation.network import check_range

if TYPE_CHECKING:
    from nsqext.testing.simulation.disk import SimulatedDisk
    from nsqext.testing.simulation.network import Network
    from nsqext.testing.simulation.private_parts import SimulatedSelector
    from nsqext.testing.simulation.seams import SimulatedClock


@frozen
class Fault:
    """A fault.

    Attributes:
        kind: see `KINDS`.
        at: virtual seconds after faults began.
        seconds: how long it lasts.
        target: name of a node or lookup node.
        chance: number from 0 to 1 for the kind's open choices.
    """

    kind: str
    at: float
    seconds: float
    target: str
    chance: float

    def __str__(self) -> str:
        return f"{self.at:6.3f} s  {self.kind} {self.target} for {self.seconds:.3f} s"


@frozen
class FaultOptions:
    """Which faults are drawn, and how many.

    Attributes:
        kinds: see `KINDS`; all by default.
        count: smallest and largest number of faults.
        duration: virtual seconds in which faults begin.
        seconds: shortest and longest fault.
    """

    kinds: Sequence[str] = field(factory=lambda: tuple(KINDS))
    count: tuple[int, int] = (2, 12)
    duration: float = 6.0
    seconds: tuple[float, float] = (0.05, 2.5)

    def __attrs_post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            what = f"unknown kinds of faults: {', '.join(unknown)}" if unknown else "no kinds of faults"
            raise InvalidSetting(what, hint=f"use {', '.join(KINDS)}")
        check_range("count", self.count, whole=True)
        check_time("duration", self.duration)
        check_range("seconds", self.seconds)

    @property
    def every_kind(self) -> bool:
        """Whether no kinds were chosen."""
        return {*self.kinds} == {*KINDS}

    def possible(self, *, disk: bool, nodes: int) -> FaultOptions:
        """Return the options without the kinds that a simulation cannot inject.

        Raises:
            InvalidSetting: such a kind was chosen.
        """
        impossible = set() if disk else {*_DISK_KINDS}
        impossible |= _NODES_KINDS if nodes == 1 else set()
        if self.every_kind:
            return evolve(self, kinds=tuple(kind for kind in self.kinds if kind not in impossible))
        chosen = [kind for kind in self.kinds if kind in impossible]
        if chosen:
            on_disk = chosen[0] in _DISK_KINDS
            raise InvalidSetting(
                f"faults of kinds {', '.join(chosen)} have no effect without {'a disk' if on_disk else 'other nodes'}",
                hint="give disk=True" if on_disk else "give nodes=2 or more",
            )
        return self

    def check_effects(self, drawn: set[str], effective: set[str]) -> None:
        """Raise InvalidSetting for kinds of faults that were drawn, and had no effect in any run."""
        idle = sorted(drawn - effective)
        if idle:
            hints = [_NEEDS[kind] for kind in idle if kind in _NEEDS]
            raise InvalidSetting(
                f"faults of kinds {', '.join(idle)} had no effect in any run",
                hint=f"{hints[0] if hints else 'leave them out'}; or run more seeds",
            )


End = Callable[[], Awaitable[None] | None] | None
_Begin = Callable[["Injector", Fault], Awaitable[End] | End]


def _stop(how: Callable[[SimulatedCluster, str], Awaitable[None]]) -> _Begin:
    async def begin(at: Injector, fault: Fault) -> End:
        if fault.target in at.cluster.down:
            at.no_effect()
        await how(at.cluster, fault.target)
        return lambda: at.cluster.restart(fault.target)

    return begin


def _disk(change: Callable[[SimulatedDisk, Fault], None]) -> _Begin:
    def begin(at: Injector, fault: Fault) -> End:
        disk = at.cluster.disk
        if disk is None:
            return at.no_effect()
        change(disk, fault)
        return lambda: disk.heal(fault.target)

    return begin


def _cut_off(at: Injector, fault: Fault, others: Sequence[str]) -> End:
    """Cut the link between a node and another node, or between the coordinator and all nodes."""
    if not others:
        return at.no_effect()
    other = others[int(fault.chance * len(others))]
    at.cluster.separate(fault.target, other)
    return lambda: at.cluster.connect(fault.target, other)


def _stall(at: Injector, fault: Fault) -> End:
    """Let a client process neither read nor write, as if a handler blocked its event loop."""
    client = at.clients[int(fault.chance * len(at.clients))]
    at.network.stalled.add(client)
    return lambda: at.network.stalled.discard(client)


def _change(names_in: Callable[[SimulatedCluster], Sequence[str]], how: Callable[..., Awaitable[bool]]) -> _Begin:
    async def begin(at: Injector, fault: Fault) -> End:
        names = names_in(at.cluster)
        changed = names and await how(at.cluster, names[int(fault.chance * len(names))])
        return None if changed else at.no_effect()

    return begin


def _freeze(at: Injector, fault: Fault) -> End:
    if fault.target in at.cluster.down:
        return at.no_effect()
    at.cluster.freeze(fault.target)
    return lambda: at.cluster.thaw(fault.target) if fault.target not in at.cluster.down else None


async def _move(at: Injector, fault: Fault) -> End:
    places = [(topic, number) for topic, count in at.cluster.topics.items() for number in range(count)]
    if not places:
        return at.no_effect()
    topic, partition = places[int(fault.chance * len(places))]
    leads = at.cluster.leader(topic, partition) == fault.target
    moved = await at.cluster.move_leader(topic, partition, fault.target) and not leads
    return None if moved else at.no_effect()


def _links(at: Injector, target: str, directions: str) -> list[tuple[str, str]]:
    links: list[tuple[str, str]] = []
    for client in at.clients:
        links += [(client, target)] if "i" in directions else []
        links += [(target, client)] if "o" in directions else []
    return links


def _block(at: Injector, links: Sequence[tuple[str, str]]) -> End:
    for link in links:
        at.network.block(*link)

    def end() -> None:
        for link in links:
            at.network.unblock(*link)

    return end


def _blocking(directions: str) -> _Begin:
    return lambda at, fault: _block(at, _links(at, fault.target, directions))


def _partition_one(at: Injector, fault: Fault) -> End:
    client = at.clients[int(fault.chance * len(at.clients))]
    return _block(at, [(client, fault.target), (fault.target, client)])


def _slow(at: Injector, fault: Fault) -> End:
    links = _links(at, fault.target, "io")
    for link in links:
        at.network.slow[link] = 5 + 200 * fault.chance

    def end() -> None:
        for link in links:
            at.network.slow.pop(link, None)

    return end


def _slow_node(at: Injector, fault: Fault) -> End:
    rules = [Rule("delay", direction, seconds=0.1 * fault.chance) for direction in ("in", "out")]
    faults = at.cluster.runtime.node(fault.target).member.node.faults
    for rule in rules:
        faults.add(rule)
    return lambda: faults.remove(rules)


def _cut(at: Injector, fault: Fault) -> End:
    network, random = at.network, at.random_of(fault)

    def cut(share: float) -> None:
        if at.connected:
            at.effective.add(fault.kind)
        for sock in network.connections(fault.target):
            if random.random() < share:
                network.cut(sock)

    for _ in range(random.randint(1, 10)):
        network.call_at(network.now + random.uniform(0.0, fault.seconds), cut, 0.1 + 0.9 * fault.chance)
    return at.no_effect()  # so far


def _half_open(at: Injector, fault: Fault) -> End:
    random = at.random_of(fault)
    if not at.connected:
        return at.no_effect()
    for sock in at.network.connections(fault.target):
        if sock.peer is not None and random.random() < 0.2 + fault.chance / 2:
            # the server's end is lost, or a client's end, which the server notices when it sends a heartbeat
            at.network.forget(sock if random.random() < 0.5 else sock.peer)
    return None


def _refuse(at: Injector, fault: Fault) -> End:
    faults = at.cluster.runtime.node(fault.target).member.node.faults
    faults.refuse()
    return lambda: faults.refuse(False)


def _hold_flush(at: Injector, fault: Fault) -> End:
    if fault.target in at.cluster.down:
        return at.no_effect()
    faults = at.cluster.runtime.node(fault.target).member.node.faults
    faults.hold_flush()
    return lambda: faults.hold_flush(False)


def _jump(at: Injector, fault: Fault) -> End:
    at.clock.jumped += 7200 * (fault.chance - 0.5)
    return None


def _lookup(change: Callable[[Any, Fault], None]) -> _Begin:
    def begin(at: Injector, fault: Fault) -> End:
        for lookupd in at.cluster.runtime.lookupds_named(None if fault.chance < 0.5 else fault.target):
            change(lookupd, fault)

        def end() -> None:
            for lookupd in at.cluster.runtime.lookupds_named(None):
                lookupd.show_current()

        return end

    return begin


def _wrong_leaders(lookupd: Any, fault: Fault) -> None:
    view = ClusterSnapshot(lookupd.view)
    names = list(view.peers())
    following = dict(zip(names, names[1:] + names[:1], strict=True))

    def shifted(partition: ListedPartition) -> ListedPartition:
        registered, reader = (following.get(name or "") for name in (partition.registered, partition.reader))
        return evolve(partition, registered=registered, reader=reader)

    for name in view.names():
        topic = view.topic(name)
        if topic is not None:
            view.put(evolve(topic, partitions={n: shifted(found) for n, found in topic.partitions.items()}))
    lookupd.view = view


_NODE: dict[str, _Begin] = {
    "kill": _stop(SimulatedCluster.kill),
    "power": _stop(SimulatedCluster.cut_power),
    "disk_full": _disk(lambda disk, fault: disk.full.add(fault.target)),
    "disk_failing": _disk(lambda disk, fault: disk.failing.add(fault.target)),
    "disk_slow": _disk(lambda disk, fault: disk.slow.update({fault.target: 0.05 * fault.chance})),
    "separate": lambda at, fault: _cut_off(at, fault, [name for name in at.cluster.nodes if name != fault.target]),
    "isolate": lambda at, fault: _cut_off(at, fault, [COORDINATOR]),
    "stall": _stall,
    "recreate": _change(lambda cluster: cluster.recreated, SimulatedCluster.recreate_topic),
    "upgrade": _change(lambda cluster: cluster.upgraded, SimulatedCluster.upgrade_topic),
    "terminate": _stop(SimulatedCluster.terminate),
    "freeze": _freeze,
    "move": _move,
    "partition": _blocking("io"),
    "drop_to": _blocking("i"),
    "drop_from": _blocking("o"),
    "partition_one": _partition_one,
    "slow_link": _slow,
    "slow_node": _slow_node,
    "cut": _cut,
    "half_open": _half_open,
    "refuse": _refuse,
    "hold_flush": _hold_flush,
    "pause": lambda at, fault: at.selector.pause(fault.seconds),
    "clock_jump": _jump,
}
_LOOKUP: dict[str, _Begin] = {
    "lookup_kill": _stop(SimulatedCluster.kill),
    "lookup_stale": _lookup(lambda lookupd, fault: lookupd.show_snapshot()),
    "lookup_wrong": _lookup(_wrong_leaders),
    "lookup_empty": _lookup(lambda lookupd, fault: lookupd.show_nothing()),
    "lookup_slow": _lookup(lambda lookupd, fault: setattr(lookupd, "delay", fault.chance * 4)),
    "lookup_partition": _blocking("io"),
}
_DISK_KINDS = frozenset(("disk_full", "disk_failing", "disk_slow"))
_NODES_KINDS = frozenset(("separate", "move", "lookup_wrong"))  # need two nodes
_NEEDS = {
    "cut": "connect clients before faults are injected",
    "half_open": "connect clients before faults are injected",
    "recreate": "name topics in world.cluster.recreated",
    "upgrade": "name topics without extend support in world.cluster.upgraded",
    "move": "create a topic before faults are injected",
}
KINDS: dict[str, _Begin] = {**_NODE, **_LOOKUP}
"""Kinds of faults, with a function that begins a fault and returns the function that ends it."""


def draw_faults(seed: int, options: FaultOptions, nodes: Sequence[str], lookupds: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a seed, by time."""
    random = Random(f"faults {seed}")
    found = []
    for _ in range(random.randint(*options.count)):
        kind = random.choice(tuple(options.kinds))
        target = random.choice(lookupds if kind in _LOOKUP else nodes)
        at, seconds = random.uniform(0.0, options.duration), random.uniform(*options.seconds)
        if kind == "pause":
            seconds *= random.random()
        found.append(Fault(kind, at, seconds, target, random.random()))
    return tuple(sorted(found, key=lambda fault: fault.at))


@define(eq=False)
class Injector:
    """Injects faults into a simulation, and ends them."""

    seed: int
    cluster: SimulatedCluster
    network: Network
    clock: SimulatedClock
    selector: SimulatedSelector
    clients: list[str] = field(factory=lambda: ["client"])
    effective: set[str] = field(factory=set)  #: kinds of the faults that had an effect
    _idle: bool = field(default=False, init=False)
    _turn: anyio.Lock = field(factory=anyio.Lock, init=False)

    def random_of(self, fault: Fault) -> Random:
        """Return a source of choices that is independent of other faults."""
        return Random(f"{self.seed} {fault.chance}")

    @property
    def connected(self) -> bool:
        """Whether any client process is connected to a server."""
        return any(sock.peer is not None and sock.peer.host in self.clients for sock in self.network.connections())

    def no_effect(self) -> End:
        """Note that the fault that begins has nothing to act on; return None."""
        self._idle = True
        return None

    async def inject(self, fault: Fault) -> None:
        await anyio.sleep(fault.at)
        self.network.note(f"fault {fault}")
        async with self._turn:
            self._idle = False
            with as_server():  # for timers that a fault starts
                begun = KINDS[fault.kind](self, fault)
                end = await begun if inspect.isawaitable(begun) else begun
            if not self._idle:
                self.effective.add(fault.kind)
        if end is None:
            return
        await anyio.sleep(fault.seconds)
        async with self._turn:
            with as_server():
                waiting = end()
                if inspect.isawaitable(waiting):
                    await waiting

    async def heal(self) -> None:
        """End all faults; return when every partition accepts writes."""
        async with self._turn:
            for link in sorted(self.network.blocked):
                self.network.unblock(*link)
            self.network.slow.clear()
            self.network.stalled.clear()
            self.clock.jumped = 0.0
            await self.cluster.heal()
