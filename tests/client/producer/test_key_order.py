"""Messages of a key are stored in the order of the calls, whatever the calls are and whatever they wait for."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqext import Consumer, OutgoingMessage, Producer
from nsqext.client.middleware import Middleware, SendNext

NODES = 2

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.client.producer.batcher import Batcher
    from nsqext.client.producer.publishing import Publishing

_PROGRAMS = settings(max_examples=20, deadline=None)
_KEY = st.sampled_from("ab")
_CALL = st.one_of(
    st.tuples(st.just("publish"), st.lists(_KEY, min_size=1, max_size=1)),
    st.tuples(st.just("publish_many"), st.lists(_KEY, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["first batcher", "second batcher"]), st.lists(_KEY, min_size=1, max_size=1)),
)
Call = tuple[str, list[str]]
_BACKENDS = ["asyncio", "trio"]


class _Preparing(Middleware):
    """Needs the topic's meta before a message is encoded."""

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
        publishing.on_topic.append(lambda meta: None)
        return await send_next(publishing)


@pytest.mark.parametrize("backend", _BACKENDS)
@_PROGRAMS
@given(
    extend=st.booleans(),
    middleware=st.sampled_from([(), (_Preparing(),)]),
    program=st.lists(_CALL, min_size=2, max_size=12),
    forgotten=st.sets(st.integers(0, 12), max_size=2),
    moved=st.none() | st.integers(0, 12),
)
def test_any_program_of_calls_keeps_the_order_of_keys(
    backend: str,
    extend: bool,
    middleware: tuple[Middleware, ...],
    cluster: Cluster,
    program: list[Call],
    forgotten: set[int],
    moved: int | None,
) -> None:
    """Calls run at the same time on a new producer; its route is forgotten and the leader moves before some of them.

    A route that was not used for 1 ms is forgotten.
    """
    topic = f"t_{uuid4().hex[:10]}"
    cluster.create_topic(topic, partitions=1, replicas=2, extend=extend, channels=["ch"])
    called: dict[str, list[bytes]] = {"a": [], "b": []}
    stored: list[bytes] = []

    async def main() -> None:
        async with AsyncExitStack() as stack:
            stack.enter_context(anyio.fail_after(25))
            producer = await stack.enter_async_context(
                Producer(cluster.lookupd, timeout=20, middleware=middleware, forget_after=0.001)
            )
            batchers = [
                await stack.enter_async_context(producer.batcher(topic, linger=linger, max_count=3, max_pending=4))
                for linger in (0.0, 0.003)
            ]
            tasks = await stack.enter_async_context(anyio.create_task_group())
            for number, call in enumerate(program):
                if number in forgotten:
                    await anyio.sleep(0.004)
                if number == moved:
                    other = next(iter(set(cluster.nodes) - {cluster.leader(topic)}))
                    await anyio.to_thread.run_sync(cluster.move_leader, topic, 0, other)
                messages = [
                    OutgoingMessage(
                        b"%d.%d" % (number, place),
                        key=key,
                    )
                    for place, key in enumerate(call[1])
                ]
                begun = anyio.Event()
                tasks.start_soon(_publish, producer, batchers, topic, call[0], messages, begun)
                await begun.wait()
                for message in messages:
                    called[str(message.key)].append(message.body)

        count = sum(map(len, called.values()))
        with anyio.fail_after(25):
            async with Consumer(topic, "ch", lookupd=cluster.lookupd, max_in_flight=1) as consumer:
                async for received in consumer:
                    stored.append(received.body)
                    await received.finish()
                    if len(set(stored)) == count:
                        break

    anyio.run(main, backend=backend)
    first_copies = list(dict.fromkeys(stored))
    for bodies in called.values():
        assert [body for body in first_copies if body in bodies] == bodies


async def _publish(
    producer: Producer,
    batchers: list[Batcher],
    topic: str,
    kind: str,
    messages: list[OutgoingMessage],
    begun: anyio.Event,
) -> None:
    begun.set()  # the call below begins before any other task runs
    first = messages[0]
    if kind == "publish":
        await producer.publish(topic, first.body, key=first.key)
    elif kind == "publish_many":
        await producer.publish_many(topic, messages)
    else:
        await batchers[kind == "second batcher"].publish(first)
