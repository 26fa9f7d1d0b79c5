"""Random schedules of a key_failover channel: consumers join, leave, and are lost with messages in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from nsqext.broker.engine.channel.key_failover import KeyFailoverChannel
from nsqext.broker.engine.options import ChannelKind, ChannelRules
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.messages import EXT_JSON, KEY_HEADER, TAG_HEADER
from tests.support.engine_partition import Bench, Consumer

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

REPLAY = 6
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)  # hypothesis's explain phase takes longer than a test may
KEYS = st.sampled_from(["ann", "bob", "cid", "dee", "eve", "fay"])
READY = st.integers(0, 4)
CONSUMERS: Bundle[Watched] = Bundle("consumers")


class Watched(Consumer):
    """A consumer that reports received messages; an eager one finishes them immediately."""

    def __init__(self, machine: Schedule, number: int, **options: Any) -> None:
        super().__init__(number, extend=True, msg_timeout=10.0, **options)
        self.machine = machine
        self.held: dict[int, str] = {}  # internal id -> key
        self.eager = False

    def deliver(self, message: RawMessage) -> None:
        """Check and keep a message."""
        assert len(self.held) < self.ready, "more in flight than RDY"
        key = orjson.loads(message.header)[KEY_HEADER]
        self.held[message.internal_id] = key
        self.machine.delivered(self, key, message.internal_id)
        if self.eager:
            self.machine.finish(self, message.internal_id)


class Schedule(RuleBasedStateMachine):
    """One channel, its publishers, its consumers, and the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(extend=True, rules=ChannelRules(replay_limit=REPLAY))
        channel = self.bench.partition.channel("ch", ChannelKind("key_failover", fixed=True))
        assert isinstance(channel, KeyFailoverChannel)
        self.channel = channel
        self.members: dict[int, Watched] = {}
        self.published: dict[str, list[int]] = {}
        self.first: dict[str, list[int]] = {}
        self.finished: set[int] = set()
        self.numbers = 0

    # invariants of deliveries

    def delivered(self, consumer: Watched, key: str, internal_id: int) -> None:
        """Check the invariants of a delivery."""
        assert internal_id not in self.finished, "finished and delivered again"
        for other in self.members.values():
            assert other is consumer or key not in other.held.values(), "two consumers hold a key"
        first = self.first.setdefault(key, [])
        if internal_id not in first:
            first.append(internal_id)

    def finish(self, consumer: Watched, internal_id: int) -> None:
        """Finish a message."""
        del consumer.held[internal_id]
        self.finished.add(internal_id)
        self.channel.finish(consumer, internal_id)

    # rules

    @rule(keys=st.lists(st.tuples(KEYS, st.sampled_from(["", "", "", "red"])), min_size=1, max_size=5))
    def publish(self, keys: list[tuple[str, str]]) -> None:
        headers = [{KEY_HEADER: key} | ({TAG_HEADER: tag} if tag else {}) for key, tag in keys]
        stored = self.bench.publish(
            *(NewMessage(b"x", header=orjson.dumps(header), version=EXT_JSON) for header in headers)
        )
        for (key, _), entry in zip(keys, stored.entries, strict=True):
            self.published.setdefault(key, []).append(entry.record.internal_id)

    @rule(target=CONSUMERS, ready=READY, tag=st.sampled_from(["", "", "red"]), eager=st.booleans())
    def join(self, ready: int, tag: str, eager: bool) -> Watched:
        return self.admit(ready, tag, eager)

    def admit(self, ready: int, tag: str, eager: bool) -> Watched:
        """Subscribe a consumer."""
        self.numbers += 1
        consumer = Watched(self, self.numbers, tag=tag)
        consumer.eager = eager
        self.members[consumer.id] = consumer
        self.channel.subscribe(consumer)
        self.channel.set_ready(consumer, ready)
        return consumer

    @rule(consumer=consumes(CONSUMERS))
    def die(self, consumer: Watched) -> None:
        """Disconnect with messages in flight."""
        if self.members.pop(consumer.id, None) is not None:
            self.channel.unsubscribe(consumer)

    @rule(consumer=CONSUMERS, ready=READY)
    def permit(self, consumer: Watched, ready: int) -> None:
        if consumer.id in self.members:
            self.channel.set_ready(consumer, ready)

    @rule(consumer=CONSUMERS, data=st.data())
    def answer(self, consumer: Watched, data: st.DataObject) -> None:
        if consumer.held:
            self.finish(consumer, data.draw(st.sampled_from(sorted(consumer.held))))

    @rule(consumer=CONSUMERS, delay=st.sampled_from([0.0, 0.0, 3.0]), data=st.data())
    def requeue(self, consumer: Watched, delay: float, data: st.DataObject) -> None:
        if consumer.held:
            internal_id = data.draw(st.sampled_from(sorted(consumer.held)))
            del consumer.held[internal_id]
            self.channel.requeue(consumer, internal_id, delay)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        """Advance the clock: delays end, messages time out."""
        due = self.bench.now + seconds
        flights = self.channel.cursor.in_flight.table
        for consumer in self.members.values():
            for internal_id in list(consumer.held):
                if flights[internal_id].deadline <= due:
                    del consumer.held[internal_id]
        self.bench.wait(seconds)

    @rule(data=st.data())
    def finish_forced(self, data: st.DataObject) -> None:
        """Finish a message at any client, or a deferred one."""
        ids = sorted(self.channel.cursor.in_flight.table)
        if ids:
            internal_id = data.draw(st.sampled_from(ids))
            self.finished.add(internal_id)
            for consumer in self.members.values():
                consumer.held.pop(internal_id, None)
            self.channel.finish_forced(internal_id)

    @rule(limit=st.integers(0, 3))
    def limit(self, limit: int) -> None:
        """Limit the messages in flight of every connected consumer."""
        self.channel.set_client_limit("127.0.0.1", limit)

    @rule()
    def move_leader_and_back(self) -> None:
        """Move the leader away and back: connections are lost, messages in flight are redelivered."""
        self.bench.partition.suspend()
        assert all(consumer.has_closed for consumer in self.members.values())
        for consumer in self.members.values():
            consumer.held.clear()
        self.members.clear()
        self.bench.partition.resume()

    @rule()
    def pause(self) -> None:
        self.channel.set_paused(not self.channel.paused)

    # invariants

    @invariant()
    def first_deliveries_are_in_order(self) -> None:
        for key, first in self.first.items():
            assert first == self.published[key][: len(first)]

    @invariant()
    def windows_are_respected(self) -> None:
        stats = self.channel.stats()
        # requeued messages are accepted beyond the bound, which limits further reading only
        assert stats.replay_count <= REPLAY + sum(map(len, self.published.values())) - len(self.finished)
        assert stats.depth >= sum(map(len, self.published.values())) - len(self.finished)
        for tag in {found.tag for found in stats.key_ranges}:
            found = [(one.low, one.high) for one in stats.key_ranges if one.tag == tag]
            assert (found[0][0], found[-1][1]) == (0.0, 1.0)
            assert [low for low, _ in found[1:]] == [high for _, high in found[:-1]]

    @invariant()
    def clients_with_permits_are_served(self) -> None:
        """No message waits in the replay set if its key is free and its consumer has a permit."""
        if self.channel.paused:
            return
        for line in self.channel.keys._key_queues.values():
            if line.is_deliverable:
                client = self.channel.keys.client_for(line.pending[0], line)
                if client is not None and line.holder in (None, client):
                    assert client.in_flight >= client.window

    def teardown(self) -> None:
        """No message is lost: an eager consumer receives all unfinished messages."""
        self.channel.set_paused(False)
        for consumer in list(self.members.values()):
            del self.members[consumer.id]
            self.channel.unsubscribe(consumer)
        last = self.admit(4, "", True)
        self.bench.wait(20.0)
        everything = {internal_id for ids in self.published.values() for internal_id in ids}
        assert self.finished == everything
        assert last.held == {}
        assert self.first == self.published
        stats = self.channel.stats()
        assert (stats.depth, stats.replay_count, stats.held_keys, stats.in_flight_count) == (0, 0, 0, 0)


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, phases=PHASES)
