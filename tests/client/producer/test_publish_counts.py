"""Every message whose publish raises an error counts once, as failed or unknown, whichever way it takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from nsqext import BatchFailed, DeliveryUnknown, NsqError, OutgoingMessage, Producer, Receipt
from nsqext.client.producer.sender import Counters
from nsqext.errors import InvalidBody, PublishFailed
from nsqext.errors.server import BadMessage
from nsqext.middleware import Middleware, Publishing, SendNext
from tests.support.fake_nsqd import Answer, error, ok
from tests.support.producers import producing

pytestmark = pytest.mark.anyio


class _AsksForTopic(Middleware):
    async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
        publishing.on_topic.append(lambda meta: None)
        return await send_next(publishing)


async def _keyed_batch(producer: Producer, body: bytes) -> None:
    await producer.publish_many("t", [OutgoingMessage(body, key=b"k"), OutgoingMessage(body, key=b"k")])


async def _added(producer: Producer, body: bytes) -> None:
    async with producer.batcher("t") as batcher:
        await batcher.add(body)


async def _batcher_publish(producer: Producer, body: bytes) -> None:
    async with producer.batcher("t") as batcher:
        await batcher.publish(body)


WAYS: dict[str, tuple[int, Callable[[Producer, bytes], Awaitable[Any]]]] = {
    "publish": (1, lambda producer, body: producer.publish("t", body)),
    "publish with a key": (1, lambda producer, body: producer.publish("t", body, key=b"k")),
    "publish later by a relay": (1, lambda producer, body: producer.publish("t", body, delay=5.0, via="relay")),
    "cancel_delayed": (1, lambda producer, body: producer.cancel_delayed("i" * len(body))),
    "publish_many": (2, lambda producer, body: producer.publish_many("t", [body, body])),
    "publish_many with a key": (2, _keyed_batch),
    "Batcher.add": (1, _added),
    "Batcher.publish": (1, _batcher_publish),
}


@pytest.mark.parametrize("middleware", [(), (_AsksForTopic(),)], ids=["plain", "middleware"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_publish_that_waits_in_vain_for_lookup_counts_as_failed(
    way: str, middleware: tuple[Middleware, ...]
) -> None:
    messages, call = WAYS[way]
    times = {"timeout": 0.05, "lookup_timeout": 0.05}
    async with Producer("127.0.0.1:1", middleware=middleware, **times) as producer:  # type: ignore[arg-type]
        with pytest.raises(NsqError):
            await call(producer, b"x")
        found = producer.statistics()
    assert (found.stored, found.failed, found.unknown) == (0, messages, 0)


@pytest.mark.parametrize(
    ("answer", "counts"), [(error("E_BAD_MESSAGE x"), (1, 0)), (ok(b"NO"), (0, 1))], ids=["refused", "not readable"]
)
@pytest.mark.parametrize("way", [way for way in WAYS if "relay" not in way and "cancel" not in way])
async def test_a_publish_counts_by_its_error(way: str, answer: bytes, counts: tuple[int, int]) -> None:
    messages, call = WAYS[way]
    script: dict[str, Answer | list[Answer]] = {"PUB": [ok(), answer], "MPUB": answer}
    async with producing(script, on_unknown="raise") as (producer, _, _):
        await producer.publish("t", b"x")  # the next ones need no lookup
        with pytest.raises(NsqError):
            await call(producer, b"x")
        found = producer.statistics()
    assert (found.stored, found.failed, found.unknown) == (1, *(messages * count for count in counts))


@pytest.mark.parametrize("way", [way for way in WAYS if "cancel" not in way])
async def test_a_refused_argument_does_not_count(way: str) -> None:
    _, call = WAYS[way]
    async with producing({}) as (producer, _, _):
        with suppress(InvalidBody, BatchFailed):
            await call(producer, b"")
        found = producer.statistics()
    assert (found.stored, found.failed, found.unknown) == (0, 0, 0)


def test_messages_of_a_batch_count_by_their_outcomes() -> None:
    counters = Counters()
    stored = Receipt("t", 0, "n1")
    unsent = PublishFailed("not sent")
    counters.count(
        BatchFailed([stored, BadMessage("E_BAD_MESSAGE"), unsent, DeliveryUnknown("lost"), InvalidBody("")]), 5
    )
    assert (counters.stored, counters.failed, counters.unknown) == (0, 2, 1)
