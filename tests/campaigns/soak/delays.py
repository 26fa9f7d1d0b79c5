"""Delayed messages under attack: ``python -m tests.campaigns.soak.delays --messages 10000``.

Two relays share a store. The first is killed at random lines, the second at random times on a slow link; each finds the
disk full now and then. Their clock is set back by hours, and ahead at the end, when the messages are due that were
delayed by an hour. Messages are cancelled and listed meanwhile through a store that is opened once more.
"""

from __future__ import annotations

import argparse
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import orjson
from attrs import asdict, define, field, frozen

from nsqext import App, Consumer, Message, Producer
from nsqext.app import relay as skeleton
from nsqext.broker import Cluster
from nsqext.delays import Cancellation, DelayRelay, DelayStore, relay
from nsqext.protocol.delay_record import DelayedMessage, decode_delay
from tests.campaigns.soak.__main__ import say
from tests.delays.kill_at_each_line import kill_at, lines
from tests.support.command_line import Process, environment
from tests.support.kept_connections import fill_disk, free_disk, kept_connections
from tests.support.programs import ROOT
from tests.support.tcp_relay import relaying

__all__ = ("Attack", "DelayResult", "attack")

GENERATIONS = ("redesigned", "original")
_TOPIC, _DELAYED = "orders", "delayed"
_HOUR = 3600.0
_RATE = 200_000
"""Bytes in a second that the second relay sends to a node over each connection."""
_DRAIN = 240.0
"""Seconds within which all messages are delivered when nothing disturbs the relays."""
_FULL = 0.5
"""Seconds for which a disk is full."""


@frozen
class Attack:
    """A run.

    Attributes:
        generation: of the embedded cluster.
        messages: number of delayed messages; a fifth is delayed by an hour.
        seconds: how long the relays are disturbed, and the longest of the other delays.
        seed: of times, lines and targets.
        margin: seconds beyond the timeout of a publish after which another relay takes what a killed relay has leased.
    """

    generation: str
    messages: int
    seconds: float
    seed: int
    margin: float = 5.0


@frozen
class _Role:
    """What a relay's process is given."""

    lookupd: list[str]
    folder: str
    address_map: dict[str, str]
    line: tuple[str, int] | None
    times: int
    full: bool
    margin: float


@define
class DelayResult:
    """What a run gave: numbers of messages and of events."""

    delivered: int = 0
    early: int = 0
    lost: int = 0
    after_cancel: int = 0
    twice: int = 0
    events: Counter[str] = field(factory=Counter)
    late: list[str] = field(factory=list)


# The process of a relay


async def _serve(role: _Role) -> None:
    folder = Path(role.folder)
    clock = os.open(folder / "clock", os.O_RDONLY)
    early = os.open(folder / "early", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    publish = relay.publish_record

    def now() -> float:
        return time.time() + float(os.pread(clock, 30, 0))

    async def checked(producer: Producer, data: bytes) -> None:
        record, _ = decode_delay(data)
        assert isinstance(record, DelayedMessage)
        if record.due / 1000 > now() + 0.002:  # the clock may have been set since the message was taken
            os.write(early, f"{record.identity}\n".encode())
        await publish(producer, data)

    relay.time = SimpleNamespace(time=now, monotonic=time.monotonic)  # type: ignore[assignment,attr-defined]
    relay.publish_record = checked
    skeleton.MARGIN = role.margin
    with kept_connections() as opened, DelayStore(folder / "store") as store:
        app = App(role.lookupd, timeout=2.0, msg_timeout=3.0, address_map=role.address_map or None)
        DelayRelay(store, topic=_DELAYED).attach(app)
        async with anyio.create_task_group() as tasks:
            if role.full:
                tasks.start_soon(_fill_disk, opened[0])
            if role.line is not None:
                kill_at((role.line[0], role.line[1]), role.times)
            await app.serve()


async def _fill_disk(connection: sqlite3.Connection) -> None:
    """Let the file of a store grow no longer for a while."""
    fill_disk(connection)
    await anyio.sleep(_FULL)
    free_disk(connection)


# The attack


class _Disaster:
    """Disturbs relays until `over`."""

    def __init__(self, given: Attack, cluster: Cluster, folder: Path, links: dict[str, str]) -> None:
        self._given = given
        self._lookupd = list(cluster.lookupd)
        self._folder = folder
        self._links = links
        self._chance = random.Random(given.seed)
        self._lines = lines()
        self.over = False
        self.ahead = float("inf")
        self.events: Counter[str] = Counter()
        self.cancelled: dict[str, Cancellation] = {}

    def set_clock(self, hours: float) -> None:
        """Set the clock of both relays."""
        if hours > 0:
            self.ahead = min(self.ahead, time.time())
        other = self._folder / "clock.new"
        other.write_text(f"{hours * _HOUR:+020.3f}")
        (self._folder / "clock").write_text(other.read_text())
        self.events["clock set"] += 1

    async def keep(self, second: bool) -> None:
        """Run a relay, and another one after each that is killed."""
        while True:
            disturbed = not self.over
            line = self._chance.choice(self._lines) if disturbed and not second else None
            role = _Role(
                self._lookupd,
                str(self._folder),
                self._links if second else {},
                line,
                self._chance.choice((1, 2, 5, 20)),
                disturbed and self._chance.random() < 0.3,
                self._given.margin,
            )
            self.events["full disk"] += role.full
            words = (__file__, orjson.dumps(asdict(role)).decode())
            with (self._folder / "log").open("ab") as log:
                process = Process(
                    words, environment(), ROOT, imports=("tests.delays.kill_at_each_line",), output=(log.fileno(),) * 2
                )
            try:
                limit = self._chance.uniform(0.5, 2.5) if disturbed else _DRAIN
                with anyio.move_on_after(limit) as scope:
                    await anyio.wait_readable(process)
                self.events["killed at a line" if not scope.cancelled_caught else "killed at a time"] += 1
            finally:
                process.kill()
                process.wait()

    async def set_clocks(self) -> None:
        """Set the clock back now and then, and ahead in the last part."""
        began = time.monotonic()
        while not self.over:
            await anyio.sleep(self._given.seconds / 12)
            late = time.monotonic() - began > 0.75 * self._given.seconds
            self.set_clock(self._chance.choice((0, 0, 2, 3) if late else (0, 0, -1, -5)))

    async def cancel(self, store: DelayStore, producer: Producer, names: list[str]) -> None:
        """Cancel messages, and list those that wait."""
        while not self.over:
            name = self._chance.choice(names)
            if self._chance.random() < 0.1:
                await producer.cancel_delayed(name)
                self.cancelled.setdefault(name, Cancellation.UNKNOWN)
                self.events["cancelled by a producer"] += 1
            else:
                found = await anyio.to_thread.run_sync(store.cancel, name)
                if self.cancelled.get(name) is not Cancellation.CANCELLED:
                    self.cancelled[name] = found
                self.events[f"cancel: {found.value}"] += 1
            await anyio.to_thread.run_sync(store.waiting, None, 100)
            self.events["listed"] += 1
            await anyio.sleep(self._given.seconds / max(1, len(names) // 20))


async def _attack(given: Attack, cluster: Cluster, folder: Path) -> DelayResult:
    names = [f"d{number}" for number in range(given.messages)]
    due: dict[str, float] = {}
    received: dict[str, list[float]] = {}
    consumer = Consumer(_TOPIC, "ch", cluster.lookupd, max_in_flight=500)

    @consumer.handler
    async def handle(message: Message) -> None:
        received.setdefault(message.body.decode(), []).append(time.time())

    async with AsyncExitStack() as stack:
        links = {
            node.tcp: (await stack.enter_async_context(relaying(node.tcp, rate=_RATE))).address
            for node in cluster.nodes.values()
        }
        disaster = _Disaster(given, cluster, folder, links)
        disaster.set_clock(0)
        store = stack.enter_context(DelayStore(folder / "store"))
        producer = await stack.enter_async_context(Producer(cluster.lookupd, delay_via="relay", delay_topic=_DELAYED))
        await stack.enter_async_context(consumer)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for second in (False, True):
            tasks.start_soon(disaster.keep, second)
        async with anyio.create_task_group() as working:
            working.start_soon(disaster.set_clocks)
            working.start_soon(disaster.cancel, store, producer, names)
            until = time.monotonic() + given.seconds
            chance = random.Random(given.seed + 1)

            async def publish(some: list[str]) -> None:
                for name in some:
                    delay = _HOUR if chance.random() < 0.2 else chance.uniform(0.1, given.seconds)
                    due[name] = time.time() + delay
                    await producer.publish(_TOPIC, name.encode(), delay=delay, identity=name)

            async with anyio.create_task_group() as publishing:
                for first in range(20):
                    publishing.start_soon(publish, names[first::20])
            await anyio.sleep(max(0.0, until - time.monotonic()))
            disaster.over = True
        disaster.set_clock(2)
        with anyio.move_on_after(_DRAIN):
            while set(names) - received.keys() - disaster.cancelled.keys() or store.count():  # noqa: ASYNC110
                await anyio.sleep(0.05)
        await anyio.sleep(0.2)
        tasks.cancel_scope.cancel()
    result = DelayResult(len(received), events=disaster.events)
    result.late = [name for name in names if name not in received and name not in disaster.cancelled]
    result.lost = len(result.late)
    result.early = len((folder / "early").read_text().split()) if (folder / "early").exists() else 0
    result.early += sum(times[0] < min(due[name], disaster.ahead) - 0.002 for name, times in received.items())
    result.twice = sum(len(times) > 1 for times in received.values())
    result.after_cancel = sum(
        name in received and found is Cancellation.CANCELLED for name, found in disaster.cancelled.items()
    )
    return result


def attack(given: Attack, folder: Path) -> DelayResult:
    """Run an attack; the folder gets the store and the log."""
    with Cluster(nodes=2, generation=given.generation) as cluster, DelayStore(folder / "store") as store:
        (folder / "clock").write_text(f"{0:+020.3f}")
        cluster.create_topic(_TOPIC, channels=["ch"])
        cluster.create_topic(_DELAYED, channels=DelayRelay(store, topic=_DELAYED).channels)
        return anyio.run(_attack, given, cluster, folder)


def main() -> int:
    """Attack the relays of each generation; 1 when a message was early, lost, or delivered after its cancellation."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak.delays", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--generation", action="append", choices=GENERATIONS, help="both by default")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="random without it")
    options = parser.parse_args()
    failed = False
    for generation in options.generation or GENERATIONS:
        folder = Path(tempfile.mkdtemp(prefix=f"delays-{generation}-"))
        found = attack(Attack(generation, options.messages, options.seconds, options.seed), folder)
        events = ", ".join(f"{name} {count}" for name, count in sorted(found.events.items()))
        say(
            f"{generation}, seed {options.seed}: {options.messages} delayed, {found.delivered} delivered, early "
            f"{found.early}, lost {found.lost}, delivered after a cancellation {found.after_cancel}, twice "
            f"{found.twice}; {events}"
        )
        if found.early or found.lost or found.after_cancel:
            failed = True
            say(f"  {found.late[:10]} {folder}")
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        given: dict[str, Any] = orjson.loads(sys.argv[1])
        anyio.run(_serve, _Role(**given))
    else:
        sys.exit(main())
