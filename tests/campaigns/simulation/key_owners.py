"""Consumers that share keys, while they are killed, stopped and cut off, and leaders are killed.

``python -m tests.campaigns.simulation.key_owners --messages 20000 --keys 500`` runs each fault with both ways to share
keys.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from math import inf

import anyio
from attrs import define, field

from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.testing.simulation import ClientProcess, Run, World, run_seed
from tests.campaigns.simulation.__main__ import quiet, text_of

__all__ = ("FAULTS", "KeyOwners", "run_key_owners")

FAULTS = ("none", "kill", "power", "stall", "cut", "leader")
"""What happens to consumers: their process is killed, with or without a sign; it neither reads nor writes for longer
than heartbeats allow; connections are cut; a leader is killed."""

_LOST_CONNECTIONS = ("cut", "leader")
"""Faults after which a handler still runs whose consumer has lost its keys: by the server's command, another consumer
may handle the message meanwhile."""

TAGS = 16
WORKERS = 3
LANES = 8
BATCH = 100
TURNS = 50_000_000
_HEARTBEAT = 1.0
_STALLED = 5.0


@define(eq=False)
class Handled:
    """One call of a handler.

    Attributes:
        worker: the consumer.
        key: of the message.
        number: of the message within its key.
        begin: when it began.
        end: when it ended, also by the death of its process; infinity while it runs.
        returned: it came to its end.
    """

    worker: int
    key: str
    number: int
    begin: float
    end: float = inf
    returned: bool = False


@define(eq=False)
class KeyOwners:
    """One run.

    Attributes:
        fault: one of `FAULTS`.
        by_tags: consumers share the keys by tags; otherwise the server's channel divides them.
        messages: number of messages.
        keys: number of keys.
        seconds: virtual seconds in which the messages are published.
        tags: number of tags, if keys are shared by tags.
        handled: every call of a handler.
    """

    fault: str
    by_tags: bool
    messages: int
    keys: int
    seconds: float = 60.0
    tags: int = TAGS
    handled: list[Handled] = field(factory=list, init=False)
    _workers: dict[int, ClientProcess] = field(factory=dict, init=False)

    async def run(self, world: World) -> None:
        """Publish everything while consumers handle it under faults, and check the calls."""
        await world.cluster.create_topic(
            *("orders", 2),
            replicas=3,
            extend=True,
            channels=["billing"],
            dispatch="" if self.by_tags else "key_failover",
        )
        for number in range(WORKERS):
            self._start(world, number)
        await anyio.sleep(4.0)  # until buckets have owners
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._disturb, world)
            await self._publish(world)
            tasks.cancel_scope.cancel()
        world.network.stalled.clear()
        for node in list(world.cluster.down):
            await world.cluster.restart(node)
        while len(self._done()) < self.messages:  # noqa: ASYNC110 - handlers run in many processes
            await anyio.sleep(1.0)
        for worker in list(self._workers):
            await self._kill(worker, world.now)
        for violation in self.violations():
            raise AssertionError(violation)

    def _start(self, world: World, number: int) -> None:
        self._workers[number] = world.start(partial(self._work, world, number))

    async def _kill(self, number: int, now: float, *, silently: bool = False) -> None:
        """Kill the process of a consumer; what its handlers do afterwards does not count."""
        process = self._workers.pop(number)
        for call in self.handled:
            if call.worker == number and call.end == inf:
                call.end = now
        await process.kill(silently=silently)

    async def _work(self, world: World, number: int) -> None:
        consumer = Consumer(
            *("orders", "billing"),
            lookupd=world.cluster.lookupd,
            dispatch="key_failover",
            key_tags=self.tags if self.by_tags else None,
            concurrency=LANES,
            max_in_flight=50 * LANES,
            heartbeat_interval=_HEARTBEAT,
            max_reconnect_wait=1.0,
        )

        @consumer.handler
        async def handle(message: Message) -> None:
            call = Handled(number, message.key or "", int(message.body), world.now)
            if number in self._workers:  # in a simulation, a killed process drains
                self.handled.append(call)
            try:
                await anyio.sleep(world.random.uniform(0.01, 0.08))
                call.returned = True
            finally:
                call.end = min(call.end, world.now)

        await consumer.serve()

    async def _publish(self, world: World) -> None:
        numbers: dict[str, int] = defaultdict(int)
        async with Producer(world.cluster.lookupd, key_tags=self.tags if self.by_tags else 0, timeout=60.0) as producer:
            for first in range(0, self.messages, BATCH):
                batch = []
                for message in range(first, min(first + BATCH, self.messages)):
                    key = f"k{message % self.keys}"
                    batch.append(OutgoingMessage(b"%d" % numbers[key], key=key))
                    numbers[key] += 1
                await producer.publish_many("orders", batch)
                await anyio.sleep(self.seconds * BATCH / self.messages)

    async def _disturb(self, world: World) -> None:
        """Do the fault every few seconds, each time to the next consumer or leader."""
        turn = 0
        while self.fault != "none":
            await anyio.sleep(world.random.uniform(1.0, 2.0))
            oldest = min(self._workers)
            turn += 1
            if self.fault in ("kill", "power"):
                await self._kill(oldest, world.now, silently=self.fault == "power")
                await anyio.sleep(1.0)
                self._start(world, WORKERS + turn)
                await anyio.sleep(4.0)
            elif self.fault == "stall":
                name = self._workers[turn % WORKERS].name
                world.network.stalled.add(name)
                await anyio.sleep(_STALLED)
                world.network.stalled.discard(name)
                await anyio.sleep(4.0)
            elif self.fault == "cut":
                node = world.cluster.leader("orders", turn % 2)
                for sock in world.network.connections(node):
                    if world.random.random() < 0.3:
                        world.network.cut(sock)
                await anyio.sleep(2.0)
            else:
                node = world.cluster.leader("orders", turn % 2)
                await world.cluster.kill(node)
                await anyio.sleep(2.0)
                await world.cluster.restart(node)
                await anyio.sleep(4.0)

    def _done(self) -> set[tuple[str, int]]:
        return {(call.key, call.number) for call in self.handled if call.returned}

    def violations(self) -> Iterator[str]:
        """Yield what breaks a guarantee: two consumers at once on a key, or a first call after that of a later one."""
        strict = self.by_tags or self.fault not in _LOST_CONNECTIONS
        by_key: dict[str, list[Handled]] = defaultdict(list)
        for call in self.handled:
            by_key[call.key].append(call)
        for key, calls in by_key.items():
            for before, after in pairwise(calls):
                if strict and before.worker != after.worker and after.begin < before.end:
                    yield f"{key} is at the consumers {before.worker} and {after.worker} at {after.begin:.3f} s"
            first = list(dict.fromkeys(call.number for call in calls))
            if first != sorted(first):
                yield f"{key} is handled in the order {first}"


def run_key_owners(owners: KeyOwners, seed: int) -> Run:
    """Run one fault with one seed."""
    return run_seed(owners.run, seed, (), time_limit=1200.0, most_turns=TURNS)


def main() -> int:
    """Run every fault with both ways, and print a table; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.simulation.key_owners", description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", choices=FAULTS, nargs="*", default=FAULTS)
    asked = parser.parse_args()
    quiet()
    found = 0
    for by_tags in (False, True):
        for fault in asked.fault:
            owners = KeyOwners(fault, by_tags, asked.messages, asked.keys)
            run = run_key_owners(owners, asked.seed)
            calls, way = len(owners.handled), "tags" if by_tags else "command"
            print(f"{way:8} {fault:7} {calls:7} calls {run.seconds:8.1f} virtual s  {text_of(run.error) or 'ok'}")  # noqa: T201
            found += run.error is not None
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
