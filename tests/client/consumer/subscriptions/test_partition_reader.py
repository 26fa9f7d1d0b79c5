"""A single subscribed connection: commands, messages, and servers that it disconnects from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader, SubscribeRequest
from nsqext.errors import ConnectionLost
from nsqext.errors.server import TopicNotExist
from nsqext.protocol.messages import RawMessage
from nsqext.types import TopicMeta
from tests.support.consumers import eventually
from tests.support.fake_nsqd import message, scripted_node

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.protocol.frames import MessageData
    from tests.support.fake_nsqd import Peer, ScriptedNode

pytestmark = pytest.mark.anyio


def request_to(node: ScriptedNode) -> SubscribeRequest:
    """Return a request for partition 0."""
    return SubscribeRequest("t", "ch", 0, node.address, TopicMeta(1), options=ConsumerOptions())


async def opened(node: ScriptedNode, tasks: TaskGroup) -> tuple[PartitionReader, Peer]:
    """Open a reader, and return it with the server's side of its connection."""
    readers: list[PartitionReader] = []

    async def open_reader() -> None:
        readers.append(await PartitionReader.open(request_to(node)))

    tasks.start_soon(open_reader)
    peer = await node.accept()
    await peer.expect("SUB")
    await peer.answer()
    await eventually(lambda: readers)
    return readers[0], peer


async def test_rdy_is_sent_before_responses_and_messages_are_decoded() -> None:
    async with scripted_node() as node, anyio.create_task_group() as tasks:
        seen: list[bytes] = []

        async def serve() -> None:
            peer = await node.accept()
            await peer.expect("SUB")
            await peer.answer()
            assert (await peer.expect("RDY")).words == [b"RDY", b"5"]
            await peer.raw(message(1, b"one"))
            assert (await peer.expect("RDY")).words == [b"RDY", b"6"]
            await peer.expect("FIN")
            assert peer.received[-1].startswith(b"RDY 6\nFIN ")
            await peer.close()

        tasks.start_soon(serve)
        reader = await PartitionReader.open(request_to(node))

        def take(frames: list[MessageData]) -> None:
            for data in frames:
                received = RawMessage()
                reader.decode(received, data)
                seen.append(received.body)
                reader.pending.append(b"FIN %b\n" % received.id)
            reader.set_ready(6)
            reader.flush()

        reader.set_ready(5)
        reader.flush()
        with pytest.raises(ConnectionLost) as caught:
            await reader.read(take)
        assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 0, str(node))
        assert seen == [b"one"]


async def test_messages_of_an_earlier_rdy_may_still_be_in_flight() -> None:
    async with scripted_node() as node, anyio.create_task_group() as tasks:
        reader, _ = await opened(node, tasks)
        counts = []
        for ready in (0, 100, 1, 120):
            reader.set_ready(ready)
            counts.append(reader.most_in_flight)
        assert counts == [16, 216, 216, 256]
        reader.end()


async def test_two_tasks_that_close_send_one_cls() -> None:
    async with scripted_node() as node, anyio.create_task_group() as tasks:
        reader, peer = await opened(node, tasks)
        tasks.start_soon(reader.close)
        await peer.expect("CLS")
        reader.pending.append(b"FIN 0123456789abcdef\n")
        closed: list[str] = []

        async def close_again() -> None:
            await reader.close()
            closed.append("again")

        tasks.start_soon(close_again)
        await peer.expect("FIN")
        assert closed == []
        await peer.answer(b"CLOSE_WAIT")
        await peer.expect_end()
        await eventually(lambda: closed)


async def test_answers_that_were_added_before_cls_was_acknowledged_are_sent() -> None:
    async with scripted_node() as node, anyio.create_task_group() as tasks:
        reader, peer = await opened(node, tasks)
        tasks.start_soon(reader.stop)
        await peer.expect("CLS")
        reader.pending.append(b"FIN 0123456789abcdef\n")
        await peer.answer(b"CLOSE_WAIT")
        await peer.expect("FIN")
        reader.fail(ConnectionLost("ended"))
        await peer.expect_end()


async def test_a_refused_subscription_names_its_place_and_closes_its_connection() -> None:
    async def refuse(peer: Peer) -> None:
        await peer.expect("SUB")
        await peer.error("E_TOPIC_NOT_EXIST")
        await peer.expect_end()
        ended.append(peer)

    ended: list[Peer] = []
    async with scripted_node(refuse) as node:
        with pytest.raises(TopicNotExist) as caught:
            await PartitionReader.open(request_to(node))
        assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 0, str(node))
        await eventually(lambda: ended)


async def test_the_connection_of_a_server_that_does_not_share_keys_is_replaced_by_one_with_tags() -> None:
    options, meta = ConsumerOptions(dispatch="key_failover"), TopicMeta(1, extend_support=True)
    async with scripted_node() as node, anyio.create_task_group() as tasks:
        request = SubscribeRequest("t", "ch", 0, node.address, meta, options=options)

        async def open_reader() -> None:
            (await PartitionReader.open(request)).end()

        tasks.start_soon(open_reader)
        first, second = await node.accept(), await node.accept()
        await first.expect_end()
        await second.expect("SUB", "SUB_ADVANCED")
        assert (first.identify["dispatch"], second.identify["dispatch"]) == ("key_failover", "shared")
        await second.answer()
