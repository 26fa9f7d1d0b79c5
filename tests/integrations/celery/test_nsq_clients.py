"""What clients of a kombu connection ask of servers, consumers of queues, and acknowledgements, without servers."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import orjson
import pytest

from nsqext.client.consumer.message import ACCEPTED_DELAY, Requeue
from nsqext.errors import InvalidSetting, MessageNotInFlight, TopicNotFound
from nsqext.integrations.celery.envelope import QueueSpec
from nsqext.integrations.celery.nsq_clients import DEFAULT_PREFETCH, Deliveries, NsqClients, QueueConsumer
from nsqext.types import TopicMeta
from tests.integrations.celery.scripted import ScriptedMessage, ScriptedServers
from tests.support.tables import table

ORIGINAL = TopicMeta()
EXTENDED = TopicMeta(partition_num=1, extend_support=True)
PLAIN = TopicMeta(partition_num=1)


def clients(**options: Any) -> NsqClients:
    """Return clients of a lookup service."""
    return NsqClients({"lookupd": "127.0.0.1:1"}, options)


def stored(seconds: float | None = None, queue: str = "q", **properties: Any) -> bytes:
    """Return the body of a task for a queue, due in some seconds."""
    now = datetime.datetime.now(datetime.UTC)
    headers = {} if seconds is None else {"eta": (now + datetime.timedelta(seconds=seconds)).isoformat()}
    info = {"exchange": "", "routing_key": queue}
    return orjson.dumps(
        {"kombu": 1, "body": "", "headers": headers, "properties": {"delivery_info": info, **properties}}
    )


@table("option", [{"timeout": -1}, {"msg_timeout": -1}, {"eta_hold": -1}])
def test_options_of_each_client_are_checked_before_the_first_one_is_opened(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(option))):
        clients(**option)


def test_queues_are_created_once_until_they_are_deleted(servers: ScriptedServers) -> None:
    asking = clients()
    for channel in ("a", "a", "b"):
        asking.create("t", channel)
    servers.queues["t"] = {"a": (0, 0), "b": (0, 0)}
    asking.delete(["t"], "a")
    assert servers.calls == [("create", "t", "a"), ("create", "t", "b"), ("delete", "t", "a")]
    asking.create("t", "a")
    asking.create("t", "b")
    asking.delete(["gone", "t"], "b")
    assert servers.calls[3:] == [("create", "t", "a"), ("delete", "t", "b"), ("delete", "t")]


def test_queues_are_created_if_lookup_and_options_allow_it(servers: ScriptedServers) -> None:
    clients(topic_create=False).create("t", "a#ephemeral")
    direct = NsqClients({"nsqd": "127.0.0.1:1"}, {})
    direct.create("t", "a")
    assert servers.calls == []
    assert direct.exists("t", "a"), "unknown without lookup"
    assert direct.waiting(["t"], "a") == 0


def test_waiting_messages_are_counted_over_topics_and_partitions(servers: ScriptedServers) -> None:
    asking = clients()
    servers.depth = 7
    servers.queues = {"t": {"a": (5, 2)}, "u": {"a": (1, 1)}}
    assert asking.waiting(["gone", "t", "u"], "a") == 2 * 3
    assert asking.waiting(["t"], "none") == 2 * 7, "they wait in the topic"
    assert asking.waiting(["gone"], "a") == 0
    assert asking.empty(iter(["gone", "t", "u"]), "a") == 2 * 3
    assert servers.calls == [("empty", "t", "a"), ("empty", "u", "a")]
    assert [asking.exists(*queue) for queue in (("t", "a"), ("t", "b"), ("gone", "a"))] == [True, False, False]


@table(
    ("meta", "seconds", "delay"),
    [
        (EXTENDED, None, None),
        (EXTENDED, -5.0, None),
        (EXTENDED, 29.0, None),
        (EXTENDED, 30.7, 0.7),
        (EXTENDED, 100.0, 70.0),
        (EXTENDED, 100_000.0, 99_970.0),
        (ORIGINAL, 100_000.0, ACCEPTED_DELAY),
        (PLAIN, 100.0, None),
        (TopicMeta(partition_num=1, extend_support=True, ordered=True), 100.0, None),
        (TopicMeta(partition_num=1, ordered=True), 100.0, None),
    ],
)
def test_servers_keep_a_task_until_its_worker_may_hold_it(
    meta: TopicMeta,
    seconds: float | None,
    delay: float | None,
    servers: ScriptedServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsqext.integrations.celery.nsq_clients.time.time", lambda: 1_000_000.0)
    servers.meta_of["t"] = meta
    assert clients().publish("t", b"x", {"h": "1"}, None if seconds is None else 1_000_000 + seconds)
    *message, found = servers.published[-1]
    assert message == ["t", b"x", {"h": "1"}]
    assert found == (None if delay is None else pytest.approx(delay))


def test_a_message_without_a_topic_is_dropped(servers: ScriptedServers) -> None:
    asking = clients()
    servers.meta_of["t"] = EXTENDED
    assert not asking.publish("gone", b"x", None, None)
    assert not asking.publish("gone", b"x", None, 1e12)
    assert [asking.extend_support(topic) for topic in ("gone", "t")] == [False, True]


def test_a_message_of_a_declared_queue_is_dropped_only_if_the_queue_is_transient(servers: ScriptedServers) -> None:
    asking = clients()
    asking.create("t", "a")
    asking.create("u", "b#ephemeral")
    servers.calls.clear()
    with pytest.raises(TopicNotFound):
        asking.publish("t", b"x", None, None)
    assert servers.calls == [("create", "t", "a")]
    assert not asking.publish("u", b"x", None, None)


def opened(servers: ScriptedServers, prefetch: int = 3) -> tuple[QueueConsumer, list[Any]]:
    """Return the consumer of the queue ``q``, and what it receives."""
    received: list[Any] = []
    source = QueueConsumer(clients(), QueueSpec("q"), prefetch, lambda *delivery: received.append(delivery))
    return source, received


@table(
    ("made", "answers", "redelivered"),
    [
        (lambda: ScriptedMessage(stored()), [], None),
        (lambda: ScriptedMessage(b"of another publisher"), [], None),
        (lambda: ScriptedMessage(stored(), attempts=2), [], True),
        (lambda: ScriptedMessage(stored(queue="other")), ["finish"], None),
        (lambda: ScriptedMessage(stored(expiration="5000"), age=4.0), [], None),
        (lambda: ScriptedMessage(stored(expiration="5000"), age=6.0), ["finish"], None),
        (lambda: ScriptedMessage(stored(20.0)), [], None),
        (lambda: ScriptedMessage(stored(30.7)), [pytest.approx(0.7, abs=0.5)], None),
        (lambda: ScriptedMessage(stored(100.0)), [pytest.approx(70.0, abs=5)], None),
        (lambda: ScriptedMessage(stored(100_000.0)), [ACCEPTED_DELAY], None),
    ],
)
def test_a_message_is_handed_over_or_answered(
    made: Callable[[], ScriptedMessage], answers: list[Any], redelivered: bool | None, servers: ScriptedServers
) -> None:
    source, received = opened(servers)
    message = made()
    try:
        servers.consumers[-1].handle(message)
    except Requeue as error:
        assert not error.backoff
        message.answers.append(error.delay)
    assert message.answers == answers
    assert len(received) == (not answers)
    for handed, decoded, same in received:
        assert (handed, same) == (source, message)
        assert type(decoded["body"]) is bytes
        assert decoded["properties"]["delivery_info"].get("redelivered") is redelivered


def test_a_consumer_has_the_topics_and_the_prefetch_count_of_its_queue(servers: ScriptedServers) -> None:
    for prefetch in (3, 0):
        opened(servers, prefetch)
    assert [(one.topics, one.channel, one.max_in_flight) for one in servers.consumers] == [
        (("q",), "q", 3),
        (("q",), "q", DEFAULT_PREFETCH),
    ]


def test_a_consumer_that_leaves_returns_what_arrives(servers: ScriptedServers) -> None:
    source, received = opened(servers)
    source.leave()
    servers.consumers[0].handle(message := ScriptedMessage(stored()))
    assert (servers.consumers[0].calls, message.answers, received) == (["pause"], [0.0], [])


def test_a_consumer_that_leaves_waits_for_a_message_that_is_handed_over(servers: ScriptedServers) -> None:
    """The queue that closes returns what was received; what came later stayed in flight."""
    handing, may_end, events = threading.Event(), threading.Event(), list[str]()

    def receive(*_: object) -> None:
        handing.set()
        assert may_end.wait(30)
        events.append("handed over")

    def leave() -> None:
        source.leave()
        events.append("left")

    source = QueueConsumer(clients(), QueueSpec("q"), 3, receive)
    with ThreadPoolExecutor(2) as threads:
        handled = threads.submit(servers.consumers[0].handle, ScriptedMessage(stored()))
        assert handing.wait(30)
        left = threads.submit(leave)
        wait([left], 0.1)  # it has ended by now, unless it waits
        may_end.set()
        for one in (handled, left):
            one.result(30)
    assert events == ["handed over", "left"]


def test_acknowledgements_answer_messages_once(servers: ScriptedServers, caplog: pytest.LogCaptureFixture) -> None:
    held = Deliveries(cast("Any", None), 2)
    (one, _), (other, _) = (opened(servers) for _ in range(2))
    messages = [ScriptedMessage() for _ in range(3)]
    late = ScriptedMessage(error=MessageNotInFlight("taken back"))
    for tag, message in enumerate([*messages, late]):
        assert held.can_consume() == (tag < 2)
        held.append(message, tag)
        held.hold(tag, cast("Any", message), one)
    assert (held.holds(one), held.holds(other)) == (True, False)
    for _ in range(2):
        held.ack(0)
    held.reject(1)
    held.reject(2, requeue=True)
    held.ack(3)
    assert [message.answers for message in messages] == [["finish"], ["finish"], [0.0]]
    assert "queue q: a message was acknowledged after the server had taken it back" in caplog.text
    assert not held.holds(one)
    assert held.can_consume()
    assert servers.consumers[0].calls == []


@pytest.mark.parametrize("error", [None, MessageNotInFlight("taken back")])
def test_the_consumer_of_a_single_message_is_closed_after_the_answer(
    servers: ScriptedServers, error: MessageNotInFlight | None
) -> None:
    held, (source, _) = Deliveries(cast("Any", None)), opened(servers)
    source.single = True
    held.append(message := ScriptedMessage(error=error), "tag")
    held.hold("tag", cast("Any", message), source)
    assert servers.consumers[0].calls == []
    held.ack("tag")
    assert (message.answers, servers.consumers[0].calls) == (["finish"], ["close"])


def test_unacknowledged_messages_go_back(servers: ScriptedServers) -> None:
    held, (source, _) = Deliveries(cast("Any", None), 1), opened(servers)
    messages = [ScriptedMessage() for _ in range(3)]
    for tag, message in enumerate(messages):
        held.append(message, tag)
        held.hold(tag, cast("Any", message), source)
    held.ack(0)
    assert held.restore_unacked() == []
    assert [message.answers for message in messages] == [["finish"], [0.0], [0.0]]
    assert held.can_consume()
    held.restore_unacked_once()
    assert [len(message.answers) for message in messages] == [1, 1, 1]
