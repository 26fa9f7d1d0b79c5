"""Mistakes that an app reports when it is written or started, each once."""

from __future__ import annotations

import logging
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import App, Consumer, Message, MessageBatch, Producer, Reject, sync
from nsqext.app import Router, start_checks
from nsqext.app.start_checks import warn_of_drops_once, warn_of_unwritable
from nsqext.client.consumer.options import FailureOptions
from nsqext.errors import ExtendNotSupported, InvalidName, InvalidSetting, LookupFailed, TopicNotReady
from nsqext.middleware import CallNext, Handling, Middleware
from tests.support.apps import nothing

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A fresh topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, channels=["ch"])
    return name


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Return the warnings that contain a text."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message for message in found if text in message]


async def test_two_handlers_of_the_same_topic_and_channel_are_refused() -> None:
    app = App(NOWHERE)
    app.handler(["orders", "refunds"], "billing")(nothing)
    for topics in ("refunds", "ord*", ["other", "orders"]):
        with pytest.raises(InvalidSetting, match=r"two handlers consume (orders|refunds)/billing.*use another channel"):
            app.handler(topics, "billing")(nothing)
    app.handler("pay*", "billing")(nothing)
    with pytest.raises(InvalidSetting, match=r"two handlers consume pay\*/billing"):
        app.handler("pay*", "billing")(nothing)
    with pytest.raises(InvalidSetting, match="two handlers consume payments/billing"):
        app.handler("payments", "billing")(nothing)
    app.handler("orders", "audit")(nothing)
    app.handler("other", "billing")(nothing)
    assert len(app.consumers) == 4


async def test_a_router_refuses_a_tag_that_no_app_can_use() -> None:
    with pytest.raises(InvalidName, match="tag"):
        Router().handler("orders", "billing", tag="")(nothing)


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ({"tag": "a"}, {"tag": "b"}, False),
        ({"tag": "a"}, {}, False),
        ({"tag": "a"}, {"tag": "a"}, True),
        ({"partitions": (0,)}, {"partitions": (1,)}, False),
        ({"partitions": (0,)}, {"partitions": (0,)}, True),
        ({"partitions": (0, 1)}, {"partitions": (1, 2)}, True),
        ({"partitions": (0,)}, {}, True),
        ({"max_attempts": 2}, {"max_attempts": 3}, True),
    ],
)
async def test_handlers_of_the_same_channel_have_different_tags_or_partitions(
    first: dict[str, Any], second: dict[str, Any], refused: bool
) -> None:
    app = App(NOWHERE)
    app.handler("orders", "billing", **first)(nothing)
    try:
        app.handler("orders", "billing", **second)(nothing)
    except InvalidSetting as error:
        assert refused, error
    else:
        assert not refused


async def test_a_second_parameter_without_annotation_is_refused() -> None:
    app = App(NOWHERE)

    async def bare(message: Message, order) -> None:  # type: ignore[no-untyped-def]
        pass

    async def two_bare(message, order) -> None:  # type: ignore[no-untyped-def]
        pass

    for function in (bare, two_bare):
        with pytest.raises(
            InvalidSetting, match=r"the parameter order of the handler .* has no annotation.*order: Order"
        ):
            app.handler("orders", "billing")(function)

    @app.handler("orders", "billing")
    async def one_bare(message) -> None:  # type: ignore[no-untyped-def]
        pass


async def test_each_missing_topic_of_a_publisher_is_one_warning(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    existing, *missing = (f"{letter}_{token_hex(4)}" for letter in "emmm")
    cluster.create_topic(existing, channels=["ch"])
    app = App(cluster.lookupd)
    app.publishes(missing[2])

    @app.handler(topic, "ch")
    @app.publisher(existing)
    @app.publisher(missing[0])
    @app.publisher(missing[1])
    async def handle(message: Message) -> None:
        pass

    with anyio.fail_after(25):
        async with app:
            pass
    found = warnings(caplog, "the app cannot publish")
    assert [name for name in sorted(missing) if any(name in text for text in found)] == sorted(missing)
    assert len(found) == len(missing)


async def test_a_topic_that_is_not_ready_is_a_warning_and_the_next_one_is_checked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def meta(topic: str) -> None:
        raise TopicNotReady("no leader", topic=topic)

    await warn_of_unwritable(cast("Producer", SimpleNamespace(meta=meta)), ["bills", "orders"])
    assert len(warnings(caplog, "the app cannot publish: no leader")) == 2


async def test_a_lookup_service_that_is_down_is_no_warning_of_each_topic(caplog: pytest.LogCaptureFixture) -> None:
    """The consumers report it."""
    asked: list[str] = []

    async def meta(topic: str) -> None:
        asked.append(topic)
        raise LookupFailed("down")

    await warn_of_unwritable(cast("Producer", SimpleNamespace(meta=meta)), ["bills", "orders"])
    assert (asked, caplog.records) == (["bills"], [])


def test_consumers_of_an_app_warn_of_dropped_messages_together(caplog: pytest.LogCaptureFixture) -> None:
    consumers = [Consumer(topic, "ch", NOWHERE, max_attempts=3) for topic in ("bills", "orders")]
    for _ in range(2):
        warn_of_drops_once(consumers, [FailureOptions(max_attempts=3)] * 2)
    assert len(warnings(caplog, "messages of bills/ch, orders/ch")) == 1
    assert not any(one.warns_of_drops for one in consumers)


async def test_a_lookup_service_that_does_not_respond_does_not_hold_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "_CHECK_TIMEOUT", 0.01)
    silent = SimpleNamespace(meta=lambda topic: anyio.sleep_forever())
    with anyio.fail_after(25):
        await warn_of_unwritable(cast("Producer", silent), ["bills"])


@pytest.mark.parametrize(
    ("kind", "text"), [("missing", "cannot be published"), ("plain", "Admin.upgrade_topic"), ("extend", "")]
)
async def test_the_dead_letter_topic_is_checked_at_the_start(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture, kind: str, text: str
) -> None:
    dead = f"d_{token_hex(4)}"
    if kind != "missing":
        cluster.create_topic(dead, extend=kind == "extend", channels=["ch"])
    consumer = Consumer(topic, "ch", cluster.lookupd, max_attempts=1, dead_letter=dead)
    consumer.handler(reject)
    async with Producer(cluster.lookupd) as producer, consumer:
        if kind == "extend":
            await producer.publish(topic, b"x")
            await received_from(cluster, dead)
        else:
            await logged(caplog, "dead letters")
    found = warnings(caplog, "dead letters")
    assert len(found) == (kind != "extend"), found
    assert all(text in one and dead in one for one in found)


async def reject(message: Message) -> None:
    """Reject every message."""
    raise Reject


async def received_from(cluster: Cluster, topic: str) -> None:
    """Receive a message of a topic."""
    consumer = Consumer(topic, "ch", cluster.lookupd)
    with anyio.fail_after(25):
        async with consumer:
            await (await anext(consumer)).finish()


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait for a warning."""
    with anyio.fail_after(25):
        while not warnings(caplog, text):  # noqa: ASYNC110 - a log record is no event
            await anyio.sleep(0.01)


@pytest.mark.parametrize("dead_letter", [None, "dead"])
@pytest.mark.parametrize("asked", [False, True])
async def test_max_attempts_on_an_ordered_topic_is_one_warning_that_names_reject_ordered(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, dead_letter: str | None, asked: bool
) -> None:
    name = f"o_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, ordered=True, channels=["ch"])
    consumer = Consumer(name, "ch", cluster.lookupd, max_attempts=3, dead_letter=dead_letter, reject_ordered=asked)
    consumer.handler(nothing)
    async with consumer:
        assert len(consumer.connections) == 2
    found = warnings(caplog, "the topic is ordered")
    assert len(found) == (not asked)
    assert all("set reject_ordered=True" in one for one in found)
    assert all(("max_attempts and dead_letter" in one) == bool(dead_letter) for one in found)


async def test_reject_on_an_ordered_topic_names_reject_ordered(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"o_{token_hex(4)}"
    cluster.create_topic(name, ordered=True, channels=["ch"])
    consumer = Consumer(name, "ch", cluster.lookupd, requeue_delay=0.0, backoff="off")

    @consumer.handler
    async def handle(message: Message) -> None:
        if message.attempts == 1:
            raise Reject
        consumer.stop()

    async with Producer(cluster.lookupd) as producer:
        await producer.publish(name, b"x")
    with anyio.fail_after(25):
        await consumer.serve()
    (found,) = warnings(caplog, "an ordered message is not rejected")
    assert "set reject_ordered=True" in found


async def test_a_missing_dead_letter_topic_of_several_handlers_is_one_warning(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    name, dead = f"t_{token_hex(4)}", f"dead_{token_hex(4)}"
    cluster.create_topic(name, channels=["a", "b", "c"])
    app = App(cluster.lookupd, max_attempts=3)
    for channel in ("a", "b"):
        app.handler(name, channel, dead_letter=dead)(nothing)
    app.handler(name, "c", dead_letter=f"{dead}_other")(nothing)
    async with app:
        await logged(caplog, f"{dead}_other")
        await logged(caplog, f"topic {dead}, ")
        await anyio.sleep(0.2)  # for a second warning, which has no event
    found = warnings(caplog, "dead letters cannot be published")
    assert len(found) == 2, found


async def returns_text(message: Message) -> str:
    """Return what is not used."""
    return "done"


async def returns_without_annotation(message: Message):  # type: ignore[no-untyped-def]
    """Return what is not used."""
    return {"done": True}


async def returns_despite_annotation(message: Message) -> None:
    """Return a value, against the annotation."""
    return cast("None", message.body)


async def returns_of_body(body: str) -> int:
    """Return what is not used, after decoding."""
    return len(body)


@pytest.mark.parametrize(
    ("handler", "warned"),
    [
        (returns_text, "str"),
        (returns_without_annotation, "dict"),
        (returns_of_body, "int"),
        (returns_despite_annotation, ""),
        (nothing, ""),
    ],
)
@pytest.mark.parametrize("where", ["app", "middleware", "consumer", "published"])
async def test_a_result_that_nothing_uses_is_one_warning_that_names_the_handler(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture, handler: Any, warned: str, where: str
) -> None:
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [b"one", b"two"])
    subject: App | Consumer
    if where == "consumer":
        subject = Consumer(topic, "ch", cluster.lookupd)
        subject.handler(handler)
        consumer = subject
    else:
        subject = App(cluster.lookupd, middleware=[Around()] if where == "middleware" else ())
        subject.handler(topic, "ch")(handler)
        if where == "published":
            cluster.create_topic(f"{topic}_results", channels=["ch"])
            subject.publisher(f"{topic}_results")(handler)
        (consumer,) = subject.consumers
    async with subject:
        with anyio.fail_after(25):
            while consumer.statistics().finished < 2:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)
    found = warnings(caplog, "is not used")
    if not warned or where == "published":
        assert not found
    else:
        (text,) = found
        assert f"the handler {handler.__qualname__} returned a value ({warned})" in text
        assert "@app.publisher(TOPIC)" in text


async def test_a_result_of_a_batch_handler_or_a_blocking_handler_is_one_warning(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [b"one", b"two"])
        batches = Consumer(topic, "ch", cluster.lookupd)

        @batches.batch_handler()
        async def handle_batch(batch: MessageBatch) -> int:
            batches.stop()
            return len(batch)

        with anyio.fail_after(25):
            await batches.serve()
        await producer.publish_many(topic, [b"one", b"two"])
    blocking = await anyio.to_thread.run_sync(lambda: sync.Consumer(topic, "ch", cluster.lookupd))
    handled: list[bytes] = []

    @blocking.handler
    def handle_one(message: sync.Message) -> str:
        handled.append(message.body)
        if len(handled) == 2:
            blocking.stop()
        return "done"

    await anyio.to_thread.run_sync(blocking.run)
    for name, kind in (("handle_batch", "int"), ("handle_one", "str")):
        assert len(warnings(caplog, f"{name} returned a value ({kind}), which is not used")) == 1


class Around(Middleware):
    """A middleware that changes nothing."""

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler."""
        return await call_next(handling)


async def test_a_message_above_max_frame_size_makes_an_app_not_ready_and_says_why(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(cluster.lookupd, max_frame_size=1000, reconnect_wait=0.01, max_reconnect_wait=0.05)
    app.handler(topic, "ch")(nothing)
    async with app:
        assert app.health().ready
        async with Producer(cluster.lookupd) as producer:
            receipt = await producer.publish(topic, b"x" * 2000)
        with anyio.fail_after(25):
            while app.health().ready:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)
        (consumer,) = app.consumers
        with anyio.fail_after(25):
            while consumer.statistics().reconnects < 3:
                assert not app.health().ready
                await anyio.sleep(0.001)
        (reason,) = app.health().reasons
        assert consumer.statistics().blocked == (reason.removeprefix(f"{topic}/ch: "),)
    (text, *_) = warnings(caplog, "subscription ended")
    for shown in (reason, text):
        assert "bytes is larger than max_frame_size, 1000: nothing behind this message is received" in shown
        assert f"topic {topic}, partition {receipt.partition}, node {receipt.node}" in shown
        assert "raise the setting max_frame_size" in shown


async def test_an_app_is_not_ready_while_a_partition_is_not_subscribed(cluster: Cluster) -> None:
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, channels=["ch"])
    app = App(cluster.lookupd)
    app.handler([name, f"{name}_later"], "ch", start_timeout=0.2)(nothing)
    async with app:
        (consumer,) = app.consumers
        with anyio.fail_after(25):
            while len(consumer.connections) < 2:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)
        assert app.health().reasons == (f"{name},{name}_later/ch: not all partitions are subscribed yet",)
        cluster.create_topic(f"{name}_later", channels=["ch"])
        with anyio.fail_after(25):
            while not app.health().ready:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert len(consumer.connections) == 3


async def test_headers_on_a_topic_without_extend_support_name_the_remedies(cluster: Cluster, topic: str) -> None:
    async with Producer(cluster.lookupd) as producer:
        with pytest.raises(ExtendNotSupported) as caught:
            await producer.publish(topic, b"x", headers={"a": "b"})
    for remedy in ("nsqext broker --topic NAME:extend", "nsq_topic(extend=True)", "Admin.upgrade_topic"):
        assert remedy in str(caught.value)


async def test_run_in_a_running_event_loop_names_serve() -> None:
    consumer = Consumer("orders", "ch", NOWHERE)
    consumer.handler(nothing)
    for what, run in (("consumer", consumer.run), ("app", App(NOWHERE).run)):
        with pytest.raises(Exception, match=rf"one is running: await {what}.serve\(\) in it"):
            run()
