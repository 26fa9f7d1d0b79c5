"""The exact commands of a consumer in backoff, as expected by the mock servers of the Go clients' tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import pytest

from nsqext import Consumer, ConsumerSettings, Message, Requeue
from tests.support.consumers import eventually, quick_sharing, running, tape
from tests.support.fake_nsqd import PLAIN, message, scripted_node
from tests.support.machine_pauses import repeated_if_paused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.fake_nsqd import Peer, ScriptedNode

pytestmark = pytest.mark.anyio

_REPEATED = repeated_if_paused(0.01)
"""A pause of the process may end a backoff before its RDY 0 is sent."""


def scripted_consumer(node: object, **settings: Unpack[ConsumerSettings]) -> Consumer:
    """Return a consumer whose handler fails on ``bad`` and requeues ``back``."""
    given: ConsumerSettings = {"backoff_base": 0.01, "requeue_delay": 0.0, **settings}
    consumer = Consumer("t", "ch", nsqd=str(node), **quick_sharing(**given))

    @consumer.handler
    async def handle(message: Message) -> None:
        if message.body == b"bad":
            raise ValueError("bad")
        if message.body == b"back":
            raise Requeue(0.0, backoff=False)

    return consumer


async def subscribed(node: ScriptedNode, ready: int) -> Peer:
    """Accept a subscription, whose first RDY is as given."""
    peer = await node.accept()
    assert await tape(peer, 1) == ["SUB t ch"]
    await peer.answer()
    assert await tape(peer, 1) == [f"RDY {ready}"]
    return peer


async def with_one(body: Callable[[Consumer, Peer], Awaitable[object]], **settings: Unpack[ConsumerSettings]) -> None:
    """Run a body with a consumer of one node, which has subscribed with RDY 5."""
    async with scripted_node(granted=PLAIN) as node:
        given: ConsumerSettings = {"max_in_flight": 5, **settings}
        consumer = scripted_consumer(node, **given)

        async def meet() -> None:
            await body(consumer, await subscribed(node, 5))

        await running(consumer, meet, node)


_SCRIPTS: dict[str, tuple[int, list[tuple[bytes, list[str]]], list[tuple[bytes, list[str]]]]] = {
    # messages and expected commands, over a first connection, and over a second one after the first was cut
    "TestConsumerBackoff": (
        5,
        [
            (b"good", ["FIN 1"]),
            (b"back", ["REQ 2"]),
            (b"good", ["FIN 3"]),
            (b"bad", ["RDY 0", "REQ 4", "RDY 1"]),
            (b"bad", ["RDY 0", "REQ 5", "RDY 1"]),
            (b"good", ["RDY 0", "FIN 6", "RDY 1"]),
            (b"good", ["RDY 5", "FIN 7"]),
        ],
        [],
    ),
    "TestConsumerRequeueNoBackoff": (
        1,
        [
            (b"bad", ["RDY 0", "REQ 1", "RDY 1"]),
            (b"back", ["RDY 0", "REQ 2", "RDY 1"]),
            (b"good", ["FIN 3"]),  # the Go client repeats RDY 1, which is set already
        ],
        [],
    ),
    "TestConsumerBackoffDisconnect": (
        5,
        [
            (b"good", ["FIN 1"]),
            (b"bad", ["RDY 0", "REQ 2", "RDY 1"]),
            (b"bad", ["RDY 0", "REQ 3", "RDY 1"]),
            (b"good", ["RDY 0", "FIN 4", "RDY 1"]),
        ],
        [(b"good", ["RDY 5", "FIN 1"]), (b"good", ["FIN 2"])],
    ),
}


@pytest.mark.parametrize("name", _SCRIPTS)
@_REPEATED
async def test_the_mock_servers_of_the_go_clients_receive_what_they_expect(name: str) -> None:
    in_flight, *connections = _SCRIPTS[name]
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=in_flight)

        async def body() -> None:
            peer = await subscribed(node, in_flight)
            for number, script in enumerate(filter(None, connections)):
                if number:
                    await peer.close()
                    peer = await subscribed(node, 1)
                for internal_id, (text, expected) in enumerate(script, 1):
                    await peer.raw(message(internal_id, text))
                    assert await tape(peer, len(expected)) == expected
            assert consumer.backoff.state == "running"
            consumer.stop()
            assert await tape(peer, 2) == ["RDY 0", "CLS"], "and no other command before"
            await peer.answer(b"CLOSE_WAIT")

        await running(consumer, body, node)


@_REPEATED
async def test_failures_during_a_pause_count_once() -> None:
    async def body(consumer: Consumer, peer: Peer) -> None:
        await peer.raw(b"".join(message(number, b"bad") for number in range(1, 6)))
        assert await tape(peer, 6) == ["RDY 0", *(f"REQ {number}" for number in range(1, 6))]
        assert peer.received[-1].startswith(b"RDY 0\nREQ "), "in one write"
        assert await tape(peer, 1) == ["RDY 1"]
        assert (consumer.backoff.level, consumer.backoff.state) == (1, "probing")

    # the pause is longer than five handlers and their logs
    await with_one(body, backoff_base=0.1)


@_REPEATED
async def test_a_pause_outlives_a_backoff() -> None:
    async def body(consumer: Consumer, peer: Peer) -> None:
        consumer.pause()
        assert consumer.paused
        assert await tape(peer, 1) == ["RDY 0"]
        consumer.resume()
        assert await tape(peer, 1) == ["RDY 5"]
        consumer.pause()
        await peer.raw(message(1, b"bad"))
        assert await tape(peer, 2) == ["RDY 0", "REQ 1"]
        await eventually(lambda: consumer.backoff.state == "probing")
        consumer.resume()
        assert await tape(peer, 1) == ["RDY 1"]

    await with_one(body)
