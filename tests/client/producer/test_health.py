"""Health of a producer: ping, eager connections, statistics, and servers that send unsolicited messages."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import DeliveryUnknown, Lookup, Producer, ProducerStatistics
from nsqext.errors import BatchFailed, ConnectionFailed, InvalidState, LookupFailed, PartitionUnavailable
from nsqext.errors.server import BadMessage
from tests.support.fake_lookupd import node_json
from tests.support.fake_nsqd import error, obey, ok, scripted_lookup, scripted_node
from tests.support.producers import bounded, producing, quick

if TYPE_CHECKING:
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


async def test_ping_connects_to_all_nodes() -> None:
    async with bounded(), scripted_node(obey()) as one, scripted_node(obey()) as two, scripted_lookup() as lookup:
        lookup.set_response("/nodes", {"producers": [node_json(str(one)), node_json(str(two))]})
        async with Producer(str(lookup), **quick()) as producer:
            assert producer.statistics().connections == 0
            await producer.ping()
            await producer.ping()
            assert producer.statistics().connections == 2
        assert len(one.peers) == len(two.peers) == 1
        for unopened in (producer, Producer(str(lookup), **quick())):
            with pytest.raises(InvalidState):
                await unopened.ping()
            with pytest.raises(InvalidState):
                await unopened.meta("t")


async def test_ping_raises_for_a_node_that_cannot_be_reached(closed_address: Address) -> None:
    async with (
        bounded(),
        scripted_node(obey()) as node,
        Producer(nsqd=[str(node), str(closed_address)], **quick()) as producer,
    ):
        with pytest.raises(ConnectionFailed, match=str(closed_address)):
            await producer.ping()


async def test_ping_raises_if_lookup_does_not_answer_or_lists_no_node(closed_address: Address) -> None:
    async with bounded(), scripted_lookup() as lookup:
        async with Producer(str(closed_address), **quick()) as producer:
            with pytest.raises(LookupFailed, match=str(closed_address)):
                await producer.ping()
        lookup.set_response("/nodes", {"producers": []})
        async with Producer(str(lookup), **quick()) as producer:
            with pytest.raises(PartitionUnavailable, match="no node"):
                await producer.ping()


async def test_an_eager_producer_connects_when_it_is_opened(closed_address: Address) -> None:
    async with bounded(), scripted_node(obey()) as node:
        async with Producer(nsqd=[str(node), str(closed_address)], connect=True, **quick()) as producer:
            assert producer.settings["connect"]
            assert producer.statistics().connections == 1
        failing = Producer(nsqd=str(closed_address), connect=True, **quick())
        with pytest.raises(ConnectionFailed, match=str(closed_address)):
            await failing.start()
        with pytest.raises(InvalidState, match="closed"):
            await failing.publish("t", b"x")


async def test_statistics_count_messages_by_outcome() -> None:
    answers: list[Any] = [ok(), error("E_FAILED_ON_NOT_LEADER"), ok(), error("E_BAD_MESSAGE x"), ok(b"nonsense"), ok()]
    many: list[Any] = [ok(), error("E_BAD_MESSAGE x")]
    async with producing({"PUB": answers, "MPUB": many}) as (producer, _, _):
        assert producer.statistics() == ProducerStatistics(
            connections=0,
            pending=0,
            stored=0,
            failed=0,
            unknown=0,
            retries=0,
            bytes_sent=0,
            lookup_age=None,
            lookup_failures=0,
        )
        await producer.publish("t", b"a")
        await producer.publish("t", b"b")
        with pytest.raises(BadMessage):
            await producer.publish("t", b"c")
        with pytest.raises(DeliveryUnknown):
            await producer.publish("t", b"d")
        await producer.publish("t", b"e", key="k")
        await producer.publish_many("t", [b"f", b"g"])
        with pytest.raises(BatchFailed):
            await producer.publish_many("t", [b"h", b"i"])
        await producer.publish("t", b"j")
        found = producer.statistics()
        assert (found.stored, found.failed, found.unknown, found.retries) == (6, 3, 1, 1)
        assert found.bytes_sent == 4 * len(b"PUB t 0\n\0\0\0\1a") + len(b"MPUB t 0\n\0\0\0\0\0\0\0\0\0\0\0\1f\0\0\0\1g")
        assert (found.connections, found.pending, found.lookup_failures) == (1, 0, 0)
        assert found.lookup_age is not None
        assert 0 <= found.lookup_age < 15


async def test_connections_of_ping_are_shared_with_publishes() -> None:
    async with bounded(), scripted_node(obey()) as node, Producer(nsqd=str(node), **quick()) as producer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.ping)
            tasks.start_soon(producer.publish, "t", b"x")
        assert len(node.peers) == 1


async def test_a_start_beside_aclose_leaves_nothing_open() -> None:
    """On trio, the order of the two tasks is random."""
    lookup = Lookup("127.0.0.1:1")

    async def start(producer: Producer) -> None:
        with suppress(InvalidState):
            await producer.start()

    async with bounded():
        for _ in range(20):
            producer = Producer(lookup)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(start, producer)
                tasks.start_soon(producer.aclose)
            await producer.aclose()
            assert lookup.metadata.users == 0
