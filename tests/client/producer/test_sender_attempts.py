"""What a publish does after each kind of failure, with routes, connections and lookup of the test."""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from tenacity import wait_fixed

from nsqext.client.events import ClientEvents
from nsqext.client.producer.batch import Batch
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.client.producer.request import MessageRequest
from nsqext.client.producer.route import Route
from nsqext.client.trace_log import trace_log
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    DeliveryUnknown,
    ExtendNotSupported,
    InvalidInput,
    InvalidPartition,
    LookupUnreachable,
    NotSent,
    NsqError,
    PartitionUnavailable,
    PublishFailed,
)
from nsqext.errors.server import (
    BadMessage,
    NotLeader,
    NotWritable,
    PubFailed,
    PubRefused,
    TooMuchWaiting,
    TopicNotExist,
)
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.frames import encode_trace_reply
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, TopicMeta
from tests.support.clock import replace_clock
from tests.support.machine_pauses import repeated_if_paused
from tests.support.publish_bench import Bench, batch_of
from tests.support.sleeps import recorded_sleeps

pytestmark = pytest.mark.anyio


async def test_what_is_stored_is_counted() -> None:
    bench = Bench()
    sender = bench.sender
    (receipt,) = await sender.publish(bench.request(started=1000.0))
    assert (receipt.topic, len(await bench.publish(batch_of(3)))) == ("t", 3)
    assert bench.counts == (4, 0)
    commands = bench.connections.commands
    assert sender.counters.bytes_sent == sum(len(command) for _, command, _ in commands)
    assert commands[0][2] == 1030.0
    assert bench.connections.doubts == [True]
    assert bench.connections.request is not None
    assert not bench.connections.request.in_doubt
    assert not sender.attempts


@pytest.mark.parametrize("key", [b"1", b"0"])
async def test_a_key_or_a_partition_chooses_the_node(key: bytes) -> None:
    bench = Bench()
    number = int(key)
    assert (await bench.publish(key=key))[0].partition == number
    assert (await bench.publish(partition=number))[0].partition == number
    assert {node for node, _, _ in bench.connections.commands} == {f"n{number}:1"}
    assert {(await bench.publish())[0].partition for _ in range(2)} == {0, 1}


async def test_a_closed_producer_sends_nothing() -> None:
    bench = Bench()
    bench.sender.close()
    with pytest.raises(PublishFailed, match="not sent: the producer was closed"):
        await bench.publish(batch_of(3))
    assert (bench.counts, bench.connections.commands) == ((0, 0), [])


async def test_a_publish_that_waits_ends_when_the_producer_closes() -> None:
    bench = Bench(NotLeader("E_FAILED_ON_NOT_LEADER"), partitions=1, retry_wait=10.0, max_retry_wait=20.0)
    errors: list[NsqError] = []

    async def publish() -> None:
        try:
            await bench.publish(partition=0)
        except NsqError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await anyio.wait_all_tasks_blocked()
        assert len(bench.sender.attempts) == 1
        bench.sender.close()
    (error,) = errors
    # the single message was refused after it may have been written
    assert isinstance(error, DeliveryUnknown)
    assert "before the producer was closed" in error.message
    assert (bench.counts, bench.sender.attempts) == ((0, 0), set())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BadMessage("E_BAD_MESSAGE"), "BadMessage"),
        (InvalidInput("no"), "InvalidInput"),
        (ConnectionLost("lost"), "DeliveryUnknown"),
    ],
)
async def test_the_error_of_a_publish_names_its_topic(error: NsqError, raised: str) -> None:
    bench = Bench(error, on_unknown="raise")
    with pytest.raises(NsqError) as caught:
        await bench.publish(batch_of(3))
    assert (type(caught.value).__name__, caught.value.topic) == (raised, "t")
    assert not bench.sender.attempts


async def test_errors_name_partition_and_node() -> None:
    bench = Bench(BadMessage("E_BAD_MESSAGE"))
    with pytest.raises(BadMessage) as caught:
        await bench.publish(partition=1)
    assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 1, "n1:1")
    bench = Bench()
    bench.connections.unreachable = [BadMessage("E_BAD_MESSAGE")]
    with pytest.raises(BadMessage) as caught:
        await bench.publish(partition=1)
    assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 1, "n1:1")


async def test_a_reply_to_another_command_ends_the_connection() -> None:
    bench = Bench(b"nonsense")
    with pytest.raises(DeliveryUnknown, match="nonsense") as caught:
        await bench.publish(partition=1)
    (error,) = bench.connections.failed
    assert (error.topic, error.partition, error.node) == ("t", 1, "n1:1")
    assert caught.value.partition == 1


@pytest.mark.parametrize(("traced", "logged"), [(True, ["nsqext.trace"]), (False, [])])
async def test_only_while_topics_are_traced_receipts_are_logged(
    traced: bool, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(encode_trace_reply(9, 0, 31, 31) if traced else b"OK")
    if traced:
        trace_log.on("t")
    try:
        with caplog.at_level(logging.INFO, "nsqext.trace"):
            await bench.publish(partition=0)
    finally:
        trace_log.off()
    assert [record.name for record in caplog.records] == logged


# Retries


async def test_a_message_for_any_partition_moves_at_once_and_asks_lookup_meanwhile() -> None:
    bench = Bench(PubRefused("E_PUB_FAILED"), NotLeader("E_FAILED_ON_NOT_LEADER"), b"OK", partitions=3)
    request = batch_of(1)
    (receipt,) = await bench.publish(request)
    nodes = [node for node, _, _ in bench.connections.commands]
    assert len(set(nodes)) == 3
    assert receipt.node == nodes[-1]
    assert bench.counts == (1, 2)
    moved = int(nodes[1][1])
    assert ("soon", True, moved) in bench.routes.asked
    assert not [one for one in bench.routes.asked if one[0] == "refresh"]


async def test_a_message_that_has_tried_all_partitions_waits_for_lookup() -> None:
    bench = Bench(*[NotLeader("E_FAILED_ON_NOT_LEADER")] * 5, b"OK", partitions=2)
    await bench.publish(batch_of(1))
    assert [one[0] for one in bench.routes.asked] == ["soon", "refresh", "refresh", "refresh", "refresh"]
    assert bench.counts == (1, 5)


async def test_a_message_that_may_move_waits_after_some_failures() -> None:
    bench = Bench(*[NotLeader("E_FAILED_ON_NOT_LEADER")] * 5, b"OK", partitions=9)
    await bench.publish(batch_of(1))
    assert [one[0] for one in bench.routes.asked] == ["soon", "soon", "soon", "refresh", "refresh"]


@pytest.mark.parametrize(
    ("error", "partition"),
    [
        (NotLeader("E_FAILED_ON_NOT_LEADER"), 1),
        (NotLeader("E_FAILED_ON_NOT_LEADER"), 0),
        (ConnectionFailed("down"), 1),
        (TopicNotExist("E_TOPIC_NOT_EXIST"), 1),
        (NotWritable("E_FAILED_ON_NOT_WRITABLE"), None),
        (TooMuchWaiting("E_PUB_TOO"), None),
    ],
)
async def test_a_chosen_partition_waits_for_lookup(error: NsqError, partition: int | None) -> None:
    bench = Bench(error, b"OK")
    number = partition or 0
    await bench.publish(Batch("t", number, [b"x"], 1))
    asked = [one for one in bench.routes.asked if one[0] == "refresh"]
    assert asked == ([("refresh", True, partition)] if error.refresh_lookup else [])
    assert [node for node, _, _ in bench.connections.commands] == [f"n{number}:1"] * 2
    assert bench.counts == (1, 1)


async def test_a_node_without_partitions_is_no_partition_whose_leader_moved() -> None:
    bench = Bench(ConnectionFailed("down"), b"OK", partitions=0)
    view = PartitionMap("t", meta=TopicMeta(), leaders={}, nodes=(Address("n", 1),))
    bench.routes.made = Route("t", view, ConnectionPool(ConnectionOptions(), ClientEvents()))
    await bench.publish()
    assert [one for one in bench.routes.asked if one[0] == "refresh"] == [("refresh", True, None)]


async def test_an_unknown_outcome_that_is_raised_asks_lookup_for_the_next_publish() -> None:
    bench = Bench(NotLeader("E_FAILED_ON_NOT_LEADER"), on_unknown="raise")
    with pytest.raises(DeliveryUnknown):
        await bench.publish(partition=1)
    assert bench.routes.asked == [("soon", True, 1)]
    for error in (BadMessage("E_BAD_MESSAGE"), PubFailed("E_PUB_FAILED")):
        bench = Bench(error, on_unknown="raise")
        with pytest.raises(NsqError):
            await bench.publish(partition=1)
        assert bench.routes.asked == []


async def test_a_node_that_refused_is_avoided_and_one_that_cannot_be_reached_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    replace_clock(monkeypatch, lambda: now)
    for error, rests in ((PubRefused("E_PUB_FAILED"), True), (BadMessage("E_BAD"), False), (NotSent("x"), False)):
        bench = Bench(error, b"OK")
        with suppress(BadMessage):
            await bench.publish(batch_of(1))
        assert any(target.rest_until for target in bench.routes.made.targets) is rests


async def test_the_extend_support_of_a_topic_is_looked_up_once() -> None:
    bench = Bench()
    bench.routes.upgrades = [False]
    request = MessageRequest(bench.options, "t", OutgoingMessage(b"x", tag="a"))
    with pytest.raises(ExtendNotSupported):
        await bench.publish(request)
    assert (bench.routes.asked, bench.counts) == ([("upgraded", 0)], (0, 0))
    bench = Bench()
    bench.routes.upgrades = [True]
    bench.routes.meta = TopicMeta(2, extend_support=True)
    outdated, bench.routes.made = bench.routes.made, bench.routes.renewed()
    bench.routes.current = lambda topic: outdated  # type: ignore[method-assign]
    request = MessageRequest(bench.options, "t", OutgoingMessage(b"x", tag="a"))
    assert len(await bench.publish(request)) == 1
    assert bench.counts == (1, 1)


async def test_partitions_that_were_added_are_looked_up() -> None:
    bench = Bench(partitions=2)
    bench.routes.upgrades = [False]
    with pytest.raises(InvalidPartition):
        await bench.publish(partition=2)
    assert bench.routes.asked == [("upgraded", 3)]


async def test_a_key_that_leads_to_no_partition_is_refused() -> None:
    bench = Bench(partitions=2)
    bench.routes.key_hash = lambda key, count: 7
    with pytest.raises(InvalidPartition):
        await bench.publish(key=b"k")
    assert bench.routes.asked == []


@repeated_if_paused(0.02)
async def test_a_partition_without_leader_says_that_it_has_no_channel() -> None:
    bench = Bench(timeout=0.1)
    del bench.routes.leaders[1]
    bench.routes.renewed()
    bench.routes.lacks = True
    with pytest.raises(PublishFailed, match="the partition has no channel") as caught:
        await bench.publish(partition=1)
    assert caught.value.partition == 1
    assert [type(error) for error in caught.value.attempts[:2]] == [PartitionUnavailable] * 2
    assert ["no channel" in error.message for error in caught.value.attempts[:2]] == [False, True]
    assert bench.routes.asked[1] == ("lacks", 1), "lookup is asked after the first failure"
    looked = [number for number, one in enumerate(bench.routes.asked) if one == ("lacks", 1)]
    refreshed = [one for one in bench.routes.asked if one[0] == "refresh"]
    assert 1 <= len(looked) <= 1 + len(refreshed) // 6
    bench = Bench(timeout=0.05)
    del bench.routes.leaders[1]
    bench.routes.renewed()
    with pytest.raises(PublishFailed, match="returned no leader"):
        await bench.publish(partition=1)


@repeated_if_paused(0.02)
async def test_a_partition_without_leader_may_get_a_channel_meanwhile() -> None:
    bench, lacking = Bench(timeout=0.1), [True]
    del bench.routes.leaders[1]
    bench.routes.renewed()

    async def lacks_channel(topic: str, partition: int | None) -> bool:
        return bool(lacking and lacking.pop())

    bench.routes.lacks_channel = lacks_channel  # type: ignore[method-assign]
    with pytest.raises(PublishFailed, match="last error: lookup returned no leader") as caught:
        await bench.publish(partition=1)
    assert "no channel" in caught.value.attempts[1].message


async def test_a_topic_that_lookup_does_not_answer_for_is_awaited_while_that_makes_sense() -> None:
    bench = Bench()
    bench.routes.known = False
    bench.routes.answers = [LookupUnreachable("x"), LookupUnreachable("x"), None]
    assert len(await bench.publish()) == 1
    assert bench.counts == (1, 2)
    bench.routes.answers, bench.routes.waits = [LookupUnreachable("x")], False
    with pytest.raises(LookupUnreachable):
        await bench.publish()
    assert bench.counts == (1, 2)


@repeated_if_paused(0.02)
async def test_a_publish_fails_when_its_time_is_over() -> None:
    bench = Bench(NotLeader("E_FAILED_ON_NOT_LEADER"), timeout=0.05)
    with pytest.raises(PublishFailed, match=r"not stored within 0\.05 s; last error: ") as caught:
        await bench.publish(batch_of(2))
    assert len(caught.value.attempts) > 1
    assert bench.counts[0] == 0


async def test_the_time_of_a_publish_begins_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_clock(monkeypatch, lambda: 1000.0)
    bench = Bench(NotLeader("E_FAILED_ON_NOT_LEADER"), timeout=5.0)
    with anyio.fail_after(25), pytest.raises(PublishFailed, match="not stored within 5 s") as caught:
        batch = batch_of(2)
        batch.started = 994.9
        await bench.sender.publish(batch)
    assert caught.value.topic == "t"


async def test_the_first_attempt_uses_the_partition_whose_turn_it_is() -> None:
    bench = Bench(partitions=3)
    route = bench.routes.made
    turns = [route.next().partition for _ in range(3)]
    assert [(await bench.publish())[0].partition for _ in range(3)] == turns


async def test_an_attempt_that_failed_before_counts_with_the_others() -> None:
    bench = Bench(b"OK")
    route = bench.routes.made
    target = route.partitions[0]
    failure = PubRefused("E_PUB_FAILED")
    (receipt,) = await bench.sender.publish_again(bench.request(), route, target, failure)
    assert receipt.partition == 1, "another one than the one that refused"
    assert (failure.topic, failure.partition, failure.node) == ("t", 0, "n0:1")
    assert target.rest_until > 0
    assert bench.counts == (1, 1)


async def test_a_publish_that_fails_while_the_producer_closes_is_not_attempted_again() -> None:
    bench = Bench(PubRefused("E_PUB_FAILED"), b"OK", partitions=3)
    bench.connections.on_command = bench.sender.close
    with pytest.raises(PublishFailed, match="before the producer was closed; last error: E_PUB_FAILED"):
        await bench.publish(batch_of(1))
    assert len(bench.connections.commands) == 1
    bench = Bench(partitions=3)
    route = bench.routes.made
    bench.sender.close()
    with pytest.raises(PublishFailed, match="before the producer was closed; last error: E_PUB_FAILED"):
        await bench.sender.publish_again(bench.request(), route, route.partitions[0], PubRefused("E_PUB_FAILED"))
    assert bench.connections.commands == []


@pytest.mark.parametrize(
    ("error", "pauses"), [(NotLeader("E_FAILED_ON_NOT_LEADER"), []), (TooMuchWaiting("E_PUB_TOO"), [5.0])]
)
async def test_a_message_that_may_move_pauses_only_after_an_overload(
    error: NsqError, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded_sleeps(monkeypatch)
    bench = Bench(error, b"OK", partitions=3, retry_wait=wait_fixed(5), max_retry_wait=1.0)
    await bench.publish(batch_of(1))
    assert found == pauses


@pytest.mark.parametrize(
    ("error", "lookup", "pause"),
    [
        (NotLeader("E_FAILED_ON_NOT_LEADER"), True, 0.1),
        (NotLeader("E_FAILED_ON_NOT_LEADER"), False, 5.0),
        (TooMuchWaiting("E_PUB_TOO_MUCH_WAITING"), True, 5.0),
    ],
)
async def test_pauses_are_short_where_lookup_has_some_of_its_own(
    error: NsqError, lookup: bool, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_sleeps(monkeypatch)
    bench = Bench(error, b"OK", retry_wait=wait_fixed(5), max_retry_wait=1.0)
    bench.routes.asks_lookup = lookup
    await bench.publish(Batch("t", 1, [b"x"], 1))
    assert pauses == [pause]
