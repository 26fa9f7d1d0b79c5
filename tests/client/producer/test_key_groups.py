"""Publishes of a key that wait for an earlier one are sent as one batch, and one by one when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from attrs import define, field

from nsqext import Producer
from nsqext.errors import ExtendNotSupported, NsqError
from nsqext.protocol.frames import encode_trace_reply
from tests.support.commands import multi_items, trace_body
from tests.support.fake_nsqd import Peer, error, ok, scripted_lookup, scripted_node, until
from tests.support.producers import bounded, quick
from tests.support.sleeps import settled

pytestmark = pytest.mark.anyio


@define
class _Scene:
    """A publish of a key that waits for its response, with others behind it.

    Attributes:
        peer: the connection.
        outcomes: receipt or error of each publish, by its body.
        scopes: cancel a publish, by its body.
    """

    producer: Producer
    peer: Peer
    tasks: Any
    outcomes: dict[bytes, object] = field(factory=dict)
    scopes: dict[bytes, anyio.CancelScope] = field(factory=dict)

    async def begin(self, body: bytes, publish: Callable[[], Awaitable[object]] | None = None) -> None:
        """Begin a publish of the key behind those before."""
        self.tasks.start_soon(self._publish, body, publish or partial(self.producer.publish, "t", body, key="k"))
        await settled()

    async def _publish(self, body: bytes, publish: Callable[[], Awaitable[object]]) -> None:
        with anyio.CancelScope() as self.scopes[body]:
            try:
                self.outcomes[body] = await publish()
            except NsqError as failure:
                self.outcomes[body] = failure

    async def answer(self, verb: str, body: bytes, response: bytes) -> None:
        """Receive a command with a body, and respond."""
        command = await self.peer.expect(verb)
        received = command.body or b""
        assert (b",".join(multi_items(received)) if verb.startswith("MPUB") else received) == body
        await self.peer.raw(response)

    async def ended(self, *bodies: bytes) -> None:
        await until(lambda: set(bodies) <= set(self.outcomes))

    def kinds(self) -> dict[bytes, str]:
        """Return the types of the outcomes, by body."""
        return {body: type(outcome).__name__ for body, outcome in sorted(self.outcomes.items())}


@asynccontextmanager
async def _waiting(*bodies: bytes, **settings: Any) -> AsyncIterator[_Scene]:
    """Yield the scene in which ``a`` was sent, and the others wait behind it."""
    async with bounded(), scripted_node() as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), **quick(**settings)) as producer, anyio.create_task_group() as tasks:
            tasks.start_soon(producer.publish, "t", b"first")
            peer = await node.accept()
            await peer.expect("PUB")
            await peer.raw(ok())
            await until(lambda: producer.statistics().stored == 1)
            scene = _Scene(producer, peer, tasks)
            for body in (b"a", *bodies):
                await scene.begin(body)
            yield scene


async def test_waiting_publishes_are_one_batch() -> None:
    async with _waiting(b"b", b"c", b"d") as scene:
        await scene.answer("PUB", b"a", ok())
        await scene.answer("MPUB", b"b,c,d", ok())
        await scene.ended(b"a", b"b", b"c", b"d")
        assert set(scene.kinds().values()) == {"Receipt"}
        assert scene.producer.statistics().stored == 5
        await scene.begin(b"last")
        await scene.answer("PUB", b"last", ok())


async def test_what_the_tasks_of_a_batch_publish_next_is_one_batch() -> None:
    async with _waiting() as scene:

        async def both(first: bytes, second: bytes) -> object:
            await scene.producer.publish("t", first, key="k")
            return await scene.producer.publish("t", second, key="k")

        await scene.begin(b"b", partial(both, b"b", b"d"))
        await scene.begin(b"c", partial(both, b"c", b"e"))
        await scene.answer("PUB", b"a", ok())
        await scene.answer("MPUB", b"b,c", ok())
        following = await scene.peer.expect("MPUB")
        assert sorted(multi_items(following.body or b"")) == [b"d", b"e"]  # trio wakes tasks in any order
        await scene.peer.raw(ok())
        await scene.ended(b"a", b"b", b"c")


@pytest.mark.parametrize("failure", ["E_MPUB_FAILED disk", "E_FAILED_ON_NOT_LEADER"])
async def test_after_a_failed_batch_each_is_published_alone_in_order(failure: str) -> None:
    async with _waiting(b"b", b"c", b"d") as scene:
        await scene.answer("PUB", b"a", ok())
        await scene.answer("MPUB", b"b,c,d", error(failure))
        for body in (b"b", b"c", b"d"):
            await scene.answer("PUB", body, ok())
        await scene.ended(b"b", b"c", b"d")
        assert set(scene.kinds().values()) == {"Receipt"}
        assert scene.producer.statistics().stored == 5


async def test_publishes_that_need_a_response_of_their_own_are_sent_alone() -> None:
    async with _waiting(b"b") as scene:
        await scene.begin(b"traced", partial(scene.producer.publish, "t", b"traced", key="k", trace_id=7))
        await scene.begin(b"c")
        await scene.begin(b"headed", partial(scene.producer.publish, "t", b"headed", key="k", headers={"a": "b"}))
        await scene.begin(b"many", partial(scene.producer.publish_many, "t", [b"1", b"2"], key="k"))
        await scene.begin(b"d")
        await scene.answer("PUB", b"a", ok())
        await scene.answer("PUB", b"b", ok())
        await scene.answer("PUB_TRACE", trace_body(7, b"traced"), ok(encode_trace_reply(2, 7, 0, 36)))
        await scene.answer("PUB", b"c", ok())
        await scene.answer("MPUB", b"1,2", ok())
        await scene.answer("PUB", b"d", ok())
        await scene.ended(b"traced", b"headed", b"many", b"d")
        assert isinstance(scene.outcomes[b"headed"], ExtendNotSupported)


@pytest.mark.parametrize("cancelled", [b"b", b"c"])
async def test_a_cancelled_publish_takes_nothing_from_its_batch(cancelled: bytes) -> None:
    async with _waiting(b"b", b"c", b"d") as scene:
        await scene.answer("PUB", b"a", ok())
        command = await scene.peer.expect("MPUB")
        scene.scopes[cancelled].cancel()
        await scene.peer.raw(ok())
        left = {b"b", b"c", b"d"} - {cancelled}
        await scene.ended(*left)
        assert command.body is not None
        assert cancelled not in scene.outcomes
        await scene.begin(b"last")
        await scene.answer("PUB", b"last", ok())


async def test_a_cancelled_publish_that_waits_is_not_sent() -> None:
    async with _waiting(b"b", b"c", b"d") as scene:
        scene.scopes[b"c"].cancel()
        await settled()
        await scene.answer("PUB", b"a", ok())
        await scene.answer("MPUB", b"b,d", ok())
