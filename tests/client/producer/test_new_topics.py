"""Topics that lookup does not know, and nodes without lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Producer, PublishFailed
from nsqext.errors import TopicNotFound
from tests.support.fake_lookupd import node_json
from tests.support.fake_nsqd import PLAIN, obey, scripted_lookup, scripted_node, until
from tests.support.machine_pauses import unless_paused
from tests.support.producers import bodies, bounded, quick

if TYPE_CHECKING:
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


async def test_a_topic_unknown_to_lookup_is_published_to_nodes_of_the_original_nsq() -> None:
    async with bounded(), scripted_node(obey(), granted=PLAIN) as node, scripted_lookup() as lookup:
        lookup.set_response("/nodes", {"producers": [node_json(str(node)) | {"version": "1.3.0"}]})
        async with Producer(str(lookup), **quick()) as producer:
            assert (await producer.publish("new", b"x")).partition is None
            lookup.set_leaders(nodes=[node])
            assert (await producer.publish("new", b"y")).node == str(node)
        assert bodies(node) == [b"x", b"y"]
        lookup.refuse()
        lookup.set_response("/nodes", {"producers": [node_json(str(node))]})
        async with Producer(str(lookup), **quick()) as producer:
            with pytest.raises(TopicNotFound):
                await producer.publish("new", b"x")


@pytest.mark.parametrize("many", [False, True])
async def test_a_new_topic_waits_for_the_first_node_of_a_cluster_that_starts(many: bool) -> None:
    async with bounded(), scripted_node(obey(), granted=PLAIN) as node, scripted_lookup() as lookup:
        lookup.refuse(404, "TOPIC_NOT_FOUND")
        lookup.set_response("/nodes", {"producers": []})
        async with Producer(str(lookup), **quick()) as producer, anyio.create_task_group() as tasks:
            if many:
                tasks.start_soon(producer.publish_many, "new", [b"x"])
            else:
                tasks.start_soon(producer.publish, "new", b"x")
            await until(lambda: sum(question.startswith("/nodes") for question in lookup.questions) > 2)
            lookup.set_response("/nodes", {"producers": [node_json(str(node)) | {"version": "1.3.0"}]})
        assert len(node.commands) == 1


async def test_a_burst_of_new_topics_survives_a_failed_request_for_nodes() -> None:
    async with bounded(), scripted_node(obey(), granted=PLAIN) as node, scripted_lookup() as lookup:
        lookup.set_response("/nodes", {"status_code": 500, "status_txt": "INTERNAL_ERROR"})
        async with Producer(str(lookup), **quick()) as producer, anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(producer.publish, f"new{number}", b"x")
            await until(lambda: any(question.startswith("/nodes") for question in lookup.questions))
            lookup.set_response("/nodes", {"producers": [node_json(str(node)) | {"version": "1.3.0"}]})
            await until(lambda: len(node.commands) == 40)
        assert sum(question.startswith("/nodes") for question in lookup.questions) < 20, "the topics share requests"


async def test_a_cluster_without_a_running_node_is_an_error() -> None:
    async with bounded(), scripted_lookup() as lookup:
        lookup.refuse(404, "TOPIC_NOT_FOUND")
        lookup.set_response("/nodes", {"producers": []})
        text = r"not stored within .* no node at all .*topic new.*start an nsqd"

        async def attempt(number: int) -> None:
            async with Producer(str(lookup), **quick(timeout=0.3)) as producer:
                with pytest.raises(PublishFailed, match=text):
                    await producer.publish("new", b"x")
                with pytest.raises(PublishFailed, match=text):
                    await producer.publish_many("new", [b"x"])

        await unless_paused(attempt, 0.1)


async def test_several_nodes_without_lookup(closed_address: Address) -> None:
    async with bounded(), scripted_node(obey(), granted=PLAIN) as one, scripted_node(obey(), granted=PLAIN) as two:
        async with Producer(nsqd=[str(one), str(closed_address), str(two)], **quick()) as producer:
            for _ in range(9):
                await producer.publish("t", b"x")
        assert len(one.commands) + len(two.commands) == 9
        assert min(len(one.commands), len(two.commands)) >= 3
