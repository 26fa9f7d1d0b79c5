"""The exact commands of a consumer in backoff, as expected by the mock servers of the Go clients' tests."""

from __future__ import annotations

from typing import Unpack

import pytest

from nsqext import Consumer, ConsumerSettings, Message, Requeue
from nsqext.errors import InvalidSetting
from tests.support.consumers import eventually, quick, running, tape
from tests.support.fake_nsqd import PLAIN, message, scripted_node
from tests.support.machine_pauses import repeated_if_paused

pytestmark = pytest.mark.anyio

_REPEATED = repeated_if_paused(0.01)
"""A pause of the process may end a backoff before its RDY 0 is sent."""


def scripted_consumer(node: object, **settings: Unpack[ConsumerSettings]) -> Consumer:
    """Return a consumer whose handler fails on ``bad`` and requeues ``back``."""
    given: ConsumerSettings = {"backoff_base": 0.01, "requeue_delay": 0.0, **settings}
    consumer = Consumer("t", "ch", nsqd=str(node), **quick(**given))

    @consumer.handler
    async def handle(message: Message) -> None:
        if message.body == b"bad":
            raise ValueError("bad")
        if message.body == b"back":
            raise Requeue(0.0, backoff=False)

    return consumer


@_REPEATED
async def test_one_consumer_probes_its_way_out_of_a_backoff() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            await peer.raw(message(1) + message(2) + message(3))
            assert await tape(peer, 3) == ["FIN 1", "FIN 2", "FIN 3"]
            await peer.raw(message(4, b"bad"))
            assert await tape(peer, 3) == ["RDY 0", "REQ 4", "RDY 1"]
            await peer.raw(message(5, b"bad"))
            assert await tape(peer, 3) == ["RDY 0", "REQ 5", "RDY 1"]
            assert (consumer.backoff.level, consumer.backoff.state) == (2, "probing")
            await peer.raw(message(6))
            assert await tape(peer, 3) == ["RDY 0", "FIN 6", "RDY 1"]
            await peer.raw(message(7))
            assert await tape(peer, 2) == ["RDY 5", "FIN 7"]
            assert (consumer.backoff.level, consumer.backoff.state) == (0, "running")
            consumer.stop()
            assert await tape(peer, 2) == ["RDY 0", "CLS"]
            await peer.answer(b"CLOSE_WAIT")

        await running(consumer, body, node)


@_REPEATED
async def test_rdy_and_fin_are_sent_in_one_write() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            await peer.raw(message(4, b"bad"))
            assert await tape(peer, 2) == ["RDY 0", "REQ 4"]
            assert peer.received[-1].startswith(b"RDY 0\nREQ ")

        await running(consumer, body, node)


@_REPEATED
async def test_failures_during_a_pause_count_once() -> None:
    async with scripted_node(granted=PLAIN) as node:
        # the pause is longer than five handlers and their logs
        consumer = scripted_consumer(node, max_in_flight=5, backoff_base=0.1)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            await peer.raw(b"".join(message(number, b"bad") for number in range(1, 6)))
            assert await tape(peer, 7) == ["RDY 0", *(f"REQ {number}" for number in range(1, 6)), "RDY 1"]
            assert consumer.backoff.level == 1

        await running(consumer, body, node)


@_REPEATED
async def test_a_requeue_without_backoff_is_neutral() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            await peer.raw(message(1, b"back"))
            assert await tape(peer, 1) == ["REQ 1"]
            assert consumer.backoff.state == "running"
            await peer.raw(message(2, b"bad"))
            assert await tape(peer, 3) == ["RDY 0", "REQ 2", "RDY 1"]
            await peer.raw(message(3, b"back"))
            assert await tape(peer, 3) == ["RDY 0", "REQ 3", "RDY 1"]
            assert consumer.backoff.level == 1
            await peer.raw(message(4))
            assert await tape(peer, 2) == ["RDY 5", "FIN 4"]

        await running(consumer, body, node)


@_REPEATED
async def test_a_connection_that_is_lost_in_a_backoff_probes_on_the_next() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            await peer.raw(message(1, b"bad"))
            assert await tape(peer, 3) == ["RDY 0", "REQ 1", "RDY 1"]
            await peer.close()
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 1"]
            await peer.raw(message(2))
            assert await tape(peer, 2) == ["RDY 5", "FIN 2"]

        await running(consumer, body, node)


@_REPEATED
async def test_pause_and_resume() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            consumer.pause()
            assert consumer.paused
            assert await tape(peer, 1) == ["RDY 0"]
            consumer.resume()
            assert await tape(peer, 1) == ["RDY 5"]

        await running(consumer, body, node)


@_REPEATED
async def test_a_pause_outlives_a_backoff() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            consumer.pause()
            await peer.raw(message(1, b"bad"))
            assert await tape(peer, 2) == ["RDY 0", "REQ 1"]
            await eventually(lambda: consumer.backoff.state == "probing")
            consumer.resume()
            assert await tape(peer, 1) == ["RDY 1"]

        await running(consumer, body, node)


@_REPEATED
async def test_one_connection_backs_off_alone() -> None:
    async with scripted_node(granted=PLAIN) as one, scripted_node(granted=PLAIN) as two:
        consumer = scripted_consumer(f"{one},{two}", max_in_flight=8, backoff="connection")

        async def body() -> None:
            first, second = await one.accept(), await two.accept()
            for peer in (first, second):
                assert await tape(peer, 1) == ["SUB t ch"]
            await first.answer()
            assert await tape(first, 1) == ["RDY 8"]
            await second.answer()
            assert (await tape(first, 1), await tape(second, 1)) == (["RDY 4"], ["RDY 4"])
            await first.raw(message(1, b"bad"))
            assert await tape(first, 2) == ["RDY 0", "REQ 1"]
            assert await tape(first, 1) == ["RDY 1"], "it has not given its last message away yet"
            assert consumer.backoff.state == "running"
            assert sorted(one.backoff for one in consumer.connections) == [0, 1]
            assert await tape(second, 1) == ["RDY 7"]
            await first.raw(message(2))
            assert await tape(first, 1) == ["FIN 2"]
            assert await tape(second, 1) == ["RDY 4"]
            assert await tape(first, 1) == ["RDY 4"]

        await running(consumer, body, one, two)


@_REPEATED
async def test_without_backoff_nothing_slows_down() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5, backoff="off")

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            await peer.raw(message(1, b"bad") + message(2))
            assert await tape(peer, 2) == ["REQ 1", "FIN 2"]

        await running(consumer, body, node)


@_REPEATED
async def test_a_failure_at_one_node_stops_all() -> None:
    async with scripted_node(granted=PLAIN) as one, scripted_node(granted=PLAIN) as two:
        consumer = scripted_consumer(f"{one},{two}", max_in_flight=8)

        async def body() -> None:
            first, second = await one.accept(), await two.accept()
            for peer in (first, second):
                assert await tape(peer, 1) == ["SUB t ch"]
            await first.answer()
            assert await tape(first, 1) == ["RDY 8"]
            await second.answer()
            assert (await tape(first, 1), await tape(second, 1)) == (["RDY 4"], ["RDY 4"])
            await first.raw(message(1, b"bad"))
            assert await tape(first, 2) == ["RDY 0", "REQ 1"]
            assert await tape(second, 1) == ["RDY 0"]
            await eventually(lambda: any(one.ready for one in consumer.connections))
            assert sorted(one.ready for one in consumer.connections) == [0, 1]
            probe = next(one.node for one in consumer.connections if one.ready)
            peer, other = (first, second) if probe == str(one) else (second, first)
            assert await tape(peer, 1) == ["RDY 1"]
            await peer.raw(message(2))
            assert await tape(peer, 2) == ["RDY 4", "FIN 2"]
            assert await tape(other, 1) == ["RDY 4"]

        await running(consumer, body, one, two)


@_REPEATED
async def test_another_number_in_flight_while_it_backs_off() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = scripted_consumer(node, max_in_flight=5)

        async def body() -> None:
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB t ch"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 5"]
            consumer.max_in_flight = 9
            assert await tape(peer, 1) == ["RDY 9"]
            await peer.raw(message(1, b"bad"))
            assert await tape(peer, 2) == ["RDY 0", "REQ 1"]
            consumer.max_in_flight = 3
            assert await tape(peer, 1) == ["RDY 1"]
            await peer.raw(message(2))
            assert await tape(peer, 2) == ["RDY 3", "FIN 2"]
            with pytest.raises(InvalidSetting):
                consumer.max_in_flight = 0

        await running(consumer, body, node)


_SCRIPTS: dict[str, tuple[int, list[tuple[bytes, list[str]]], list[tuple[bytes, list[str]]]]] = {
    # messages and expected commands, over a first connection, and over a second one after the first was cut
    "TestConsumerBackoff": (
        5,
        [
            (b"good", ["FIN 1"]),
            (b"good", ["FIN 2"]),
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
            for number, script in enumerate(connections):
                if not script:
                    continue
                peer = await node.accept()
                assert await tape(peer, 1) == ["SUB t ch"]
                await peer.answer()
                assert await tape(peer, 1) == ["RDY 1" if number else f"RDY {in_flight}"]
                for internal_id, (text, expected) in enumerate(script, 1):
                    await peer.raw(message(internal_id, text))
                    assert await tape(peer, len(expected)) == expected
                if number + 1 < len(connections) and connections[number + 1]:
                    await peer.close()
            assert consumer.backoff.state == "running"
            consumer.stop()
            assert await tape(peer, 2) == ["RDY 0", "CLS"], "and no other command before"
            await peer.answer(b"CLOSE_WAIT")

        await running(consumer, body, node)
