"""Which messages of an outbox are set aside, because they can never be published, and what is tried again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from secrets import token_hex
from typing import Any, cast

import anyio
import pytest

from nsqext import Consumer, OutgoingMessage, Producer
from nsqext.broker import Cluster
from nsqext.cli.admin.findings import judge_outbox
from nsqext.errors import ExtendNotSupported, InvalidPartition, InvalidSetting, NsqError, OperationNotSupported
from nsqext.errors.server import (
    AuthFailed,
    BadBody,
    BadMessage,
    BadTag,
    BadTopic,
    ExtendRefused,
    InvalidJsonHeader,
    NotWritable,
    PubFailed,
    RecordTooLarge,
    Unauthorized,
)
from nsqext.transactions import Outbox, OutboxStore
from tests.support.command_line import Terminal, lines, run
from tests.support.consumers import eventually
from tests.transactions.relays import Scripted, publishing
from tests.transactions.test_outbox import connect

pytestmark = pytest.mark.anyio
_SECONDS = 30
one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture(scope="module")
def original() -> Iterator[Cluster]:
    """Two nodes of the original generation."""
    with Cluster(nodes=2, generation="original") as cluster:
        yield cluster


def add(database: str, topic: str, *messages: dict[str, Any]) -> None:
    """Add messages with a body each."""
    with closing(connect(database)) as connection:
        for parts in messages:
            Outbox().add(connection, topic, parts.pop("body", b"x"), **parts)
        connection.commit()


@asynccontextmanager
async def relayed(cluster: Cluster, database: str, **settings: Any) -> AsyncIterator[OutboxStore]:
    """Run a relay."""
    with OutboxStore(database) as store:
        async with Producer(cluster.lookupd, **settings) as producer, publishing(store, cast("Any", producer)):
            yield store


@one_database
@pytest.mark.parametrize(
    ("generation", "refused", "reason"),
    [
        pytest.param("original", {"key": "k"}, "a key needs a topic whose number of partitions", id="key, original"),
        pytest.param("original", {"headers": {"a": "b"}}, "does not support headers", id="headers, original"),
        pytest.param("original", {"tag": "red"}, "does not support headers and tags", id="tag, original"),
        pytest.param("original", {"body": bytes(1_100_000)}, "E_BAD_MESSAGE", id="large, original"),
        pytest.param("original", {"body": bytes(6_000_000)}, "E_BAD_", id="very large, original"),
        pytest.param("redesigned", {"headers": {"a": "b"}}, "does not accept headers", id="headers, plain topic"),
        pytest.param("redesigned", {"tag": "red"}, "does not accept headers or a tag", id="tag, plain topic"),
        pytest.param("redesigned", {"body": bytes(1_100_000)}, "E_BAD_MESSAGE", id="large, redesigned"),
        pytest.param("redesigned", {"body": bytes(6_000_000)}, "E_BAD_", id="very large, redesigned"),
    ],
)
async def test_a_message_that_its_topic_can_never_store_is_set_aside_with_the_reason(
    cluster: Cluster, original: Cluster, database: str, generation: str, refused: dict[str, Any], reason: str
) -> None:
    """A message with a key was retried for ever on the original NSQ, with all messages of its topic."""
    nodes = {"original": original, "redesigned": cluster}[generation]
    topic = f"t_{token_hex(4)}"
    nodes.create_topic(topic, channels=["ch"])
    add(database, topic, {"body": b"before"}, {"identity": "wrong", **refused}, {"body": b"behind"})
    async with relayed(nodes, database, max_message_size=8 << 20, max_batch_size=9 << 20) as store:
        await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)
        (left,) = store.waiting()
        found = store.summary(time.time())
    assert (left.identity, found.refused) == ("wrong", 1)
    assert reason in left.error
    assert found.reason == left.error


@one_database
async def test_a_message_of_another_program_for_a_wrong_topic_is_set_aside(cluster: Cluster, database: str) -> None:
    add(database, "t", {})
    with closing(connect(database)) as connection:
        connection.execute("UPDATE nsqext_outbox SET topic = 'no topic'")
        connection.commit()
    async with relayed(cluster, database) as store:
        await eventually(lambda: store.summary(time.time()).refused == 1, _SECONDS)
        assert "no topic" in store.summary(time.time()).reason


@one_database
async def test_rows_that_other_programs_have_written_hold_back_no_other(cluster: Cluster, database: str) -> None:
    """They ended the relay each time it was started. A message is not set aside for its trace context."""
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, extend=True, channels=["ch"])
    wrong = ("headers = 'not JSON'", "headers = '[1]'", "trace_context = '{'")
    add(database, topic, *({} for _ in wrong), {})
    with closing(connect(database)) as connection:
        for number, change in enumerate((*wrong, "body = 'text', key = 'k'"), 1):  # text in place of bytes
            connection.execute(f"UPDATE nsqext_outbox SET {change} WHERE sequence = {number}")  # noqa: S608
        connection.commit()
    async with relayed(cluster, database) as store, Consumer(topic, "ch", cluster.lookupd) as consumer:
        received = []
        with anyio.fail_after(_SECONDS):
            for _ in range(2):
                message = await anext(consumer)
                received.append((message.body, message.key))
                await message.finish()
        assert received[1] == (b"text", "k")
        await eventually(lambda: store.summary(time.time()).refused == 2, _SECONDS)
        await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)


@one_database
async def test_after_an_upgrade_of_its_topic_a_message_with_headers_is_published(
    cluster: Cluster, database: str
) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["ch"])
    add(database, topic, {"headers": {"a": "b"}})
    async with relayed(cluster, database) as store:
        await eventually(lambda: store.summary(time.time()).refused == 1, _SECONDS)
        cluster.upgrade_topic(topic)

        def published() -> bool:
            store.retry_refused()  # lookup is asked once a second
            found = store.summary(time.time())
            return (found.waiting, found.refused, found.reason) == (0, 0, "")

        await eventually(published, _SECONDS)


@one_database
async def test_a_key_waits_for_a_relay_that_knows_the_partitions(
    cluster: Cluster, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay with ``nsqd=`` set messages aside that another relay can publish."""
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["ch"])
    add(database, topic, {"key": "k"})
    with OutboxStore(database) as store:
        async with (
            Producer(nsqd=next(iter(cluster.nodes.values())).tcp) as producer,
            publishing(store, cast("Any", producer)),
        ):
            await eventually(lambda: "only lookup knows the number: give lookupd=" in caplog.text, _SECONDS)
        found = store.summary(time.time())
        assert (found.waiting, found.refused, found.reason) == (1, 0, "")
    async with relayed(cluster, database) as store:
        await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)
        assert store.summary(time.time()).refused == 0


@one_database
@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (BadTopic("E_BAD_TOPIC"), {}),
        (BadBody("E_BAD_BODY"), {}),
        (BadMessage("E_BAD_MESSAGE"), {}),
        (BadTag("E_TAG_NOT_SUPPORT"), {"tag": "red"}),
        (ExtendRefused("E_EXT_NOT_SUPPORT"), {"tag": "red"}),
        (ExtendRefused("E_EXT_NOT_SUPPORT"), {"headers": {"a": "b"}}),
        (InvalidJsonHeader("E_INVALID_JSON_HEADER"), {}),
        (RecordTooLarge("E_PUB_FAILED"), {}),
        (ExtendNotSupported("no headers"), {"headers": {"a": "b"}}),
        (InvalidPartition("no partitions"), {"key": "k"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, NsqError) else "-".join(value),
)
async def test_an_error_about_a_message_sets_it_aside(error: NsqError, parts: dict[str, Any], database: str) -> None:
    add(database, "t", parts)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(raising(error))):
            await eventually(lambda: store.summary(0.0).refused == 1, _SECONDS)
        assert store.summary(0.0).reason == str(error)


@one_database
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(InvalidSetting("node_filter leaves out the leader"), id="setting of the relay"),
        pytest.param(OperationNotSupported("on_unknown='settle'"), id="setting for the other generation"),
        pytest.param(ExtendNotSupported("the topic was created again"), id="the identity of the relay"),
        pytest.param(ExtendRefused("E_EXT_NOT_SUPPORT"), id="the identity of the relay, at the server"),
        pytest.param(Unauthorized("E_UNAUTHORIZED"), id="a right"),
        pytest.param(AuthFailed("E_AUTH_FAILED"), id="login"),
        pytest.param(NotWritable("E_FAILED_ON_NOT_WRITABLE"), id="leader"),
        pytest.param(PubFailed("E_PUB_FAILED"), id="disk"),
    ],
)
async def test_an_error_about_the_relay_or_the_cluster_is_tried_again(
    error: NsqError, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay with ``on_unknown="settle"`` on the original NSQ set all messages aside."""
    monkeypatch.setattr("nsqext.transactions.relay.RETRY", 0.01)
    producer = Scripted(raising(error))
    add(database, "t", {"key": "k"})
    with OutboxStore(database) as store:
        async with publishing(store, producer):
            await eventually(lambda: len(producer.calls) == 3, _SECONDS)
        found = store.summary(0.0)
    assert (found.waiting, found.refused, found.reason) == (1, 0, "")


def raising(error: NsqError) -> Callable[[str, list[OutgoingMessage]], Awaitable[None]]:
    """Return what fails in place of a publish."""

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        raise error

    return publish


@one_database
def test_the_reason_is_that_of_the_message_that_was_added_last(database: str) -> None:
    add(database, "t", {}, {}, {})
    with OutboxStore(database) as store:
        first, second, _ = store.rows(range(16), [], 10)
        store.refuse(second.sequence, "the second reason")
        store.refuse(first.sequence, "the first reason")
        assert store.summary(0.0).reason == "the second reason"


@one_database
def test_status_and_doctor_show_the_reason(database: str) -> None:
    add(database, "t", {})
    with OutboxStore(database) as store:
        assert judge_outbox(store.summary(0.0)).text.endswith("0 relays")
        store.refuse(store.rows(range(16), [], 1)[0].sequence, "too large")
        assert judge_outbox(store.summary(0.0)).text.endswith("1 message set aside, the last: too large")
    (found,) = lines("outbox", "status", "--database", database)
    assert (found["refused"], found["reason"]) == (1, "too large")


@one_database
def test_status_discards_messages_set_aside_by_their_age_in_days(database: str) -> None:
    add(database, "t", {})
    words = ("outbox", "status", "--database", database)
    with OutboxStore(database) as store:
        store.refuse(store.rows(range(16), [], 1)[0].sequence, "too large")
    kept = lines(*words, "--discard", "0.01", "--yes")[0]  # 14 minutes
    discarded = lines(*words, "--discard", "0", "--yes")[0]
    assert [(found["discarded"], found["refused"]) for found in (kept, discarded)] == [(0, 1), (1, 0)]


@one_database
def test_messages_set_aside_are_published_again_only_after_a_confirmation(database: str) -> None:
    add(database, "t", {})
    words = ("outbox", "status", "--retry", "--database", database)
    with OutboxStore(database) as store:
        store.refuse(store.rows(range(16), [], 1)[0].sequence, "too large")
        refused = run(*words)
        assert (refused.returncode, b"give --yes" in refused.stderr, store.summary(0.0).refused) == (2, True, 1)
        assert lines(*words, "--yes")[0]["retried"] == 1
        with Terminal(*words, "--discard", "0", "--yes") as terminal:
            assert terminal.end() == 0
    assert "0 set aside; 0 relays; 0 deleted; 0 to be published again" in terminal.shown
