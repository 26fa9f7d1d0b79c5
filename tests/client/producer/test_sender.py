"""Failing publishes: retries, their targets and order, and the error that callers receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import DeliveryUnknown, Producer, PublishFailed
from nsqext.errors import ProtocolError, TopicNotFound
from nsqext.errors.server import LeaderLost
from tests.support.fake_nsqd import (
    Answer,
    error,
    obey,
    ok,
    scripted_lookup,
    scripted_node,
)
from tests.support.machine_pauses import unless_paused
from tests.support.producers import bodies, bounded, producing, quick
from tests.support.sleeps import settled

pytestmark = pytest.mark.anyio


# Decisions by errors


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("choice", [{"key": "user:42"}, {"partition": 1}])
async def test_a_keyed_or_pinned_message_waits_for_its_partition(choice: dict[str, Any], connected: bool) -> None:
    refusals: list[Answer] = [error("E_FAILED_ON_NOT_LEADER"), error("E_FAILED_ON_NOT_WRITABLE"), ok()]
    async with producing({}, {"PUB": refusals}) as (producer, nodes, lookup):
        if connected:
            await producer.publish_many("t", [b"first"], **choice)
        receipt = await producer.publish("t", b"x", **choice)
        assert receipt.partition == 1
        assert bodies(nodes[0]) == []
        assert len(bodies(nodes[1])) == 3
        assert len([path for path in lookup.questions if path.startswith("/lookup")]) >= 2


async def test_a_moved_leader_is_found() -> None:
    async with producing({}, {"PUB": error("E_TOPIC_NOT_EXIST")}) as (producer, nodes, lookup):
        assert (await producer.publish("t", b"x", partition=0)).node == str(nodes[0])
        lookup.set_leaders({0: nodes[0], 1: nodes[0]}, num=2)
        receipt = await producer.publish("t", b"x", partition=1)
        assert receipt.node == str(nodes[0])


async def test_overload_waits_before_it_tries_again() -> None:
    answers: list[Answer] = [error("E_PUB_TOO_MUCH_WAITING"), ok()]
    async with producing({"PUB": answers}) as (producer, nodes, _):
        await producer.publish("t", b"x")
        assert len(bodies(nodes[0])) == 2
        assert len(nodes[0].peers) == 2


async def test_an_unknown_topic_fails_at_once() -> None:
    async with bounded(), scripted_lookup() as lookup, Producer(str(lookup), **quick()) as producer:
        with pytest.raises(TopicNotFound):
            await producer.publish("t", b"x")
        with pytest.raises(TopicNotFound):
            await producer.publish_many("t", [b"x"])


# Unknown outcomes


def _hang_up(times: int) -> Callable[[Any], Any]:
    """Return a script that closes the connection instead of responding, ``times`` times."""
    left = [times]
    well = obey()

    async def run(peer: Any) -> None:
        if not left[0]:
            await well(peer)
            return
        left[0] -= 1
        await peer.next()
        await peer.close()

    return run


async def test_an_unknown_outcome_is_retried_by_default() -> None:
    async with (
        bounded(),
        scripted_node(_hang_up(2)) as node,
        Producer(nsqd=str(node), **quick()) as producer,
    ):
        assert (await producer.publish("t", b"x")).node == str(node)
        assert len(bodies(node)) == 3


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("connected", [False, True])
async def test_a_lead_may_be_lost_after_a_single_message_is_written(key: str | None, connected: bool) -> None:
    """The redesigned server writes a single message before it answers so, and checks a batch before it writes it."""
    refusal: list[Answer] = [error("E_FAILED_ON_NOT_LEADER"), ok()]
    options = quick(on_unknown="raise")
    async with producing({"PUB": list(refusal), "MPUB": [ok(), *refusal]}, **options) as (producer, nodes, _):
        if connected:
            await producer.publish_many("t", [b"first"], key=key)
        with pytest.raises(DeliveryUnknown) as caught:
            await producer.publish("t", b"x", key=key)
        assert type(caught.value.attempts[-1]) is LeaderLost
        assert [bodies(nodes[0]).count(b"x"), producer.statistics().unknown] == [1, 1]
        if not connected:
            await producer.publish_many("t", [b"first"], key=key)
        await producer.publish_many("t", [b"y", b"z"], key=key)
        assert producer.statistics().retries == 1


async def test_no_answer_in_time_is_an_unknown_outcome() -> None:
    options = quick(timeout=0.3, close_timeout=0.0)

    async def attempt(number: int) -> None:
        async with producing({"PUB": None}, **options) as (producer, nodes, _):
            for partition in (None, 0):
                with pytest.raises(DeliveryUnknown):
                    await producer.publish("t", b"x", partition=partition)
            assert len(bodies(nodes[0])) == 2

    await unless_paused(attempt, 0.05)


async def test_an_address_that_is_not_a_server_fails_at_once() -> None:
    async def http(peer: Any) -> None:
        await peer.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with bounded(), scripted_node(http, granted=None) as node, Producer(nsqd=str(node)) as producer:
        with pytest.raises(ProtocolError, match="HTTP"):
            await producer.publish("t", b"x")


async def test_a_silent_server_is_disconnected() -> None:
    options = quick(timeout=0.4, connect_timeout=0.1)

    async def attempt(number: int) -> None:
        async with (
            bounded(),
            scripted_node(granted=None) as node,
            Producer(nsqd=str(node), **options) as producer,
        ):
            with pytest.raises(PublishFailed, match=r"sent no response for 0\.1 s"):
                await producer.publish("t", b"x")

    await unless_paused(attempt, 0.05)


# Order


async def test_a_key_is_not_overtaken_by_its_retries() -> None:
    failures = ["E_PUB_FAILED x", "", "E_PUB_FAILED x", "E_FAILED_ON_NOT_LEADER", "", "", "", ""]
    stored: list[bytes] = []
    async with bounded(), scripted_node() as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), **quick()) as producer, anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(_publish_keyed, producer, b"%d" % number)
                await settled()
            peer = await node.accept()
            for failure in failures[: 5 + 3]:
                body = (await peer.expect("PUB")).body
                await peer.raw(error(failure) if failure else ok())
                if not failure:
                    stored.append(body or b"")
    assert stored == [b"0", b"1", b"2", b"3", b"4"]


async def _publish_keyed(producer: Producer, body: bytes) -> None:
    await producer.publish("t", body, key="k")
