"""A lookup service that is not up yet, slow or stale, and topics that it does not know."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import OutgoingMessage, Producer
from nsqext.errors import BatchFailed, PublishFailed, TopicNotReady
from nsqext.errors.server import ExtendRefused
from tests.support.fake_lookupd import node_json
from tests.support.fake_nsqd import PLAIN, error, obey, ok, scripted_lookup, scripted_node, until
from tests.support.machine_pauses import unless_paused
from tests.support.producers import bodies, bounded, quick

if TYPE_CHECKING:
    from tests.support.fake_nsqd import ScriptedLookup

pytestmark = pytest.mark.anyio


def _lookups(lookup: ScriptedLookup) -> int:
    return sum(question.startswith("/lookup?") for question in lookup.questions)


async def test_a_burst_of_first_publishes_waits_for_a_slow_lookup_service() -> None:
    """More topics than requests at a time, so that the last lookups wait longer than the timeout of a request."""
    options = quick(timeout=12.0, lookup_request_timeout=0.7, lookup_max_concurrent=2)

    async def attempt(number: int) -> None:
        async with bounded(), scripted_node(obey()) as node, scripted_lookup() as lookup:
            lookup.set_leaders({0: node}, num=1)
            async with Producer(str(lookup), **options) as producer:
                await producer.publish("first", b"x")
                lookup.delay = 0.1
                async with anyio.create_task_group() as tasks:
                    for topic in range(16):
                        tasks.start_soon(producer.publish, f"t{topic}", b"x")
                assert producer.statistics().stored == 17
        assert len(bodies(node)) == 17
        assert sum("topic=t" in question for question in lookup.questions) == 16, "a request was repeated"

    await unless_paused(attempt, 0.2)


@pytest.mark.parametrize(("many", "listed"), [(False, False), (True, False), (False, True), (True, True)])
async def test_keys_for_a_topic_that_was_created_again_without_extend_support_are_published(
    many: bool, listed: bool
) -> None:
    """The key becomes no header then; where lookup still lists the support, the server's refusal is reported."""
    refused = error("E_EXT_NOT_SUPPORT")
    async with bounded(), scripted_lookup() as lookup:
        async with scripted_node(obey({"PUB_EXT": [ok(), refused], "MPUB_EXT": refused})) as node:
            lookup.set_leaders({0: node}, num=1, extend=True)
            async with Producer(str(lookup), **quick()) as producer:
                await producer.publish("t", b"first", key="a")
                lookup.set_leaders({0: node}, num=1, extend=listed)
                kind = BatchFailed if many else ExtendRefused
                with pytest.raises(kind, match="E_EXT_NOT_SUPPORT") if listed else nullcontext():
                    if many:
                        await producer.publish_many("t", [b"x", b"y"], key="a")
                    else:
                        await producer.publish("t", b"x", key="a")
                counted = producer.statistics()
        count = 2 if many else 1
        assert (counted.stored, counted.failed) == ((1, count) if listed else (1 + count, 0))
        verbs = [command.words[0].decode() for command in node.commands]
        verb = "MPUB" if many else "PUB"
        assert verbs == (["PUB_EXT", f"{verb}_EXT"] if listed else ["PUB_EXT", f"{verb}_EXT", verb])


@pytest.mark.parametrize("batch_of", [0, 1, 2])
async def test_a_topic_without_channel_is_not_ready(batch_of: int) -> None:
    """The publish fails immediately, and succeeds after a channel was created."""
    async with bounded(), scripted_node(obey()) as node, scripted_lookup() as lookup:
        lookup.refuse(message="Topic has no channel")
        async with Producer(str(lookup), **quick(timeout=60.0)) as producer:
            for _ in range(2):
                with pytest.raises(TopicNotReady, match=r"no channel.*topic t.*create a channel") as caught:
                    if batch_of:
                        await producer.publish_many("t", [b"x"] * batch_of)
                    else:
                        await producer.publish("t", b"x")
                assert caught.value.topic == "t"
            assert producer.statistics().lookup_failures == 0
            lookup.set_leaders({0: node}, num=1)
            await producer.publish("t", b"x")
        assert bodies(node) == [b"x"]


async def test_a_call_that_waits_for_an_upgrade_when_the_producer_closes_is_reported_as_not_published() -> None:
    async with (
        bounded(),
        scripted_node(obey()) as node,
        scripted_lookup() as lookup,
        anyio.create_task_group() as tasks,
    ):
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), **quick(close_timeout=0.0)) as producer:
            await producer.publish("t", b"plain")
            lookup.delay = 60.0
            before = _lookups(lookup)

            async def publish() -> None:
                with pytest.raises(PublishFailed, match="before the producer was closed"):
                    await producer.publish_many("t", [OutgoingMessage(b"x", tag="a")])

            tasks.start_soon(publish)
            await until(lambda: _lookups(lookup) > before)
        tasks.cancel_scope.deadline = anyio.current_time() + 10.0


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
