"""Taskiq on clusters of both generations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import to_thread
from taskiq import AckableMessage, BrokerMessage, TaskiqEvents, TaskiqMessage, TaskiqScheduler
from taskiq.exceptions import SendTaskError
from taskiq.receiver import Receiver
from taskiq.schedule_sources import LabelScheduleSource

from nsqext import Admin, Consumer, ExtFilter, Lookup, Producer
from nsqext.broker import Cluster
from nsqext.client.consumer.message import ACCEPTED_DELAY
from nsqext.errors import (
    InvalidInput,
    InvalidSetting,
    InvalidState,
    LookupUnreachable,
    MessageNotInFlight,
    ProtocolError,
)
from nsqext.integrations.taskiq import NsqBroker
from nsqext.types import TopicMeta

Opened = Callable[..., AbstractAsyncContextManager[NsqBroker]]
pytestmark = pytest.mark.anyio


async def take(broker: NsqBroker, count: int) -> list[tuple[TaskiqMessage, AckableMessage]]:
    """Receive tasks."""
    found: list[tuple[TaskiqMessage, AckableMessage]] = []
    with anyio.fail_after(25):
        async for message in broker.listen():
            assert isinstance(message, AckableMessage)
            found.append((broker.formatter.loads(message.data), message))
            if len(found) == count:
                break
    return found


async def test_tasks_are_run_and_acknowledged(opened: Opened) -> None:
    async with opened() as broker:
        seen: list[int] = []

        @broker.task
        async def add(number: int) -> None:
            seen.append(number)

        for number in range(20):
            await add.kiq(number)
        receiver, finish = Receiver(broker, max_async_tasks=4), asyncio.Event()
        running = asyncio.ensure_future(receiver.listen(finish))
        with anyio.fail_after(25):
            while len(seen) < 20:  # noqa: ASYNC110 - the task has no event
                await anyio.sleep(0.01)
            finish.set()
            await running
        assert sorted(seen) == list(range(20))


async def test_what_is_not_acknowledged_is_delivered_again(opened: Opened) -> None:
    queue = f"q_{token_hex(4)}"
    async with opened(queue) as broker:

        @broker.task(task_name="note")
        async def note(number: int) -> None:
            """Never called."""

        for number in range(3):
            await note.kiq(number)
        first, *_ = await take(broker, 3)
        acknowledged = first[0].args[0]
        answer = first[1].ack()
        assert answer is not None
        await answer
    async with opened(queue) as other:
        rest = await take(other, 2)
    assert sorted(task.args[0] for task, _ in rest) == sorted({0, 1, 2} - {acknowledged})


async def test_labels_choose_queue_and_delay(cluster: Cluster, opened: Opened) -> None:
    queues = [f"q_{token_hex(4)}" for _ in range(2)]
    async with opened(*queues) as broker:

        @broker.task(task_name="note")
        async def note(number: int) -> None:
            """Never called."""

        await note.kicker().with_labels(delay=1.0).kiq(2)
        await note.kicker().with_labels(queue=queues[1]).kiq(1)
        assert [task.args[0] for task, _ in await take(broker, 2)] == [1, 2]
        if cluster.generation == "redesigned":  # the original NSQ has neither keys nor tags
            async with Consumer(queues[0], broker.channel, cluster.lookupd, tag="canary") as consumer:
                await note.kicker().with_labels(key="k", tag="canary").kiq(3)
                with anyio.fail_after(25):
                    message = await anext(consumer)
                assert (message.key, message.tag) == ("k", "canary")
                await message.finish()
        for labels, reason in (
            ({"queue": "other"}, "has the queue 'other'"),
            ({"delay": "soon"}, "delay='soon'"),
            ({"delay": "inf"}, "delay='inf'"),
        ):
            with pytest.raises(SendTaskError) as caught:
                await note.kicker().with_labels(**labels).kiq(1)
            assert isinstance(caught.value.__cause__, InvalidInput)
            assert reason in str(caught.value.__cause__)


async def test_a_task_without_a_due_time_at_the_server_waits_for_its_delay(cluster: Cluster, opened: Opened) -> None:
    queue = f"q_{token_hex(4)}"
    task = TaskiqMessage(task_id="1", task_name="note", labels={"delay": 0.5}, args=[], kwargs={})
    async with opened(queue) as broker, Producer(cluster.lookupd) as producer:
        receipt = time.time()
        await producer.publish(queue, broker.formatter.dumps(task).message)
        await take(broker, 1)
        assert time.time() - receipt >= 0.5
        with pytest.raises(InvalidState, match=r"or has ended to listen.* after shutdown.* it listens again"):
            await take(broker, 1)
        await broker.shutdown()
        await broker.startup()
        await producer.publish(queue, broker.formatter.dumps(task).message)
        await take(broker, 1)


@pytest.mark.parametrize("cluster", ["redesigned"], indirect=True)  # the original NSQ has no ordered topics
async def test_a_task_of_an_ordered_topic_waits_for_its_delay_and_holds_up_no_other_queue(
    cluster: Cluster, opened: Opened
) -> None:
    ordered, other = (f"q_{token_hex(4)}" for _ in range(2))
    await to_thread.run_sync(partial(cluster.create_topic, ordered, ordered=True, channels=["taskiq"]))
    async with opened(ordered, other) as broker:

        @broker.task(task_name="note")
        async def note(number: int) -> None:
            """Never called."""

        due = time.time() + 1.0
        await note.kicker().with_labels(delay=1.0).kiq(2)
        await note.kiq(3)
        await note.kicker().with_labels(queue=other).kiq(1)
        found = await take(broker, 2)
        assert [task.args[0] for task, _ in found] == [1, 2]
        assert time.time() >= due
    async with opened(ordered) as broker:
        assert [task.args[0] for task, _ in await take(broker, 1)] == [2], "not acknowledged"


async def test_a_task_that_waits_for_its_delay_is_left_to_the_server_when_it_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expired, kept, other = (scripted(delay=0.2), scripted(delay=0.3), scripted())
    expired.in_order = kept.in_order = True
    expired.expired = True
    consumer = ScriptedConsumer(expired, kept, other)
    monkeypatch.setattr("nsqext.integrations.taskiq.Consumer", lambda *_, **__: consumer)
    listening, found = NsqBroker("127.0.0.1:1").listen(), list[bytes]()
    while len(found) < 2:
        message = await anext(listening)
        assert isinstance(message, AckableMessage)
        found.append(message.data)
    assert found == [other.body, kept.body]
    assert expired.answers == kept.answers == []


class ScriptedConsumer:
    """Fetches scripted messages one by one."""

    def __init__(self, *messages: SimpleNamespace) -> None:
        self.messages = list(messages)
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")

    async def fetch(self, count: int, timeout: float | None) -> list[SimpleNamespace]:
        assert count == 1
        if not self.messages:
            assert timeout is not None
            await anyio.sleep(timeout)
        return [self.messages.pop(0) for _ in self.messages[:1]]

    def pause(self) -> None:
        self.calls.append("pause")


def _unreadable(name: str) -> str | None:
    raise ProtocolError("extend header is not JSON")


def scripted(*, age: float = 0.0, at_server: bool = False, body: bytes | None = None, **labels: Any) -> SimpleNamespace:
    """Return a message with a task of an age in seconds, and its answers."""
    task = TaskiqMessage(task_id="1", task_name="delay", labels=labels, args=["delay"], kwargs={})
    answers: list[Any] = []

    async def requeue(delay: float) -> None:
        answers.append(delay)
        if delay == ACCEPTED_DELAY:
            raise MessageNotInFlight("its connection is lost")

    async def finish() -> None:
        answers.append("finish")

    return SimpleNamespace(
        body=NsqBroker("127.0.0.1:1").formatter.dumps(task).message if body is None else body,
        timestamp=round((time.time() - age) * 1e9),
        header_value=lambda name: "1" if at_server else None,
        in_order=False,
        expired=False,
        requeue=requeue,
        finish=finish,
        answers=answers,
    )


async def test_a_task_goes_back_for_the_rest_of_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    early = [scripted(delay=0.9), scripted(age=60.0, delay=100.0), scripted(delay=100_000.0)]
    due = [
        scripted(),
        scripted(age=60.0, delay=50.0),
        scripted(at_server=True, delay=100.0),
        scripted(body=b"no task, and no delay"),
        scripted(body=b"other"),
    ]
    due[-1].header_value = due[-2].header_value = _unreadable
    consumer = ScriptedConsumer(*early, *due)
    monkeypatch.setattr("nsqext.integrations.taskiq.Consumer", lambda *_, **__: consumer)
    broker, found = NsqBroker("127.0.0.1:1"), list[bytes]()
    listening = broker.listen()
    while len(found) < len(due):
        message = await anext(listening)
        assert isinstance(message, AckableMessage)
        found.append(message.data)
        if answer := message.ack():
            await answer
    assert consumer.calls == ["start"]
    await listening.aclose()
    assert consumer.calls == ["start", "pause"]
    assert found == [message.body for message in due]
    assert [message.answers for message in due] == [["finish"]] * len(due)
    (first,), (second,), (third,) = (message.answers for message in early)
    assert 0 < first <= 0.9
    assert 20 < second <= 40
    assert third == ACCEPTED_DELAY


@pytest.mark.parametrize(
    ("labels", "meta", "delay"),
    [
        ({}, TopicMeta(partition_num=1, extend_support=True), None),
        ({"delay": 0}, TopicMeta(partition_num=1, extend_support=True), None),
        ({"delay": "0.5"}, TopicMeta(partition_num=1, extend_support=True), 0.5),
        ({"delay": 100_000}, TopicMeta(partition_num=1, extend_support=True), 100_000.0),
        ({"delay": 100_000}, TopicMeta(partition_num=1), None),
        ({"delay": 100_000}, TopicMeta(), ACCEPTED_DELAY),
    ],
)
async def test_servers_keep_a_task_for_as_long_as_they_can(
    labels: dict[str, Any], meta: TopicMeta, delay: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, bytes, dict[str, Any]]] = []

    class ScriptedProducer:
        async def meta(self, topic: str) -> TopicMeta:
            return meta

        async def publish(self, topic: str, body: bytes, **options: Any) -> None:
            sent.append((topic, body, options))

    monkeypatch.setattr("nsqext.integrations.taskiq.Producer", lambda **_: ScriptedProducer())
    broker = NsqBroker("127.0.0.1:1", queues=("first", "second"))
    await broker.kick(BrokerMessage(task_id="1", task_name="note", message=b"x", labels=labels))
    assert sent == [("first", b"x", {"key": None, "tag": None, "delay": delay})]


async def test_the_labels_key_and_tag_are_sent_as_text_also_with_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    class ScriptedProducer:
        async def meta(self, topic: str) -> TopicMeta:
            return TopicMeta(partition_num=1, extend_support=True)

        async def publish(self, topic: str, body: bytes, **options: Any) -> None:
            sent.append(options)

    monkeypatch.setattr("nsqext.integrations.taskiq.Producer", lambda **_: ScriptedProducer())
    labels = {"key": 1.5, "tag": 7, "delay": 5}
    await NsqBroker("127.0.0.1:1").kick(BrokerMessage(task_id="1", task_name="note", message=b"x", labels=labels))
    assert sent == [{"key": "1.5", "tag": "7", "delay": 5.0}]


@pytest.mark.parametrize("create", [True, False])
async def test_a_receiver_that_starts_its_broker_again_creates_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, create: bool
) -> None:
    events: list[str] = []

    class RecordedAdmin(Admin):
        async def create_topic(self, topic: str, **arguments: Any) -> None:
            events.append("create")
            await super().create_topic(topic, **arguments)

    monkeypatch.setattr("nsqext.integrations.taskiq.Admin", RecordedAdmin)
    broker = NsqBroker(cluster.lookupd, queues=(f"q_{token_hex(4)}",), topic_create=create)
    broker.add_event_handler(TaskiqEvents.CLIENT_STARTUP, lambda state: events.append("startup"))
    broker.add_event_handler(TaskiqEvents.CLIENT_SHUTDOWN, lambda state: events.append("shutdown"))
    for _ in range(2):
        await broker.startup()
    await broker.shutdown()
    assert events == ["create"] * create + ["startup", "startup", "shutdown"]
    with pytest.raises(InvalidState, match="closed"):
        await broker.kick(BrokerMessage(task_id="1", task_name="note", message=b"x", labels={}))


async def test_a_broker_starts_again_after_an_error_and_after_its_shutdown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reported success, and could neither send nor receive tasks."""
    errors = [LookupUnreachable("down")]

    class Failing(Admin):
        async def create_topic(self, topic: str, **arguments: Any) -> None:
            if errors:
                raise errors.pop()
            await super().create_topic(topic, **arguments)

    monkeypatch.setattr("nsqext.integrations.taskiq.Admin", Failing)
    broker = NsqBroker(cluster.lookupd, queues=(f"q_{token_hex(4)}",))
    task = broker.formatter.dumps(TaskiqMessage(task_id="1", task_name="note", labels={}, args=[], kwargs={}))
    with pytest.raises(LookupUnreachable):
        await broker.startup()
    for _ in range(2):
        await broker.startup()
        await broker.kick(task)
        ((_, message),) = await take(broker, 1)
        answer = message.ack()
        assert answer is not None
        await answer
        await broker.shutdown()


async def test_a_schedule_sends_its_tasks(opened: Opened) -> None:
    async with opened() as broker:

        @broker.task(task_name="report", schedule=[{"cron": "* * * * *", "args": [7]}])
        async def report(number: int) -> None:
            """Never called."""

        source = LabelScheduleSource(broker)
        scheduler = TaskiqScheduler(broker, [source])
        await source.startup()
        (due,) = await source.get_schedules()
        await scheduler.on_ready(source, due)
        ((task, _),) = await take(broker, 1)
        assert (task.task_name, task.args) == ("report", [7])


def test_settings_are_those_of_the_clients(cluster: Cluster) -> None:
    assert NsqBroker(cluster.lookupd, max_in_flight=7, timeout=3)._consumer.max_in_flight == 7
    assert NsqBroker(cluster.lookupd)._consumer.settings["close_timeout"] == 0.0
    assert NsqBroker(cluster.lookupd, close_timeout=5.0)._consumer.settings["close_timeout"] == 5.0
    with pytest.raises(InvalidSetting, match="is one text"):
        NsqBroker(cluster.lookupd, queues="mails")
    for losing in ({"sample_rate": 20}, {"ext_filter": ExtFilter(1, "user", "ann")}):
        with pytest.raises(InvalidSetting, match=f"tasks would be lost with the setting {next(iter(losing))}"):
            NsqBroker(cluster.lookupd, **losing)
    for unused in ({"max_attempts": 5, "dead_letter": "dead"}, {"concurrency": 8}, {"backoff": "off"}):
        with pytest.raises(InvalidSetting, match=f"the setting {next(iter(unused))} has no effect"):
            NsqBroker(cluster.lookupd, **unused)
    with pytest.raises(InvalidSetting, match="unknown setting"):
        NsqBroker(cluster.lookupd, max_inflight=7)  # type: ignore[call-arg]


async def test_queues_are_created_with_the_settings_of_lookup(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[object] = []

    class RecordedAdmin(Admin):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            timeouts.append(self.settings["lookup_request_timeout"])

    monkeypatch.setattr("nsqext.integrations.taskiq.Admin", RecordedAdmin)
    async with opened(lookup_request_timeout=7.0):
        pass
    lookup = Lookup(cluster.lookupd, lookup_request_timeout=8.0)
    shared = NsqBroker(lookup, queues=(f"q_{token_hex(4)}",))
    await shared.startup()
    await shared.shutdown()
    assert timeouts == [7.0, 8.0]


async def test_queues_are_created_with_partitions_and_replicas() -> None:
    with Cluster(nodes=2) as two:
        broker = NsqBroker(two.lookupd, topic_partitions=1, topic_replicas=2)
        await broker.startup()
        await broker.shutdown()
        async with Producer(two.lookupd) as producer:
            found = await producer.meta("taskiq")
        with pytest.raises(InvalidSetting, match="topic_replicas=0"):
            NsqBroker(two.lookupd, topic_replicas=0)
    assert (found.partition_num, found.replica) == (1, 2)
