"""Reports of a blocked event loop."""

from __future__ import annotations

import logging
import threading

import pytest

from nsqext import Consumer, Message
from nsqext.client.consumer.handlers.workers import StallWatch
from tests.support.consumers import eventually, quick_sharing, running
from tests.support.fake_nsqd import PLAIN, message, scripted_node
from tests.support.messages import RecordingOwner, make_message


def test_a_handler_that_took_as_long_as_the_delay_is_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(1.0, "the handler work")
    watch.took([make_message(RecordingOwner(), 1)], 2.9)
    watch.took([make_message(RecordingOwner(), 2)], 0.6)
    watch.tick(3.0, [make_message(RecordingOwner(), 3)])
    (record,) = caplog.records
    assert "blocked for 3.0 s; the handler work was handling <Message t[3] id=0000000000000001" in record.message
    assert "id=0000000000000002" not in record.message
    assert record.__dict__["seconds"] == 3.0


@pytest.mark.parametrize(
    ("took", "late", "named"),
    [(0.6, 1.0, True), (0.6, 0.9, None), (1.5, 3.0, False), (1.2, 3.0, False), (1.6, 3.0, True)],
)
def test_a_delay_from_the_limit_on_is_reported_with_the_handlers_that_took_more_than_half_of_it(
    caplog: pytest.LogCaptureFixture, took: float, late: float, named: bool | None
) -> None:
    watch = StallWatch(1.0, "it")
    watch.took([make_message(RecordingOwner())], took)
    watch.tick(late, [])
    assert ("blocked" in caplog.text) is (named is not None)
    assert ("it was handling <Message" in caplog.text) is (named is True)
    caplog.clear()
    watch.tick(1.0, [])
    assert "no handler of this consumer was running" in caplog.text, "it is named once"


@pytest.mark.parametrize(
    ("count", "further"), [(1, ""), (3, ""), (4, " and 1 further messages"), (5, " and 2 further messages")]
)
def test_the_first_messages_of_a_batch_are_named(caplog: pytest.LogCaptureFixture, count: int, further: str) -> None:
    messages = [make_message(RecordingOwner(), number) for number in range(1, count + 1)]
    StallWatch(1.0, "it").tick(3.0, messages)
    assert f"{', '.join(map(repr, messages[:3]))}{further}; heartbeats" in caplog.text


def test_a_handler_that_waits_does_not_block(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch(1.0, "the handler work")
    watch.took([make_message(RecordingOwner())], 60.0)
    watch.tick(0.1, [])
    off = StallWatch(0.0, "the handler work")
    off.took([make_message(RecordingOwner())], 60.0)
    off.tick(60.0, [])
    assert not caplog.records


@pytest.mark.anyio
async def test_a_blocking_handler_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_node(granted=PLAIN) as node:
        options = quick_sharing(block_warning=0.1)
        consumer = Consumer("t", "ch", nsqd=str(node), **options)
        blocker = threading.Event()

        @consumer.handler
        async def busy(message: Message) -> None:
            blocker.wait(0.6)

        async def body() -> None:
            peer = await node.accept_subscribed()
            await peer.raw(message(1))
            await peer.expect("FIN")
            await eventually(lambda: "blocked" in caplog.text)

        with caplog.at_level(logging.WARNING, "nsqext.consumer"):
            await running(consumer, body, node)
        assert (
            "the handler test_a_blocking_handler_is_reported.<locals>.busy was handling <Message t id=" in caplog.text
        )
