"""What a schedule consists of, drawn from its seed: topics, clients, length, faults, properties of the machine.

Most schedules are short: one or two kinds of topics, a few kinds of faults, about 100 publishes and deliveries. A few
are long, with every kind at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from attrs import evolve, frozen

from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.testing.simulation import Fault, FaultOptions, NetworkOptions
from nsqext.testing.simulation.faults import KINDS, draw_faults

__all__ = (
    "BANK",
    "FEATURES",
    "FILTERS",
    "FLOW",
    "JOINS",
    "KEY_TAGS",
    "LATE",
    "LOOKUPDS",
    "NODES",
    "PARTED",
    "SHARES",
    "TRIPLE",
    "Plan",
    "Size",
    "draw_plan",
)

NODES = ("n1", "n2", "n3")
LOOKUPDS = ("l1", "l2")
TOPICS = ("plain", "lanes", "keyed", "ordered", "upgraded", "recreated")
LONG = 0.03
"""Share of the long schedules."""
DISK = 0.4
"""Share of the schedules in which nodes store messages on a disk."""
OVER_HTTP = 0.1
"""Share of the schedules in which producers publish over HTTP, unless unknown outcomes are settled."""
SHARED_LOOKUP = 0.7
"""Share of the schedules in which the clients share a `Lookup`."""
HABITS = ("headers", "delays", "failing", "seek", "pausing", "channels", "lanes")
"""What clients of some schedules do besides: see `Plan.habits`."""
FEATURES = ("tags", "batcher", "batches", "fetch", "batch_handler", "letters")
"""What clients of some schedules use besides handlers and `Producer`: see `Plan.features`."""
TRIPLE = "triple"
TRIPLES = 0.25
"""Share of the schedules in which faults of three kinds last at the same time: see `Plan.features`."""
KEY_TAGS = "key_tags"
KEY_TAGS_SHARE = 0.1
"""Share of the schedules in which keys are shared by tags: see `Plan.features`."""
JOINS = "joins"
JOINS_SHARE = 0.4
"""Share of those without faults, in which consumers join and leave in order: see `Plan.features`."""
_JOINS_SECONDS = 20.0
FILTERS, LATE, PARTED = "filters", "late", "parted"
_RETURNS = 0.75
"""Share of the schedules with separated followers in which publishers continue after the separation."""
SHARES = {FILTERS: 0.05, LATE: 0.02, PARTED: 0.03}
"""Shares of the schedules that have one of these besides: see `Plan.features`."""
BANK = "bank"
BANK_SHARE = 0.05
"""Share of the schedules that are a bank of two databases: see `tests.campaigns.simulation.bank`."""
FLOW = "flow"
FLOW_SHARE = 0.05
"""Share of the schedules that are a consumer of many connections: see `tests.campaigns.simulation.flow`."""
_SETTLED = 21.0
"""Virtual seconds after which publishes must succeed."""

FILES = (100 << 20, 100 << 20, 3000, 300)
"""Sizes at which nodes start a new file."""
SYNC_INTERVALS = (0.05, 0.05, 0.5)
FSYNC = ("always", "always", "interval", "never")

LATE_FLUSHES = 0.15
"""Share of the schedules in which nodes deliver messages late that they have acknowledged."""

DISK_FAULTS = frozenset({"power", "disk_full", "disk_failing", "disk_slow"})
_TOPICS_OF_FAULTS = {"upgrade": "upgraded", "recreate": "recreated"}
_TOPICS_OF = {"tags": "tagged", "letters": "rejected", KEY_TAGS: "keyed", FILTERS: "filtered", LATE: "plain"}

Size = Literal["short", "long"]


@frozen
class Plan:
    """One schedule.

    Attributes:
        seed: the seed.
        size: whether it has everything or a part of it.
        topics: kinds of topics.
        single: topics with publishers of single messages.
        batches: topics with publishers of batches; `batch` is the number of messages of the largest one.
        batch: see `batches`.
        producers: producers that publishers share.
        seconds: virtual seconds for which publishers run.
        rest: virtual seconds from the end of the faults to the last publishes.
        pause: longest pause between two publishes, in seconds.
        partitions: of each topic.
        replicas: of each partition.
        guests: consumers join and leave.
        doomed: a client process publishes and consumes until it is killed.
        faults: the faults.
        latency: longest usual delay of a segment, in seconds.
        disk: how nodes store messages on a disk; None keeps them in memory.
        shared_lookup: producers and consumers share a `Lookup`.
        habits: ``headers`` adds headers to messages, ``delays`` requeues some with a delay, ``failing`` lets a fifth of
            the handlers fail, ``seek`` moves channels back to their beginning, ``pausing`` pauses channels,
            ``channels`` creates and deletes one, ``lanes`` consumes the topic that is created again with a key,
            ``http`` publishes over HTTP, unless unknown outcomes are settled.
        come_and_go: consumers with a tag, and consumers that reject messages, join and leave.
        features: ``tags`` has a topic whose messages have tags, with consumers for some of them; ``batcher`` publishes
            with `nsqext.Batcher`; ``batches``, ``fetch`` and ``batch_handler`` consume batches; ``letters`` has a topic
            whose failing messages go to a dead-letter topic; ``triple`` has faults of three kinds at the same time;
            ``key_tags`` shares the keys of the topic ``keyed`` by tags, instead of by its channel; with ``joins``,
            handlers take seconds, and consumers join and leave this topic without faults; ``filters`` has a topic with
            a channel whose consumers want one value of a header; ``late`` requeues the last messages for more than 900
            s, in which nodes are killed; ``parted`` separates leaders from their followers, and moves all leaders
            afterwards; ``bank`` runs a bank of two databases, and ``flow`` a consumer of many connections, and nothing
            else.
        batchers: topics with publishers that use a `nsqext.Batcher`.
    """

    seed: int
    size: Size
    topics: tuple[str, ...]
    single: tuple[str, ...]
    batches: tuple[str, ...]
    batch: int
    producers: int
    seconds: float
    rest: float
    pause: float
    partitions: int
    replicas: int
    guests: bool
    doomed: bool
    faults: tuple[Fault, ...]
    latency: float
    disk: DiskOptions | None
    habits: tuple[str, ...]
    shared_lookup: bool
    come_and_go: bool = True
    features: tuple[str, ...] = ()
    batchers: tuple[str, ...] = ()

    @property
    def network(self) -> NetworkOptions:
        """Properties of the network."""
        return NetworkOptions(latency=(0.00005, self.latency))


def draw_plan(
    seed: int,
    size: Size | None = None,
    faults: Sequence[Fault] | None = None,
    features: Sequence[str] | None = None,
) -> Plan:
    """Return the schedule of a seed.

    Args:
        seed: the seed.
        size: drawn from the seed by default.
        faults: instead of those of the seed.
        features: instead of those of the seed.
    """
    random = Random(f"plan {seed}")
    drawn: Size = "long" if random.random() < LONG else "short"
    draw = _draw_long if (size or drawn) == "long" else _draw_short
    plan = draw(seed, random, faults, _draw_features(seed) if features is None else tuple(features))
    if JOINS in plan.features:
        return _with_joins(plan)
    if PARTED in plan.features and faults is None:
        plan = _with_parted(plan)
    if LATE in plan.features:
        plan = evolve(plan, rest=_SETTLED)  # what faults excuse is over
    plan = _with_triple(plan) if TRIPLE in plan.features and faults is None else plan
    if PARTED not in plan.features and faults is None:
        plan = _with_late_flushes(plan)
    if FLOW in plan.features:
        return evolve(plan, topics=(), single=(), batches=(), batchers=(), faults=(), disk=None)
    return _as_bank(plan) if BANK in plan.features else plan


def _draw_long(seed: int, random: Random, faults: Sequence[Fault] | None, features: tuple[str, ...]) -> Plan:
    disk = _draw_disk(seed, Random(f"disk {seed}").random() < DISK)
    kinds = [kind for kind in KINDS if kind not in _not_injected(disk)]
    options = FaultOptions(kinds=kinds, count=(0, 12), seconds=(0.05, 6.0))
    drawn = draw_faults(seed, options, NODES, LOOKUPDS)
    topics = (*TOPICS, *(topic for feature, topic in _TOPICS_OF.items() if feature in features))
    batches = ("plain", "lanes", "keyed", "ordered")
    return Plan(
        seed=seed,
        size="long",
        topics=topics,
        single=topics,
        batches=() if "batcher" in features else batches,
        batch=40,
        producers=2,
        seconds=7.0,
        rest=_SETTLED,
        pause=0.3,
        partitions=2,
        replicas=_draw_replicas(random, disk),
        guests=True,
        doomed=random.random() < 0.5,
        faults=drawn if faults is None else tuple(faults),
        latency=random.choice((0.0015, 0.0015, 0.02, 0.1)),
        disk=disk,
        habits=_draw_habits(seed),
        shared_lookup=Random(f"lookup {seed}").random() < SHARED_LOOKUP,
        features=features,
        batchers=batches if "batcher" in features else (),
    )


def _draw_short(seed: int, random: Random, faults: Sequence[Fault] | None, features: tuple[str, ...]) -> Plan:
    topics = _with_features(seed, tuple(random.sample(TOPICS, random.choice((1, 1, 1, 1, 2)))), features)
    single = tuple(topic for topic in topics if random.random() < 0.75)
    batches = tuple(topic for topic in topics if topic not in single or random.random() < 0.4)
    batchers = (batches or topics) if "batcher" in features else ()
    seconds = random.uniform(1.0, 3.0)
    partitions = random.choice((1, 2))
    disk = _draw_disk(seed, random.random() < DISK)
    options = FaultOptions(
        kinds=_draw_kinds(random, topics, disk),
        count=random.choice(((0, 1), (2, 5), (3, 6), (4, 9))),
        duration=0.9 * seconds,
        seconds=(0.05, random.choice((0.5, 2.0, 6.0))),
    )
    leaders = NODES[: partitions + ("letters" in features)]  # of the first topics, in the beginning
    drawn = draw_faults(seed, options, (*leaders, *leaders, *NODES), LOOKUPDS)
    return Plan(
        seed=seed,
        size="short",
        topics=topics,
        single=tuple(topic for topic in single if topic not in batchers),
        batches=() if batchers else batches,
        batch=random.choice((4, 12, 30)),
        producers=random.choice((1, 1, 2)),
        seconds=seconds,
        rest=_SETTLED if random.random() < 0.3 else random.uniform(0.5, 4.0),
        pause=random.choice((0.1, 0.2, 0.4)),
        partitions=partitions,
        replicas=_draw_replicas(random, disk),
        guests=random.random() < 0.2,
        doomed="plain" in topics and random.random() < 0.3,
        faults=drawn if faults is None else tuple(faults),
        latency=random.choice((0.0015, 0.0015, 0.02, 0.1)),
        disk=disk,
        habits=_draw_habits(seed),
        shared_lookup=Random(f"lookup {seed}").random() < SHARED_LOOKUP,
        come_and_go=Random(f"come and go {seed}").random() < 0.5,
        features=features,
        batchers=batchers,
    )


def _draw_features(seed: int) -> tuple[str, ...]:
    random = Random(f"features {seed}")
    features = random.sample(FEATURES, random.choice((0, 0, 0, 0, 1, 1, 2)))
    if random.random() < TRIPLES:
        features.append(TRIPLE)
    if Random(f"key tags {seed}").random() < KEY_TAGS_SHARE:
        features.append(KEY_TAGS)
        if Random(f"joins {seed}").random() < JOINS_SHARE:
            features.append(JOINS)
    features += [name for name, share in SHARES.items() if Random(f"{name} {seed}").random() < share]
    if Random(f"flow {seed}").random() < FLOW_SHARE:
        return (FLOW,)
    if Random(f"bank {seed}").random() < BANK_SHARE:
        return (BANK, *(feature for feature in features if feature == TRIPLE))
    return tuple(features)


def _with_features(seed: int, topics: tuple[str, ...], features: tuple[str, ...]) -> tuple[str, ...]:
    """Return topics on which features have an effect; the number of topics is the same."""
    wanted = [topic for feature, topic in _TOPICS_OF.items() if feature in features]
    if not wanted and set(features) & {"batches", "fetch"} and set(topics) <= {"lanes", "keyed"}:
        wanted = [Random(f"topics {seed}").choice(("plain", "ordered", "upgraded", "recreated"))]
    return tuple(dict.fromkeys((*wanted, *topics)))[: max(len(topics), len(wanted))]


def _draw_habits(seed: int) -> tuple[str, ...]:
    random = Random(f"habits {seed}")
    habits = random.sample(HABITS, random.choice((0, 0, 0, 1, 1, 2, 3)))
    over_http = Random(f"http side {seed}").random() < OVER_HTTP
    return (*habits, *["http"] * over_http)


def _with_joins(plan: Plan) -> Plan:
    """Leave only the topic whose keys are shared, and nothing that excuses two owners of a key."""
    return evolve(
        plan,
        topics=("keyed",),
        single=("keyed",),
        batches=(),
        batchers=(),
        seconds=_JOINS_SECONDS,
        guests=False,
        doomed=False,
        faults=(),
        habits=(),
        features=tuple(feature for feature in plan.features if feature not in SHARES),
    )


def _with_triple(plan: Plan) -> Plan:
    """Replace the first three faults by three of different kinds that last at the same time."""
    random = Random(f"triple {plan.seed}")
    useless = _not_injected(plan.disk) | {
        fault for fault, topic in _TOPICS_OF_FAULTS.items() if topic not in plan.topics
    }
    at = random.uniform(0.0, 0.9 * plan.seconds)
    faults = list(plan.faults[3:])
    for kind in random.sample([kind for kind in KINDS if kind not in useless], 3):
        target = random.choice(LOOKUPDS if kind.startswith("lookup") else NODES)
        begin, seconds = at + random.uniform(0.0, 0.2), random.uniform(0.25, 3.0)
        faults.append(Fault(kind, begin, seconds, target, random.random()))
    return evolve(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _with_late_flushes(plan: Plan) -> Plan:
    random = Random(f"flushes {plan.seed}")
    if random.random() >= LATE_FLUSHES:
        return plan
    faults = [
        Fault("hold_flush", random.uniform(0.0, 0.9) * plan.seconds, random.uniform(0.25, 3.0), name, random.random())
        for name in random.choices(NODES, k=random.randint(1, 4))
    ]
    return evolve(plan, faults=tuple(sorted((*plan.faults, *faults), key=lambda fault: fault.at)))


def _with_parted(plan: Plan) -> Plan:
    """Replace all faults by separations: long ones, short ones, or one at which the leader fails with its last records.

    A follower is dropped after the lease of 0.3 s.
    """
    random = Random(f"parted {plan.seed}")
    leader = random.choice(NODES[: plan.partitions])  # in the beginning
    at = random.uniform(0.2, 0.7) * plan.seconds
    to_each = [Fault("separate", at, plan.seconds - at, leader, chance) for chance in (0.25, 0.75)]
    faults = {
        "long": [evolve(to_each[0], kind=random.choice(("isolate", "separate")), target=random.choice(NODES))],
        "short": [evolve(fault, seconds=random.uniform(0.05, 0.25)) for fault in to_each],
        "last": [*to_each, evolve(to_each[0], kind=random.choice(("kill", "terminate")), at=at + 0.15)],
    }[random.choice(("long", "short", "last"))]
    if random.random() < _RETURNS:  # then the others store records where the one that returns may have its own
        faults = [evolve(fault, seconds=min(fault.seconds, 0.5 * (plan.seconds - at))) for fault in faults]
    disk = plan.disk if plan.disk is None or plan.disk.fsync == "always" else None
    return evolve(plan, faults=tuple(faults), replicas=random.choice((2, 3)), disk=disk)


def _as_bank(plan: Plan) -> Plan:
    """Leave out what a bank has not, and faults after which more is lost than a bank survives.

    A clock that jumps by an hour lets the leases of a dead relay end an hour later.
    """
    disk = plan.disk if plan.disk is not None and plan.disk.fsync == "always" else None
    useless = _not_injected(disk) | _TOPICS_OF_FAULTS.keys() | {"clock_jump"}
    return evolve(
        plan,
        topics=(),
        single=(),
        batches=(),
        batchers=(),
        guests=False,
        doomed=False,
        come_and_go=False,
        habits=(),
        disk=disk,
        faults=tuple(fault for fault in plan.faults if fault.kind not in useless),
        features=tuple(feature for feature in plan.features if feature in (BANK, TRIPLE)),
    )


def _draw_disk(seed: int, used: bool) -> DiskOptions | None:
    random = Random(f"files {seed}")
    options = DiskOptions(random.choice(FSYNC), random.choice(SYNC_INTERVALS), random.choice(FILES))
    return options if used else None


def _draw_replicas(random: Random, disk: DiskOptions | None) -> int:
    """Return the number of replicas; other copies would hide what an interval between syncs loses."""
    drawn = random.choice((1, 2, 2, 3))
    return 1 if disk is not None and disk.fsync == "interval" else drawn


def _not_injected(disk: DiskOptions | None) -> frozenset[str]:
    """Return the faults that need a disk, with a share of their own, or after which more is lost than checkers know."""
    without = {"always": frozenset[str](), "interval": frozenset({"disk_failing"}), "never": frozenset({"power"})}
    return (DISK_FAULTS if disk is None else without[disk.fsync]) | {"hold_flush"}


def _draw_kinds(random: Random, topics: Sequence[str], disk: DiskOptions | None) -> tuple[str, ...]:
    """Return a few kinds of faults that can happen together; one of them makes another node the leader."""
    useless = _TOPICS_OF_FAULTS.keys() | _not_injected(disk)
    kinds = random.sample([kind for kind in KINDS if kind not in useless], random.randint(1, 4))
    kinds.append(
        random.choice(("kill", "freeze", "isolate", "separate", "move", "terminate" if "power" in useless else "power"))
    )
    kinds += [fault for fault, topic in _TOPICS_OF_FAULTS.items() if topic in topics]
    return tuple(kinds)
