"""Shares of max_in_flight, as they change with time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nsqext import Consumer
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from tests.support.consumers import eventually, quick
from tests.support.fake_nsqd import PLAIN, Peer, message, scripted_node

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def two_connections() -> AsyncIterator[tuple[Consumer, list[Peer]]]:
    """Subscribe a consumer that may have one message in flight to two nodes; yields it, and the nodes' connections."""
    async with scripted_node(granted=PLAIN) as one, scripted_node(granted=PLAIN) as two:
        options = quick(start_timeout=0.0)
        async with Consumer("t", "ch", nsqd=f"{one},{two}", max_in_flight=1, **options) as consumer:
            peers = [await one.accept(), await two.accept()]
            for peer in peers:
                await peer.expect("SUB")
                await peer.answer()
            await eventually(lambda: len(consumer.connections) == 2)
            yield consumer, peers


async def test_more_connections_than_messages_take_turns() -> None:
    async with two_connections() as (consumer, peers):
        got: list[int] = []
        for number in range(4):
            await eventually(lambda: any(place.ready for place in consumer.connections))
            ready = [index for index, place in enumerate(consumer.connections) if place.ready]
            assert len(ready) == 1
            got.append(ready[0])
            if number < 3:
                before = ready[0]
                await eventually(
                    lambda before=before: (
                        [place.ready for place in consumer.connections].index(1) != before  # type: ignore[misc]
                        if any(place.ready for place in consumer.connections)
                        else False
                    )
                )
        assert len(set(got)) == 2
        for peer in peers:
            await peer.close()


async def test_connections_without_messages_are_ticked_rarely_while_they_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_connections() as (consumer, peers):
        group = consumer._group
        busy, rest = group.subscriptions
        ticked: list[Subscription] = []
        monkeypatch.setattr(Subscription, "tick", lambda self, now: ticked.append(self))
        start = group._all_due
        busy.in_flight = 1
        for turn in range(1, 5):
            group._tick(start - turn * 0.01, 0.0)
        assert ticked == [busy] * 4
        group._tick(start, 0.0)
        assert ticked[4:] == [busy, rest]
        busy.in_flight = 0
        for peer in peers:
            await peer.close()


async def test_a_read_does_not_wake_the_timer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    tick = SubscriptionGroup._tick

    def count(group: SubscriptionGroup, now: float, late: float) -> None:
        ticks.append(now)
        tick(group, now, late)

    monkeypatch.setattr(SubscriptionGroup, "_tick", count)
    async with scripted_node(granted=PLAIN) as node, Consumer("t", "ch", nsqd=str(node), **quick()) as consumer:
        peer = await node.accept()
        await peer.expect("SUB")
        await peer.answer()
        await peer.expect("RDY")
        ticks.clear()
        started = time.monotonic()
        for number in range(40):
            await peer.raw(message(number))
            await (await anext(consumer)).finish()
            while (await peer.expect("FIN", "RDY")).words[0] != b"FIN":
                pass
        assert len(ticks) <= 3 + (time.monotonic() - started) / 0.25
        await peer.close()
