"""A topic of the original NSQ that is deleted while a consumer runs stays deleted until it is published to again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.to_thread import run_sync

from nsqext import Admin, Consumer, ConsumerSettings, Producer
from tests.support import plain_http
from tests.support.consumers import eventually
from tests.support.messages import finish_all
from tests.support.transports import http_of_original

if TYPE_CHECKING:
    from tests.support.cluster import Original

pytestmark = pytest.mark.anyio

_QUICK: ConsumerSettings = {"lookup_poll_interval": 0.5, "reconnect_wait": 0.001}
_OBSERVED = 1.5  # seconds in which the topic must not come back


def _post(address: str, path: str, **params: str) -> None:
    assert plain_http.post(f"http://{address}{path}", params=params).status_code in (200, 404)


def _holders(nodes: Sequence[str], topic: str) -> list[str]:
    """Return the nodes that have a topic."""
    found = {node: plain_http.get(f"http://{node}/stats", params={"format": "json"}).json() for node in nodes}
    stats = {node: body.get("data", body)["topics"] or () for node, body in found.items()}
    return [node for node, topics in stats.items() if any(one["topic_name"] == topic for one in topics)]


def _delete_as_nsqadmin(lookupd: Sequence[str], nodes: Sequence[str], topic: str) -> None:
    for address in lookupd:
        _post(address, "/topic/delete", topic=topic)
    _delete_at_nodes(lookupd, nodes, topic)


def _delete_at_nodes(_: Sequence[str], nodes: Sequence[str], topic: str) -> None:
    for node in nodes:
        _post(node, "/topic/delete", topic=topic)


def _tombstone(lookupd: Sequence[str], nodes: Sequence[str], topic: str) -> None:
    for node in nodes:
        for address in lookupd:
            _post(address, "/topic/tombstone", topic=topic, node=node)
        _post(node, "/topic/delete", topic=topic)


async def _stays_deleted(
    original: Original,
    selection: str,
    topic: str,
    channel: str,
    delete: Callable[[Sequence[str], Sequence[str], str], None] | None,
) -> None:
    nodes = await http_of_original(original)
    ended: list[str] = []
    for node in nodes:
        await run_sync(partial(_post, node, "/topic/create", topic=topic))
    async with Admin(original.lookupd) as admin:
        consumer = Consumer(selection, channel, original.lookupd, **_QUICK)
        consumer.on_event(lambda event: ended.append(event.node) if event.kind == "disconnected" else None)
        async with consumer:
            await eventually(lambda: len(consumer.statistics().connections) == len(nodes))
            if delete is None:
                await admin.delete_topic(topic)
            else:
                await run_sync(delete, original.lookupd, nodes, topic)
            await eventually(lambda: len(ended) >= len(nodes))
            with anyio.move_on_after(_OBSERVED):
                while True:
                    assert await run_sync(_holders, nodes, topic) == []
                    await anyio.sleep(0.05)
            publish = f"http://{nodes[0]}/pub"
            await run_sync(lambda: plain_http.post(publish, params={"topic": topic}, content=b"again"))
            (message,) = await finish_all(consumer, 1)
            assert (message.topic, message.body) == (topic, b"again")
            await admin.delete_topic(topic)


@pytest.mark.parametrize("delete", [None, _delete_as_nsqadmin, _delete_at_nodes, _tombstone])
async def test_a_deleted_topic_stays_deleted(
    original: Original, delete: Callable[[Sequence[str], Sequence[str], str], None] | None
) -> None:
    topic = f"contract_{token_hex(4)}"
    await _stays_deleted(original, topic, topic, "ch", delete)


async def test_a_topic_of_a_pattern_stays_deleted(original: Original) -> None:
    prefix = f"contract_{token_hex(4)}"
    await _stays_deleted(original, f"{prefix}.*", f"{prefix}.one", "ch", None)


async def test_an_ephemeral_topic_stays_deleted(original: Original) -> None:
    topic = f"contract_{token_hex(4)}#ephemeral"
    await _stays_deleted(original, topic, topic, "ch#ephemeral", None)


async def test_a_topic_that_its_nodes_deleted_is_created_by_the_next_publish(original: Original) -> None:
    topic = f"contract_{token_hex(4)}"
    nodes = await http_of_original(original)
    for node in nodes:
        await run_sync(partial(_post, node, "/topic/create", topic=topic))
    async with Producer(original.lookupd, timeout=10) as producer, Admin(original.lookupd) as admin:
        await producer.publish(topic, b"before")
        await run_sync(_delete_at_nodes, original.lookupd, nodes, topic)
        async with Producer(original.lookupd, timeout=10) as other:
            await other.publish(topic, b"again")
        assert len(await run_sync(_holders, nodes, topic)) == 1
        await admin.delete_topic(topic)
