"""Keys over tags while consumers are killed, stopped, and cut off: one owner of a key at a time, first in order."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import pytest
from anyio.to_thread import run_sync

from nsqext import Admin, OutgoingMessage, Producer
from tests.support import key_tags_worker
from tests.support.cluster import PARTITIONS, REAL
from tests.support.command_line import Process, environment
from tests.support.consumers import eventually
from tests.support.tcp_relay import relaying

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import ClusterUnderTest, Killable
    from tests.support.tcp_relay import Relay

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

TAGS = 8
MESSAGES = 20_000 if REAL else 2_000
KEYS = 500
BATCH = 100 if REAL else 50
PAUSE = 2.5 if REAL else 0.8
"""Mean seconds between two cuts: a consumer has its buckets again after one or two."""
HEARTBEATS = 12.0
"""Seconds for which a process is stopped: longer than its heartbeats and its message timeout allow."""


@pytest.fixture
def anyio_backend() -> str:
    """The consumers are processes of their own; the event loop of the test only publishes."""
    return "asyncio"


class Handled(NamedTuple):
    """One call of a handler."""

    worker: int
    key: str
    number: int
    begin: float
    end: float
    """Infinity if it did not end."""


class Workers:
    """Processes that consume a channel."""

    def __init__(self, lookupd: list[str], topic: str, channel: str, folder: Path) -> None:
        self.words = (key_tags_worker.__file__, ",".join(map(str, lookupd)), topic, channel, str(TAGS))
        self.folder = folder
        self.processes: list[Process] = []

    def start(self, relays: dict[str, Relay] | None = None) -> None:
        """Start another process, which connects to nodes through relays."""
        path = self.folder / f"worker-{len(self.processes)}"
        path.touch()
        through = [f"{node}={relay.address}" for node, relay in (relays or {}).items()]
        words = (*self.words, str(path), *through)
        self.processes.append(Process(words, environment(), imports=(key_tags_worker.__name__,), output=(2, 2)))

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def handled(self) -> list[Handled]:
        """Return the calls of all handlers so far, by their begin."""
        found = []
        for worker in range(len(self.processes)):
            begun: dict[tuple[str, int], float] = {}
            for line in (self.folder / f"worker-{worker}").read_text().splitlines():
                kind, key, number, at = line.split()
                if kind == "begin":
                    begun[key, int(number)] = float(at)
                else:
                    found.append(Handled(worker, key, int(number), begun.pop((key, int(number))), float(at)))
            found += [Handled(worker, key, number, at, float("inf")) for (key, number), at in begun.items()]
        return sorted(found, key=lambda one: one.begin)

    def finished(self) -> set[int]:
        """Return the numbers of the messages whose handlers returned."""
        return {one.number for one in self.handled() if one.end < float("inf")}

    def have_finished(self, count: int) -> bool:
        """Return whether handlers of a number of messages returned."""
        files = [self.folder / f"worker-{worker}" for worker in range(len(self.processes))]
        if sum(file.read_bytes().count(b"end ") for file in files) < count:
            return False
        return len(self.finished()) == count


@pytest.fixture
def workers(cluster_under_test: ClusterUnderTest, channel: str, tmp_path: Path) -> Iterator[Workers]:
    """Processes that tests start."""
    found = Workers(cluster_under_test.lookupd, cluster_under_test.extend, channel, tmp_path)
    try:
        yield found
    finally:
        found.end()


@pytest.mark.parametrize("fault", ["none", "kill", "stop"])
async def test_keys_keep_their_order_while_a_consumer_is_lost(
    cluster_under_test: ClusterUnderTest, channel: str, workers: Workers, fault: str
) -> None:
    topic = cluster_under_test.extend
    await cluster_under_test.make_named_channel(topic, channel)
    for _ in range(3):
        workers.start()
    numbers: dict[str, list[int]] = defaultdict(list)
    stopped: list[float] = []
    async with Producer(cluster_under_test.lookupd, key_tags=TAGS) as producer:
        begin = 0
        while {one.worker for one in workers.handled()} != {0, 1, 2}:  # until each of them has buckets
            await producer.publish_many(topic, drafts(begin, numbers))
            begin += BATCH
            await anyio.sleep(0.5)
        for first in range(begin, begin + MESSAGES, BATCH):
            await producer.publish_many(topic, drafts(first, numbers))
            await anyio.sleep(0.1)
            if first == begin + MESSAGES // 4 and fault == "kill":
                workers.processes[0].kill()
                workers.start()
            if first == begin + MESSAGES // 4 and fault == "stop":
                stopped.append(anyio.current_time())
                workers.processes[0].send_signal(signal.SIGSTOP)
            if stopped and len(stopped) == 1 and anyio.current_time() - stopped[0] > HEARTBEATS:
                workers.processes[0].send_signal(signal.SIGCONT)
                stopped.append(anyio.current_time())
        if len(stopped) == 1:
            await anyio.sleep(HEARTBEATS)
            workers.processes[0].send_signal(signal.SIGCONT)
    handled = await all_handled(workers, numbers)
    assert two_at_once(handled, stopped[0] if stopped else float("inf")) == []
    used = {one.worker for one in handled}
    assert used >= {1, 2}
    assert len(handled) - sum(map(len, numbers.values())) < 3 * 200 * (fault != "none") + 1


async def test_keys_keep_their_order_while_connections_are_cut(
    cluster_under_test: ClusterUnderTest, channel: str, workers: Workers
) -> None:
    """A relay before each node closes a third of all connections, again and again, at random times."""
    topic = cluster_under_test.extend
    await cluster_under_test.make_named_channel(topic, channel)
    numbers: dict[str, list[int]] = defaultdict(list)
    chance = random.Random(11)
    cuts = 0
    async with AsyncExitStack() as stack, Producer(cluster_under_test.lookupd, key_tags=TAGS) as producer:
        relays = {node.tcp: await stack.enter_async_context(relaying(node.tcp)) for node in cluster_under_test.nodes}
        for _ in range(3):
            workers.start(relays)
        shared = PARTITIONS * (3 + TAGS)  # each consumer is a member of each partition, and each bucket has an owner
        await eventually(lambda: sum(relay.connections for relay in relays.values()) >= shared, patience=150.0)
        due = anyio.current_time() + PAUSE
        for first in range(0, MESSAGES, BATCH):
            await producer.publish_many(topic, drafts(first, numbers))
            if anyio.current_time() >= due:  # while they are in flight
                due = anyio.current_time() + chance.uniform(0.5, 1.5) * PAUSE
                cuts += 1
                for relay in relays.values():
                    relay.cut(lambda: chance.random() < 0.33)
            await anyio.sleep(0.1)
        handled = await all_handled(workers, numbers)
    assert cuts > 2
    assert two_at_once(handled, float("inf")) == []
    assert {one.worker for one in handled} == {0, 1, 2}
    assert sum(relay.connections for relay in relays.values()) > shared + cuts
    assert len(handled) < MESSAGES + cuts * 3 * 200


@pytest.mark.parametrize("killable", [True], indirect=True, ids=["extend"])
async def test_keys_keep_their_order_while_the_leader_is_killed(
    killable: Killable, channel: str, tmp_path: Path
) -> None:
    topic, lookupd = killable.topic, killable.lookupd
    async with Admin(lookupd) as admin:
        await admin.create_channel(topic, channel)
    workers = Workers(lookupd, topic, channel, tmp_path)
    numbers: dict[str, list[int]] = defaultdict(list)
    try:
        for _ in range(3):
            workers.start()
        async with Producer(lookupd, key_tags=TAGS, timeout=90.0) as producer:
            for first in range(0, MESSAGES, BATCH):
                await producer.publish_many(topic, drafts(first, numbers))
                await anyio.sleep(0.1)
                if first == MESSAGES // 4:
                    # until a first message is finished, a real server tells no follower about the channel
                    await eventually(lambda: workers.finished() >= set(range(BATCH)), patience=150.0)
                    numbers["key-0"].append(MESSAGES)
                    receipt = await producer.publish(topic, b"%d" % MESSAGES, key="key-0")
                    await run_sync(killable.kill, receipt.node)
            handled = await all_handled(workers, numbers)
    finally:
        workers.end()
    assert two_at_once(handled, float("inf")) == []
    assert {one.worker for one in handled} == {0, 1, 2}
    # those in flight, and, at a real server, those whose end the followers did not know yet
    assert len(handled) - MESSAGES < 2 * 3 * 200


def drafts(first: int, numbers: dict[str, list[int]]) -> list[OutgoingMessage]:
    """Return a batch of messages whose bodies are their numbers, and note the numbers of each key."""
    made = []
    for number in range(first, first + BATCH):
        key = f"key-{number * 7919 % KEYS}"
        numbers[key].append(number)
        made.append(OutgoingMessage(b"%d" % number, key=key))
    return made


async def all_handled(workers: Workers, numbers: dict[str, list[int]]) -> list[Handled]:
    """Wait until every message was handled, check that each key was first handled in order, and return the calls."""
    count = sum(map(len, numbers.values()))
    await eventually(lambda: workers.have_finished(count), patience=400.0)
    handled = workers.handled()
    begun: dict[str, dict[int, None]] = defaultdict(dict)
    for one in handled:
        begun[one.key].setdefault(one.number)
    assert {key: list(found) for key, found in begun.items()} == numbers
    return handled


def two_at_once(handled: list[Handled], stopped: float) -> list[tuple[Handled, Handled]]:
    """Return calls for one key that ran at the same time in two processes.

    A handler that ran when its process was killed or stopped is not counted: no server can end it.
    """
    found = []
    last: dict[str, Handled] = {}
    for one in handled:
        other = last.get(one.key)
        lost = other is not None and (
            other.end == float("inf") or (other.worker == 0 and other.begin <= stopped < other.end)
        )
        if other is not None and other.worker != one.worker and one.begin < other.end and not lost:
            found.append((other, one))
        if other is None or one.end >= other.end or lost:
            last[one.key] = one
    return found


def test_two_calls_for_a_key_at_once_are_found() -> None:
    first, second = Handled(0, "a", 1, 0.0, 2.0), Handled(1, "a", 2, 1.0, 3.0)
    never = float("inf")
    assert two_at_once([first, second], never) == [(first, second)]
    for other in (Handled(0, "a", 2, 1.0, 3.0), Handled(1, "b", 2, 1.0, 3.0), Handled(1, "a", 2, 2.0, 3.0)):
        assert two_at_once([first, other], never) == []
    assert two_at_once([Handled(0, "a", 1, 0.0, never), second], never) == [], "its process was killed"
    assert two_at_once([first, second], 0.5) == [], "its process was stopped"
