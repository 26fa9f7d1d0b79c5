"""One round: a cluster, processes of clients, the faults of a seed, and the judgement of the history."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING

import anyio
import orjson
from attrs import asdict, define, field, frozen

from nsqext import Admin, NsqError
from nsqext.testing.simulation import Fault
from tests.campaigns.simulation.checkers import judge
from tests.campaigns.simulation.history import Channel
from tests.campaigns.soak.client_process import CONCURRENCY, CONSUMERS, Settings
from tests.campaigns.soak.clusters import TOPICS
from tests.campaigns.soak.records import Record, SoakHistory
from tests.support.command_line import Process, environment
from tests.support.machine_pauses import PauseWatch
from tests.support.programs import ROOT

if TYPE_CHECKING:
    from tests.campaigns.soak.clusters import End, SoakCluster

__all__ = ("ALL", "KEYED", "ORIGINAL", "Plan", "RoundResult", "Soak", "create_topics", "delete_topics", "make_plan")

logger: logging.Logger = logging.getLogger("tests.campaigns.soak")

PARTITIONS = 2
DRAIN = 150.0
"""Seconds after the last publish within which everything has to be handled."""
_CALM = 1.0
"""Seconds of publishing before the first fault, in which no message may be delivered twice."""
_NODES = ("n1", "n2", "n3")
_CLIENT_FAULTS = ("client_kill", "client_stop", "client_cut", "client_cut")
_PHASE = 90.0
_CLIENT = ROOT / "tests" / "campaigns" / "soak" / "client_process.py"


@frozen
class Plan:
    """What is drawn from a seed.

    Attributes:
        seed: the seed.
        faults: by their begin.
        replicas: copies of each partition.
        on_unknown: setting of the producers.
        timeout: of publishes, in seconds.
        request_timeout: of requests.
        backends: of the client processes, in turns.
    """

    seed: int
    faults: tuple[Fault, ...]
    replicas: int
    on_unknown: str
    timeout: float
    request_timeout: float
    backends: tuple[str, ...]


def make_plan(
    seed: int, kinds: Sequence[str], seconds: float, every: float, shortest: float, clients: Sequence[str]
) -> Plan:
    """Return the plan of a seed.

    Args:
        seed: the seed.
        kinds: faults of the cluster.
        seconds: how long faults begin.
        every: seconds between two faults on average.
        shortest: seconds of the shortest fault of a node.
        clients: names of the processes that may be killed.
    """
    chance = random.Random(seed)
    backends = tuple(chance.sample(("asyncio", "asyncio+uvloop", "trio"), 3))
    replicas, on_unknown = chance.choice((1, 2, 3, 3)), chance.choice(("retry", "retry", "raise"))
    timeout, request_timeout = chance.choice((10.0, 30.0)), chance.choice((1.0, 3.0, 10.0))
    faults: list[Fault] = []
    at = chance.uniform(0.0, every)
    while at < seconds:
        kind = chance.choice((*kinds, *_CLIENT_FAULTS))
        target = chance.choice(clients if kind.startswith("client") else _NODES)
        length = chance.choice((0.1, 0.5, 2.0, 6.0)) * chance.random()
        length += 0.1 if kind.startswith("client") else shortest
        faults.append(Fault(kind, at, length, target, chance.random()))
        at += chance.uniform(0.5, 1.5) * every
    return Plan(seed, tuple(faults), replicas, on_unknown, timeout, request_timeout, backends)


ALL: dict[str, tuple[list[str], list[str]]] = {
    "steady": ([], ["lanes", "ordered"]),
    "plain": (["plain/each", "plain/many", "tagged/each"], []),
    "keys": (["lanes/each", "lanes/batcher", "keyed/many", "ordered/each"], []),
    "more keys": (["keyed/each", "keyed/batcher", "lanes/many", "ordered/batcher"], []),
    "first": ([], ["handlers", "batches", "key_failover", "key_failover", "tag", "no tag", "guest key_failover"]),
    "second": ([], ["handlers", "key_failover", "no tag", "ordered", "guest handlers", "guest key_failover"]),
}
"""Publishers and consumers of each client process; the first is never killed: lanes promise order to one process."""

KEYED: dict[str, tuple[list[str], list[str]]] = {
    "steady": ([], ["key_failover"]),
    "plain": (["keyed/each", "keyed/many"], []),
    "keys": (["keyed/each", "keyed/batcher"], []),
    "more keys": (["keyed/each", "keyed/many"], []),
    "first": ([], ["key_failover", "key_failover", "key_failover"]),
    "second": ([], ["key_failover", "key_failover", "guest key_failover"]),
}
"""Nothing but channels of type key_failover: six producers and six consumers."""

ORIGINAL: dict[str, tuple[list[str], list[str]]] = {
    "steady": ([], ["handlers"]),
    "plain": (["plain/each", "plain/many"], []),
    "more": (["plain/each", "plain/batcher"], []),
    "first": ([], ["handlers", "batches", "guest handlers"]),
    "second": ([], ["handlers", "batches", "guest batches"]),
}
"""Without what the original NSQ has not: order, keys, tags."""


@define(eq=False)
class ClientHandle:
    """A client process, and its record.

    Attributes:
        role: its name in the plan.
        process: the process.
        record: its record.
        stopped: it was stopped by SIGSTOP.
    """

    role: str
    process: Process
    record: Record
    stopped: bool = False

    def order(self, text: str) -> None:
        """Send it an order; a process that has ended gets none."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            logger.debug("%s has ended", self.role)

    def kill(self) -> None:
        """Kill it, and read the rest of its record."""
        with self.process:  # leaving it kills the process, also a stopped one
            pass
        self.record.process_died(time.monotonic())


@define
class RoundResult:
    """What a round gave.

    Attributes:
        history: its history.
        violations: what the checkers found.
        faults: number of faults by kind.
        seconds: how long it took.
    """

    history: SoakHistory
    violations: list[str]
    faults: Counter[str]
    seconds: float


@define
class Soak:
    """One round on a cluster that runs.

    Attributes:
        cluster: the cluster.
        plan: the plan.
        folder: for records and logs.
        roles: publishers and consumers of each process.
        seconds: how long faults begin.
        settle: seconds between the last fault and the last publishes.
        topics: name of each kind of topic, which exist.
        pause: longest pause between two publishes of a task.
    """

    cluster: SoakCluster
    plan: Plan
    folder: Path
    roles: dict[str, tuple[list[str], list[str]]]
    seconds: float
    settle: float
    topics: dict[str, str]
    pause: float = 0.1
    history: SoakHistory = field(init=False)
    _clients: dict[str, ClientHandle] = field(factory=dict)
    _started: int = 0

    def __attrs_post_init__(self) -> None:
        plan = self.plan
        self.history = SoakHistory(plan.on_unknown, timeout=plan.timeout, settle=self.settle)  # type: ignore[arg-type]
        kinds = {CONSUMERS[kind.removeprefix("guest ")][:2] for _, consume in self.roles.values() for kind in consume}
        for topic, channel in sorted(kinds):
            if topic in self.topics:
                order = {"lanes": "key", "keyed": "key", "ordered": "partition"}.get(topic, "")
                self.history.channels.append(Channel(topic, channel, order))  # type: ignore[arg-type]

    def run(self) -> RoundResult:
        """Run the round."""
        began, done = time.monotonic(), Counter[str]()
        with PauseWatch() as pauses:
            try:
                for role in self.roles:
                    self._start_client(role)
                self._wait_for("ready")
                time.sleep(_CALM)
                self._inject(done)
                self._order("stop")
                self._wait_for("stopped")
                time.sleep(max(0.0, (self.history.healed or 0.0) + self.settle + 1.0 - time.monotonic()))
                self._order("last")
                self._wait_for("published")
                self._drain()
                self._order("close")
                self._wait_for("closed")
            finally:
                self._kill_all()
        history = self.history
        history.paused += pauses.total
        history.kills = [*self.cluster.losses]
        for moment, node in history.kills:
            history.forget_unfinished(moment, node)
        for delivery in history.deliveries:
            history.concurrency[delivery.consumer] = CONCURRENCY[delivery.consumer.rpartition(" ")[0]]
        history.publishes.sort(key=lambda publish: publish.begin)
        history.deliveries.sort(key=lambda delivery: delivery.begin)
        violations = judge(history) + [f"observed: {text}" for text in history.observed]
        return RoundResult(history, violations, done, time.monotonic() - began)

    # --- faults ---------------------------------------------------------------------------------------------------

    def _inject(self, done: Counter[str]) -> None:
        """Begin and end the faults of the plan, then repair everything."""
        began = time.monotonic()
        open_ends: list[tuple[float, float, End]] = []
        for fault in self.plan.faults:
            self._end_faults(open_ends, began + fault.at)
            logger.info("%6.2f s  %s", time.monotonic() - began, fault)
            done[fault.kind] += 1
            begin = time.monotonic()
            end = self._client_fault(fault) if fault.kind.startswith("client") else self._cluster_fault(fault)
            open_ends.append((begin + fault.seconds, begin, end))
        # the last ones last as long as the others: a node that starts again too early loses messages on a real cluster
        self._end_faults(open_ends, max([began + self.seconds, *(due for due, _, _ in open_ends)]))
        self.history.healed = time.monotonic()

    def _cluster_fault(self, fault: Fault) -> End:
        began = time.monotonic()
        end = self.cluster.begin(fault, list(self.topics.values()))
        if fault.kind == "cluster_stop":
            self.history.paused += time.monotonic() - began
        return end

    def _end_faults(self, ends: list[tuple[float, float, End]], until: float) -> None:
        """Wait until a moment, and end the faults that are due before."""
        while True:
            ends.sort(key=lambda entry: entry[0])
            if not ends or ends[0][0] > until:
                break
            due, begin, end = ends.pop(0)
            time.sleep(max(0.0, due - time.monotonic()))
            end()
            self.history.disturbances.append((begin, time.monotonic()))
        self._read()
        time.sleep(max(0.0, until - time.monotonic()))

    def _client_fault(self, fault: Fault) -> End:
        client = self._clients.get(fault.target)
        if client is None or client.stopped:
            return lambda: None
        if fault.kind == "client_cut":
            client.order(f"cut {0.2 + 0.8 * fault.chance}")
            return lambda: None
        if fault.kind == "client_stop":
            return self._stop_client(client)
        if fault.target == next(iter(self.roles)):
            return lambda: None
        self._clients.pop(client.role).kill()
        return lambda: self._start_client(client.role)

    def _stop_client(self, client: ClientHandle) -> End:
        os.kill(client.process.pid, signal.SIGSTOP)
        client.stopped, began = True, time.monotonic()

        def end() -> None:
            os.kill(client.process.pid, signal.SIGCONT)
            client.stopped = False
            self.history.paused += time.monotonic() - began

        return end

    # --- clients --------------------------------------------------------------------------------------------------

    def _start_client(self, role: str) -> None:
        publish, consume = self.roles[role]
        self._started += 1
        name = f"{role.replace(' ', '-')}.{self._started}"
        plan, topics = self.plan, self.topics
        path = self.folder / f"{name}.jsonl"
        settings = Settings(
            name,
            f"r{plan.seed}",
            str(plan.seed),
            self.cluster.lookupd,
            topics,
            str(path),
            plan.backends[self._started % len(plan.backends)],
            [kind for kind in publish if kind.split("/")[0] in topics],
            [kind for kind in consume if CONSUMERS[kind.removeprefix("guest ")][0] in topics],
            self.pause,
            plan.timeout,
            plan.request_timeout,
            plan.on_unknown,  # type: ignore[arg-type]
            self.cluster.traced,
        )
        words = (str(_CLIENT), orjson.dumps(asdict(settings)).decode())
        process = Process(words, environment(), ROOT, joined=True)
        Thread(target=_copy, args=(process.stdout, path.with_suffix(".err")), daemon=True).start()
        self._clients[role] = ClientHandle(role, process, Record(path, self.history))

    def _read(self) -> None:
        for client in self._clients.values():
            client.record.read()
            if client.process.poll() not in (None, 0):
                errors = client.record.path.with_suffix(".err").read_text()[-2000:]
                raise RuntimeError(f"client process {client.role} ended with {client.process.returncode}: {errors}")

    def _order(self, text: str) -> None:
        for client in self._clients.values():
            client.order(text)

    def _wait_for(self, phase: str) -> None:
        deadline = time.monotonic() + _PHASE + self.plan.timeout + self.history.paused
        while True:
            self._read()
            late = [client.role for client in self._clients.values() if phase not in client.record.phases]
            if not late:
                return
            if time.monotonic() > deadline:
                self.history.observed.append(f"{', '.join(late)}: not {phase} after {_PHASE:g} s")
                return
            time.sleep(0.05)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN
        while self.history.missing() and time.monotonic() < deadline:
            time.sleep(0.3)
            self._read()
        time.sleep(1.0)  # what is delivered again is delivered now

    def _kill_all(self) -> None:
        for client in self._clients.values():
            client.kill()


def _copy(source: IO[bytes], file: Path) -> None:
    """Write what a process prints to a file, until it ends."""
    file.write_bytes(source.read())


async def create_topics(lookupd: list[str], replicas: int, names: dict[str, str]) -> None:
    """Create the topics of a round with their channels."""
    async with Admin(lookupd) as admin, anyio.create_task_group() as tasks:
        for kind, name in names.items():
            channels = sorted({channel for topic, channel, _ in CONSUMERS.values() if topic == kind})
            flags = TOPICS[kind]

            async def create(name: str = name, flags: dict[str, bool] = flags, channels: list[str] = channels) -> None:
                multipart = not flags.get("ordered") and PARTITIONS * replicas > len(_NODES)
                await admin.create_topic(
                    name,
                    partitions=PARTITIONS,
                    replicas=replicas,
                    extend=flags.get("extend", False),
                    ordered=flags.get("ordered", False),
                    multipart=multipart,
                    channels=channels,
                    wait=180.0,
                )

            tasks.start_soon(create)


async def delete_topics(lookupd: list[str], names: dict[str, str]) -> None:
    """Delete the topics; one that cannot be deleted stays."""
    async with Admin(lookupd) as admin:
        for name in names.values():
            try:
                await admin.delete_topic(name)
            except NsqError as error:
                logger.warning("topic %s stays: %s", name, error)
