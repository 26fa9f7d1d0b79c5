"""The key_failover channel of the embedded cluster and the lanes of its consumers, over links with random delays.

A random walk depends on its seed: messages and commands are delayed arbitrarily, either side may detect the end of a
connection long before the other, the server may pause, messages time out, and leaders change. A message must never be
handled for the first time after a later one of its key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import orjson
import pytest

from nsqext.broker.coordinator.replication import hand_over_channels, mirror_channels
from nsqext.broker.engine.options import ChannelKind, PartitionOptions
from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.client.consumer.handlers.key_lanes import KeyLanes
from nsqext.client.consumer.handlers.message_keys import key_reader
from nsqext.client.consumer.message import KeySharing, Message, touch_due
from nsqext.client.consumer.options import DeliveryOptions
from nsqext.errors import MessageNotInFlight
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.messages import EXT_JSON, RawMessage
from tests.support.engine_partition import Consumer as Subscriber

_LANES = 2
_STEPS = 3000
_MOST = 400
"""Messages that a walk publishes."""
_LONG = 40_000
"""Steps within which all messages must be handled after the last fault."""


class Link(Subscriber):
    """A connection: the subscriber of the channel, and the subscription of the lanes."""

    topic, partition, node, in_order, moved, ignore_lost = "t", 0, "127.0.0.1:4150", False, False, False
    taking_over = original = False
    max_msg_timeout = 30.0
    key_sharing = KeySharing.SERVER

    def __init__(self, walk: Walk, number: int) -> None:
        super().__init__(walk.next_id(), extend=True, msg_timeout=walk.msg_timeout)
        self.number = number
        self.horizon = walk.now - walk.msg_timeout
        self.down: deque[RawMessage] = deque()
        self.up: deque[tuple[Any, ...]] = deque([("RDY", walk.ready)])
        self.open_here = self.open_there = True
        self._walk = walk
        self.channel = walk.leader.channels["ch"]
        self.channel.subscribe(self)

    # server side

    def deliver(self, message: RawMessage) -> None:
        """Send a message."""
        self.down.append(message)

    def closed(self) -> None:
        """Close the connection."""
        self.open_there = False
        self.up.clear()

    def serve(self) -> None:
        """Run the next command."""
        if not self.up or not self.open_there:
            return
        name, *given = self.up.popleft()
        channel = self.channel
        if name == "RDY":
            channel.set_ready(self, *given)
            return
        counter = int.from_bytes(given[0][:8], "big")
        try:
            if name == "FIN":
                channel.finish(self, counter)
            elif name == "TOUCH":
                channel.touch(self, counter)
            else:
                channel.requeue(self, counter, given[1])
        except Refusal:
            return

    def notice_end(self) -> None:
        """Make the server detect that the client has closed the connection; commands may be unread."""
        while self.up and self._walk.rng.random() < 0.9:
            self.serve()
        if self.open_there:
            self.open_there = False
            self.channel.unsubscribe(self)

    # client side

    def end(self) -> None:
        """Close the connection."""
        self.open_here, self.horizon = False, inf
        while self.up and self._walk.rng.random() < 0.3:
            self.up.pop()

    def reset(self, reason: str) -> None:
        """Close the connection, as requested by the lanes."""
        self.end()

    def finish(self, message: Message) -> None:
        """Send FIN."""
        self._send(message, "FIN")

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        """Send REQ."""
        self._send(message, "REQ", delay)

    def touch(self, message: Message) -> None:
        """Send TOUCH."""
        self._send(message, "TOUCH")
        message.received = self._walk.now

    def _send(self, message: Message, name: str, *given: float) -> None:
        if message.received < self.horizon:
            raise MessageNotInFlight("not in flight")
        self.up.append((name, message.id, *given))

    def record_outcome(self, failed: bool) -> None:
        """Ignore the outcome: no backoff."""

    def expired(self, message: Message) -> bool:
        """Return whether a message is not in flight any more."""
        return message.received < max(self.horizon, self._walk.now - self.msg_timeout)


class Client:
    """A consumer: lanes with a worker each."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._lanes = KeyLanes(_LANES, key_reader("##key"), walk.clock, DeliveryOptions())
        self._running: list[Message | None] = [None] * _LANES
        self._connected = 0
        self.link: Link | None = None

    def receive(self) -> None:
        """Read messages from the links; connect if there is no connection."""
        walk, link = self._walk, self.link
        if link is None or not link.open_here:
            self._connected += 1
            self.link = Link(walk, self._connected)
            walk.links.append(self.link)
            return
        if not link.down:
            if not link.open_there:
                link.end()
            return
        link.horizon = walk.now - link.msg_timeout
        count = min(walk.rng.randint(1, 6), len(link.down))
        self._lanes.put([self._message(link, link.down.popleft()) for _ in range(count)])

    def _message(self, link: Link, raw: RawMessage) -> Message:
        message = Message(link)
        for name in ("timestamp", "attempts", "id", "version", "header", "body"):
            setattr(message, name, getattr(raw, name))
        message.offset, message.size = -1, 0
        message.delivered = message.received = self._walk.now
        return message

    def work(self) -> None:
        """Start or end a handler, like `Workers`."""
        walk = self._walk
        number = walk.rng.randrange(_LANES)
        message, self._running[number] = self._running[number], None
        if message is not None:
            if walk.rng.random() < walk.failures:
                message.requeue_now(walk.rng.choice([0.0, 0.02, 0.5, 4.0]), backoff=True)
            else:
                walk.note(walk.done, message)
                message.finish_now()
            return
        queue = self._lanes.lanes[number].messages
        while queue:
            message = queue.popleft()
            if message.received < message.owner.horizon:
                self._lanes.expired(message)
                continue
            walk.note(walk.begun, message)
            self._running[number] = message
            return

    def tick(self) -> None:
        """Advance the clock."""
        walk, link = self._walk, self.link
        if link is not None and link.open_here:
            link.horizon = walk.now - link.msg_timeout
        self._lanes.tick(walk.now)
        if walk.auto_touch:
            touch_due((*filter(None, self._running), *self._lanes.queued()), walk.now)


class Walk:
    """A partition with two replicas, its consumers, and random events."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now = 1000.0
        self.msg_timeout = rng.choice([2.0, 5.0, 60.0])
        self.ready = rng.choice([1, 3, 8])
        self.failures = rng.choice([0, 0.05, 0.3])
        self.auto_touch = rng.random() < 0.5
        self.begun: dict[str, list[int]] = {}
        self.done: dict[str, list[int]] = {}
        self.links: list[Link] = []
        self._ids = 0
        self._keys = rng.choice([1, 2, 5])
        self._published: dict[str, int] = {}
        self._replicas = [self._replica(seed) for _ in range(2)]
        self._replicas[1].suspend()
        self._clients = [Client(self) for _ in range(rng.choice([1, 2, 3]))]

    def _replica(self, seed: int) -> Partition:
        options = PartitionOptions(
            extend=True, clock=self.clock, wall=lambda: round(self.now * 1e9), random=Random(seed)
        )
        partition = Partition("t", 0, options)
        partition.channel("ch", ChannelKind(KEY_FAILOVER))
        return partition

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def next_id(self) -> int:
        """Return the number of a new connection."""
        self._ids += 1
        return self._ids

    @property
    def leader(self) -> Partition:
        """The replica that consumers connect to."""
        return self._replicas[0]

    def note(self, seen: dict[str, list[int]], message: Message) -> None:
        """Check that a message is not the first after a later one of its key."""
        key, _, number = message.body.decode().partition(":")
        before = seen.setdefault(key, [])
        if int(number) not in before:
            assert int(number) == len(before), f"{key}: {number} is handled before {len(before)}"
            before.append(int(number))

    def run(self) -> None:
        """Run the random events, then wait until all messages are handled."""
        for _ in range(_STEPS):
            self._step()
        self.failures = 0
        wanted = sum(self._published.values())
        for _ in range(_LONG):
            if sum(map(len, self.done.values())) == wanted:
                return
            self._calm_step()
        raise AssertionError(f"{sum(map(len, self.done.values()))} of {wanted} messages were handled")

    def _calm_step(self) -> None:
        for link in self._half_open():
            link.notice_end()
        for client in self._clients:
            client.receive()
            client.work()
        for link in self.links:
            link.serve()
            link.serve()
        self.now += 0.1
        self.leader.tick()
        for client in self._clients:
            client.tick()

    def _half_open(self) -> list[Link]:
        self.links = [link for link in self.links if link.open_here or link.open_there]
        return [link for link in self.links if link.open_there and not link.open_here]

    def _step(self) -> None:
        rng = self.rng
        happens: tuple[tuple[Callable[[], object], float], ...] = (
            (self._publish, 3),
            (self._serve, 27),
            (lambda: rng.choice(self._clients).receive(), 25),
            (lambda: rng.choice(self._clients).work(), 30),
            (self._pass_time, 8),
            (self._notice_end, 3),
            (self._cut, 1.5),
            (lambda: mirror_channels(*self._replicas), 1),
            (self._move, 0.3),
            (self.leader.tick, 1),
        )
        actions, weights = zip(*happens, strict=True)
        rng.choices(actions, weights)[0]()

    def _publish(self) -> None:
        if sum(self._published.values()) >= _MOST:
            return
        messages = []
        for _ in range(self.rng.randint(1, 8)):
            key = f"k{self.rng.randrange(self._keys)}"
            number = self._published.get(key, 0)
            self._published[key] = number + 1
            header = orjson.dumps({"##key": key})
            messages.append(NewMessage(f"{key}:{number}".encode(), header=header, version=EXT_JSON))
        stored = self.leader.put(messages)
        self._replicas[1].append_replica(stored.entries)
        self.leader.commit(stored)

    def _serve(self) -> None:
        waiting = [link for link in self.links if link.up and link.open_there]
        if waiting:
            link = self.rng.choice(waiting)
            for _ in range(self.rng.randint(1, 6)):
                link.serve()

    def _pass_time(self) -> None:
        """Advance the clock; either side may be paused."""
        self.now += self.rng.choice([0.01, 0.05, 0.25, 0.25, 1.0, 1.0 if self.msg_timeout < 10 else 3.0])
        if self.rng.random() < 0.9:
            self.leader.tick()
        for client in self._clients:
            if self.rng.random() < 0.9:
                client.tick()

    def _notice_end(self) -> None:
        half_open = self._half_open()
        if half_open:
            self.rng.choice(half_open).notice_end()

    def _cut(self) -> None:
        link = self.rng.choice(self._clients).link
        if link is not None and link.open_here:
            link.end()

    def _move(self) -> None:
        """Make the other replica the leader, with the newest channel positions or with those replicated last."""
        old, new = self._replicas
        for link in self.links:
            link.closed()
        old.suspend()
        if self.rng.random() < 0.5:
            hand_over_channels(old, new)
        self._replicas.reverse()
        new.resume()


# all but the first two found that a consumer handled messages that were under way when it requeued earlier ones
@pytest.mark.parametrize("seed", [0, 1, 296, 298, 375, 435, 488, 922, 1016, 1140])
def test_no_message_is_handled_before_an_earlier_one_of_its_key(seed: int) -> None:
    Walk(seed).run()
