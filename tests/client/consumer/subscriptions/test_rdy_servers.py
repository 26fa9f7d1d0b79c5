"""Distribution of max_in_flight over servers that read commands late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import ceil
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import SETTLED, TURN, RdyDistributor


class Servers:
    """Servers that read commands late, with messages for all connections, and handlers that take some time.

    Attributes:
        waited: the longest time without a message of a connection that has some.
    """

    def __init__(self, flow: RdyDistributor[int], chance: Random, busy: set[int], handling: float) -> None:
        self.flow = flow
        self.chance = chance
        self.busy = busy
        self.handling = handling
        self.now = 0.0
        self.ready: Counter[int] = Counter()
        self.in_flight: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.read_at: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.sent: dict[int, int] = {}
        self.waited = 0.0

    def at(self, when: float, act: Callable[[], None]) -> None:
        self.number += 1
        heappush(self.events, (when, self.number, act))

    def send(self, key: int, act: Callable[[], None]) -> None:
        """Let a server read a command, in order, after less than `SETTLED`."""
        due = max(self.read_at.get(key, 0.0), self.now + self.chance.random() * SETTLED * 0.99)
        self.read_at[key] = due
        self.at(due, act)

    def rebalance(self) -> None:
        for key, share in self.flow.shares(self.now, self.received).items():
            if self.sent.get(key) != share:
                self.sent[key] = share
                self.send(key, partial(self.set_ready, key, share))

    def set_ready(self, key: int, share: int) -> None:
        self.ready[key] = share
        self.pump(key)

    def pump(self, key: int) -> None:
        while key in self.busy and self.in_flight[key] < self.ready[key]:
            self.in_flight[key] += 1
            self.waited = max(self.waited, self.now - self.last.get(key, 0.0))
            self.last[key] = self.now
            self.at(self.now + self.chance.random() * 0.01, partial(self.receive, key))

    def receive(self, key: int) -> None:
        self.received[key] += 1
        if self.flow.received(key, 1, 1, self.received[key], self.now):
            self.rebalance()
        self.flow.fit(self.in_flight.__getitem__)
        self.at(self.now + self.chance.random() * self.handling, partial(self.answer, key))

    def answer(self, key: int) -> None:
        self.received[key] -= 1
        self.send(key, partial(self.finish, key))

    def finish(self, key: int) -> None:
        self.in_flight[key] -= 1
        self.pump(key)

    def run(self, seconds: float, check: Callable[[], None]) -> None:
        """Run for some seconds, with a tick each quarter of a second."""
        end = self.now + seconds
        for tick in range(int(seconds * 4)):
            self.at(self.now + tick / 4, self.rebalance)
        while self.events and self.events[0][0] < end:
            self.now, _, act = heappop(self.events)
            act()
            check()
        self.now = end


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 20), st.sampled_from([0.001, 0.5, 20.0]))
def test_the_messages_in_flight_by_the_count_of_the_servers_are_never_more(
    seed: int, total: int, count: int, handling: float
) -> None:
    chance, backoff = Random(seed), Backoff(BackoffOptions())
    flow = RdyDistributor[int](total, backoff)
    servers = Servers(flow, chance, set(), handling)

    allowed, lowered_at = total, 0.0

    def check() -> None:
        nonlocal allowed
        in_flight = sum(servers.in_flight.values())
        if servers.now > lowered_at + 3 * SETTLED:
            allowed = max(flow.max_in_flight, min(allowed, in_flight))
        assert in_flight <= allowed

    for number in range(count):
        flow.add(number, 2500, backoff, servers.now)
        servers.busy.add(number)
        servers.rebalance()
        if chance.random() < 0.3:
            servers.run(2.0, check)
    for _ in range(6):
        chosen = chance.randrange(count)
        what = chance.choice(["pause", "busy", "backoff", "retire", "change"])
        if what == "pause":
            flow.pause(chosen, paused=chance.random() < 0.5)
        elif what == "busy":
            servers.busy ^= {chosen}
        elif what == "change":
            flow.max_in_flight, lowered_at = chance.randint(1, total), servers.now
            allowed = max(allowed, flow.max_in_flight)
        elif what == "retire" and chance.random() < 0.2:
            flow.retire(chosen)
        else:
            backoff.failed(servers.now)
        servers.rebalance()
        servers.run(chance.random() * 8, check)
        backoff.tick(servers.now)
        if chance.random() < 0.5:
            backoff.level, backoff.until = 0, 0.0


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 12), st.sampled_from([0.01, 1.0, 8.0]))
def test_no_connection_with_messages_starves(seed: int, total: int, count: int, handling: float) -> None:
    backoff = Backoff(BackoffOptions())
    flow = RdyDistributor[int](total, backoff)
    servers = Servers(flow, Random(seed), set(range(0, count, 2)) | {count - 1}, handling)
    for number in range(count):
        flow.add(number, 2500, backoff, 0.0)
    bound = ceil(count / total) * (TURN + handling + 4 * SETTLED)
    servers.run(3 * bound, lambda: None)
    assert servers.last.keys() == servers.busy
    assert servers.waited <= bound
    assert min(servers.last.values()) >= 2 * bound
