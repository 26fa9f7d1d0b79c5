"""A leader is killed while messages are published and consumed: no message is lost, keys keep their order."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from itertools import pairwise

import anyio
import pytest
from anyio.to_thread import run_sync
from attrs import define, field

from nsqext import Consumer, Message, NsqError, Producer
from tests.support.cluster import REAL, Killable
from tests.support.machine_pauses import PauseWatch
from tests.support.transports import Transport, over_tcp_and_http

pytestmark = pytest.mark.anyio

logger = logging.getLogger("tests.contract")

_STALL = 10.0 if not REAL else 40.0
"""Longest time of a publish or a consumption, in seconds; a real cluster detects a kill after 20 s."""
_BEFORE, _AFTER = 20, 40
"""Publishes of each publisher before the kill, and after it."""


@define
class Records:
    """Published and consumed messages, with times of the monotonic clock."""

    stored: dict[bytes, float] = field(factory=dict)
    consumed: dict[bytes, float] = field(factory=dict)
    failed: list[str] = field(factory=list)
    longest: float = 0.0
    killed: anyio.Event = field(factory=anyio.Event)
    warm: anyio.Event = field(factory=anyio.Event)

    def consumed_all(self) -> bool:
        """Return whether all stored messages were consumed."""
        return self.stored.keys() <= self.consumed.keys()

    @property
    def gap(self) -> float:
        """Longest time without a message at the consumer, in seconds."""
        times = sorted(self.consumed.values())
        return max(later - earlier for earlier, later in pairwise(times))


async def publish(producer: Producer, topic: str, name: str, keyed: bool, records: Records) -> None:
    """Publish one after the other, until some time after the kill."""
    number = after = 0
    while after < _AFTER:
        body = f"{name}:{number}".encode()
        began = time.monotonic()
        try:
            await producer.publish(topic, body, key=name if keyed else None)
        except NsqError as error:
            records.failed.append(str(error))
        else:
            records.stored[body] = time.monotonic()
            records.longest = max(records.longest, time.monotonic() - began)
        number += 1
        after += records.killed.is_set()
        if number == _BEFORE and name == "key 0":
            records.warm.set()
        await anyio.sleep(0.01)


@over_tcp_and_http
async def test_everything_continues_when_a_leader_is_killed(killable: Killable, transport: Transport) -> None:
    records = Records()
    with PauseWatch() as pauses:
        await _kill_in_between(killable, records, transport)
    logger.info(
        "%d messages, longest publish %.2f s, longest gap at the consumer %.2f s",
        len(records.stored),
        records.longest,
        records.gap,
    )
    assert records.failed == []
    assert_in_order(records)
    assert records.longest - pauses.total < _STALL
    assert records.gap - pauses.total < _STALL


async def _kill_in_between(killable: Killable, records: Records, transport: Transport) -> None:
    topic, lookupd = killable.topic, killable.lookupd
    consumer = Consumer(topic, "ch", lookupd=lookupd)

    async def collect() -> None:
        async for message in consumer:
            note(message)
            await message.finish()

    def note(message: Message) -> None:
        records.consumed.setdefault(message.body, time.monotonic())

    async with (
        Producer(lookupd, timeout=60.0, transport=transport) as producer,
        consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(collect)
        async with anyio.create_task_group() as publishers:
            for number in range(3):
                publishers.start_soon(publish, producer, topic, f"key {number}", True, records)
                publishers.start_soon(publish, producer, topic, f"publisher {number}", False, records)
            await records.warm.wait()
            leader = (await producer.publish(topic, b"the last before")).node
            await run_sync(killable.kill, leader)
            records.killed.set()
        with anyio.fail_after(_STALL + 20):
            while not records.consumed_all():  # noqa: ASYNC110 - looks at the end of two sets of tasks
                await anyio.sleep(0.01)
        consumer.stop()


def assert_in_order(records: Records) -> None:
    """Compare the first deliveries of each key with the order of publishing."""
    by_key: dict[str, list[int]] = defaultdict(list)
    for body in records.consumed:  # in order of first deliveries
        name, _, number = body.decode().partition(":")
        if name.startswith("key"):
            by_key[name].append(int(number))
    assert len(by_key) == 3
    for numbers in by_key.values():
        assert numbers == sorted(numbers)
