"""What channels and connections of kombu do with the clients of NSQ, without servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import kombu
import orjson
import pytest
from kombu.exceptions import ChannelError

from nsqext.client.events import ClientEvent
from nsqext.errors import InvalidState, MessageNotInFlight
from nsqext.integrations.celery.envelope import Binding, Exchange
from nsqext.integrations.celery.nsq_clients import DEFAULT_PREFETCH, QueueConsumer
from nsqext.integrations.celery.transport import Transport
from nsqext.types import TopicMeta
from tests.integrations.celery.scripted import ScriptedConsumer, ScriptedMessage, ScriptedServers
from tests.support.tables import table


@pytest.fixture
def channel(servers: ScriptedServers) -> Iterator[Any]:
    """A channel, whose connection is closed at the end."""
    with kombu.Connection("nsq://127.0.0.1:1") as connection:
        yield connection.channel()


def consume(channel: Any, queue: str, tag: str = "tag", *, no_ack: bool = False) -> list[Any]:
    """Consume a queue; return what it receives."""
    received: list[Any] = []
    channel.basic_consume(queue, no_ack, received.append, tag)
    return received


def drain(channel: Any) -> None:
    """Deliver a message that was received."""
    channel.connection.drain_events(None, timeout=0.01)


def test_a_consumer_gets_the_topics_of_bindings_as_they_change(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    exchange = kombu.Exchange(name)(channel)
    exchange.declare()
    queue = kombu.Queue(name, exchange, routing_key="a")(channel)
    queue.declare()
    consume(channel, name)
    (consumer,) = servers.consumers
    assert list(consumer.topics) == [f"{name}.a", name]
    for _ in range(2):
        queue.bind_to(exchange, "b")
    assert list(consumer.topics) == [f"{name}.a", f"{name}.b", name]
    assert ("create", f"{name}.b", name) in servers.calls
    queue.unbind_from(exchange, "b")
    assert list(consumer.topics) == [f"{name}.a", name]
    assert [channel.state.has_binding(name, name, key) for key in ("a", "b")] == [True, False]


def test_topics_of_a_queue_are_created_before_it_is_consumed(channel: Any, servers: ScriptedServers, name: str) -> None:
    channel.clients.create(name, "other")
    consume(channel, name)
    assert servers.calls == [("create", name, "other"), ("create", name, name)]
    assert servers.consumers[0].calls == ["start"]
    assert servers.consumers[0].max_in_flight == DEFAULT_PREFETCH


def test_a_queue_exists_with_the_channel_at_one_of_its_topics(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    queue = kombu.Queue(name)(channel)
    with pytest.raises(ChannelError):
        queue.queue_declare(passive=True)
    channel.connection.queues[name].bindings.append(Binding(Exchange("logs"), "a"))
    servers.queues = {"logs.a": {name: (0, 0)}}
    queue.queue_declare(passive=True)


def test_a_queue_that_is_deleted_is_forgotten(channel: Any, servers: ScriptedServers, name: str) -> None:
    exchange = kombu.Exchange(name)(channel)
    exchange.declare()
    queue = kombu.Queue(name, exchange, routing_key="a")(channel)
    queue.declare()
    servers.queues = {f"{name}.a": {name: (2, 1)}, name: {name: (0, 0)}}
    received = consume(channel, name)
    servers.consumers[0].handle(message := ScriptedMessage())
    channel.queue_delete(name, if_empty=True)
    assert servers.queues
    assert servers.consumers[0].calls == ["start"]
    channel.queue_delete(name)
    assert not servers.queues
    assert servers.consumers[0].calls == ["start", "pause", "close"]
    assert (message.answers, received) == ([0.0], [])
    assert name not in channel.connection.queues, "a queue of this name begins without bindings"
    assert not channel.state.has_binding(name, name, "a")


@pytest.mark.parametrize("connections", [0, 1])
def test_a_queue_with_a_consumer_is_not_deleted_as_unused(
    channel: Any, servers: ScriptedServers, name: str, connections: int
) -> None:
    kombu.Queue(name)(channel).declare()
    servers.queues = {name: {name: (0, 0, connections)}}
    channel.queue_delete(name, if_unused=True)
    assert len(servers.queues) == connections
    kombu.Queue(f"{name}_2", auto_delete=True)(channel).declare()
    if connections:
        consume(channel, f"{name}_2")
    channel.queue_delete(f"{name}_2", if_unused=True)
    assert (f"{name}_2" in channel.connection.queues) is bool(connections)


def test_a_transient_queue_is_neither_counted_nor_deleted_at_the_servers(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    kombu.Queue(name, auto_delete=True)(channel).declare()
    kombu.Queue(f"{name}_2", exclusive=True)(channel).declare()
    servers.queues = {topic: {f"{topic}#ephemeral": (2, 1)} for topic in (name, f"{name}_2")}
    for topic in tuple(servers.queues):
        channel.queue_delete(topic, if_empty=True)
    assert len(servers.queues) == 2
    assert not channel.connection.queues
    assert servers.calls == []


@pytest.mark.parametrize("option", [{"max_priority": 9}, {"queue_arguments": {"x-max-priority": 9}}])
def test_a_queue_with_priorities_is_refused(channel: Any, name: str, option: dict[str, Any]) -> None:
    with pytest.raises(ChannelError, match="NSQ has no priorities"):
        kombu.Queue(name, **option)(channel).declare()


def test_an_exchange_without_a_type_is_direct(channel: Any, name: str) -> None:
    channel.exchange_declare(name, type="")
    assert channel.state.exchanges[name]["type"] == "direct"


def test_a_message_goes_to_the_topic_of_its_exchange(channel: Any, servers: ScriptedServers, name: str) -> None:
    servers.meta_of = {name: TopicMeta()}
    message = channel.prepare_message("x")
    channel.basic_publish(message, "", name)
    assert [topic for topic, *_ in servers.published] == [name]
    assert (info := message["properties"]["delivery_info"])["routing_key"] == name
    assert info["exchange"] == ""


def test_a_queue_is_consumed_until_its_last_consumer_is_cancelled(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    first, second = (consume(channel, name, tag) for tag in ("one", "two"))
    (consumer,) = servers.consumers
    assert consumer.calls == ["start", "resume"]
    channel.basic_cancel("one")
    channel.basic_cancel("one")
    assert consumer.calls == ["start", "resume"]
    consumer.handle(ScriptedMessage())
    drain(channel)
    assert (first, len(second)) == ([], 1)
    channel.basic_cancel("two")
    assert consumer.calls == ["start", "resume", "pause"]
    consumer.handle(late := ScriptedMessage(error=MessageNotInFlight("closed")))
    drain(channel)
    assert (late.answers, len(second)) == ([0.0], 1)
    again = consume(channel, name)
    assert consumer.calls == ["start", "resume", "pause", "resume"]
    consumer.handle(ScriptedMessage(expired=True))
    consumer.handle(ScriptedMessage())
    drain(channel)
    drain(channel)
    assert len(again) == 1


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_transient_queue_stays_while_a_message_of_it_is_not_acknowledged(
    channel: Any, servers: ScriptedServers, name: str, acknowledged: bool
) -> None:
    kombu.Queue(name, auto_delete=True)(channel).declare()
    received = consume(channel, name)
    (consumer,) = servers.consumers
    consumer.handle(ScriptedMessage())
    drain(channel)
    if acknowledged:
        received[0].ack()
    channel.basic_cancel("tag")
    assert consumer.calls == ["start", "pause", "close"][: 3 if acknowledged else 2]


def test_messages_without_acknowledgement_are_finished_before_they_are_delivered(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    received = consume(channel, name, no_ack=True)
    servers.consumers[0].handle(message := ScriptedMessage(b"body"))
    drain(channel)
    assert message.answers == ["finish"]
    assert [bytes(one.body) for one in received] == [b"body"]
    channel.qos.restore_unacked()
    assert message.answers == ["finish"]


def test_each_message_is_acknowledged_by_its_own_tag(channel: Any, servers: ScriptedServers, name: str) -> None:
    received, messages = consume(channel, name), [ScriptedMessage() for _ in range(3)]
    for message in messages:
        servers.consumers[0].handle(message)
        drain(channel)
    assert [channel.qos.get(one.delivery_tag) for one in received] == received
    received[1].ack()
    assert [message.answers for message in messages] == [[], ["finish"], []]
    assert len({one.delivery_tag for one in received}) == 3
    channel.basic_qos(prefetch_count=7)
    assert (servers.consumers[0].max_in_flight, channel.qos.prefetch_count) == (7, 7)
    channel.basic_qos()
    assert servers.consumers[0].max_in_flight == DEFAULT_PREFETCH


def test_a_channel_that_closes_returns_its_messages_and_receives_no_more(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    received, (first, second, third) = consume(channel, name), [ScriptedMessage() for _ in range(3)]
    (consumer,) = servers.consumers
    consumer.handle(first)
    drain(channel)
    consumer.handle(second)
    channel.close()
    assert consumer.calls == ["start", "pause", "pause", "close"]
    consumer.handle(third)
    channel.deliver(SimpleNamespace(queue=name), {}, fourth := ScriptedMessage())
    assert [one.answers for one in (first, second, third, fourth)] == [[0.0]] * 4
    assert len(received) == 1
    channel.close()
    assert consumer.calls.count("close") == 1


def test_get_receives_one_message(channel: Any, servers: ScriptedServers, name: str) -> None:
    def hand_over(queue: str, prefetch: int, receive: Callable[..., None]) -> QueueConsumer:
        source = opened(queue, prefetch, receive)
        servers.consumers[-1].handle(messages.pop())
        return cast("QueueConsumer", source)

    opened, channel._open_source = channel._open_source, hand_over
    kept, finished = ScriptedMessage(), ScriptedMessage()
    messages = [finished, kept]
    received = channel.basic_get(name)
    (consumer,) = servers.consumers
    assert (consumer.calls, consumer.max_in_flight) == (["start", "pause"], 1)
    received.ack()
    assert (kept.answers, consumer.calls) == (["finish"], ["start", "pause", "close"])
    assert channel.basic_get(name, no_ack=True) is not None
    assert (finished.answers, servers.consumers[1].calls) == (["finish"], ["start", "pause", "close"])


@pytest.mark.parametrize("arrives", [True, False])
def test_a_message_that_arrives_when_get_gives_up_goes_back(
    channel: Any, servers: ScriptedServers, name: str, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    leave, message = QueueConsumer.leave, ScriptedMessage()

    def hand_over(source: QueueConsumer) -> None:
        if arrives:
            servers.consumers[0].handle(message)
        leave(source)

    monkeypatch.setattr(QueueConsumer, "leave", hand_over)
    channel.connection.get_timeout = 0.001
    assert channel.basic_get(name) is None
    assert message.answers == [0.0] * arrives
    assert servers.consumers[0].calls == ["start", "pause", "close"]


def test_a_get_that_is_interrupted_keeps_no_message(
    channel: Any, servers: ScriptedServers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer stayed open, and held the next message of the queue, as often as it was delivered."""
    message = ScriptedMessage()

    class Interrupted(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if block:
                servers.consumers[0].handle(message)
                raise KeyboardInterrupt
            return super().get(block)

    monkeypatch.setattr("nsqext.integrations.celery.transport.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        channel.basic_get(name)
    assert (message.answers, servers.consumers[0].calls) == ([0.0], ["start", "pause", "close"])


def test_the_loop_of_celery_is_woken_for_messages_and_never_blocked(
    channel: Any, servers: ScriptedServers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise BlockingIOError

    received, transport = consume(channel, name), channel.connection
    (consumer,) = servers.consumers
    consumer.handle(ScriptedMessage())
    readers: list[tuple[int, Callable[[Any], None], Any]] = []
    for _ in range(2):
        transport.register_with_event_loop(None, SimpleNamespace(add_reader=lambda *words: readers.append(words)))
    (end, deliver, argument), same = readers
    assert same[0] == end
    assert len(received) == 1, "what arrived before the loop ran"
    assert not os.get_blocking(end)
    for count in (1, 3):
        before = len(received)
        for _ in range(count):
            consumer.handle(ScriptedMessage())
        deliver(argument)
        assert len(received) == before + count
        with pytest.raises(BlockingIOError):
            os.read(end, 1)
    deliver(argument)  # woken for nothing
    monkeypatch.setattr("nsqext.integrations.celery.transport.os.write", full)
    consumer.handle(ScriptedMessage())
    deliver(argument)
    assert len(received) == 6
    waits: list[float] = []
    transport.drain_events = lambda _, timeout: waits.append(timeout)
    consumer.handle(ScriptedMessage())
    deliver(argument)
    assert waits == [0]


def test_events_are_waited_for(channel: Any, servers: ScriptedServers, name: str) -> None:
    received = consume(channel, name)
    for timeout in (0.001, 0):
        with pytest.raises(TimeoutError):
            channel.connection.drain_events(None, timeout=timeout)
    servers.consumers[0].handle(ScriptedMessage())
    channel.connection.drain_events(None)
    assert len(received) == 1


def test_a_consumer_that_cannot_continue_is_an_error_for_who_waits(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    """The worker waited for ever, as for a queue without messages."""
    received = consume(channel, name)
    (failing,) = servers.consumers
    for kind in ("disconnected", "failed"):
        failing.note(ClientEvent(kind, None, None, "", "refused"))
    failing.handle(ScriptedMessage())
    for _ in range(2):
        with pytest.raises(InvalidState, match=f"queue {name}: its consumer cannot continue: refused"):
            drain(channel)
        if not received:
            drain(channel)
    assert len(received) == 1
    channel.basic_cancel("tag")
    drain(channel)  # it is not consumed any more
    consume(channel, name)
    assert failing.calls[-1] == "close", "it would not consume again"
    failing.note(ClientEvent("failed", None, None, "", "refused"))  # while it closes
    drain(channel)
    servers.consumers[1].note(ClientEvent("failed", None, None, "", "refused"))
    channel.queue_delete(name)
    with pytest.raises(TimeoutError):
        drain(channel)


def test_a_get_whose_consumer_has_failed_does_not_report_an_empty_queue(
    channel: Any, servers: ScriptedServers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.connection.get_timeout = 0.01
    assert channel.basic_get(name) is None
    monkeypatch.setattr(
        ScriptedConsumer, "start", lambda self: self.note(ClientEvent("failed", None, None, "", "refused"))
    )
    with pytest.raises(InvalidState, match="its consumer cannot continue: refused"):
        channel.basic_get(name)
    assert servers.consumers[1].calls == ["pause", "close"]


def test_messages_of_other_queues_stay_when_a_queue_is_closed(
    channel: Any, servers: ScriptedServers, name: str
) -> None:
    received = [consume(channel, f"{name}_{number}", str(number)) for number in range(2)]
    messages = [ScriptedMessage(error=MessageNotInFlight("gone")) for _ in range(4)]
    for number, message in enumerate(messages):
        servers.consumers[number % 2].handle(message)
    channel.queue_delete(f"{name}_0")
    for _ in range(2):
        drain(channel)
    assert [message.answers for message in messages] == [[0.0], [], [0.0], []]
    assert [len(found) for found in received] == [0, 2]


def test_nothing_is_waited_for_if_another_thread_took_a_message(
    servers: ScriptedServers, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raced(SimpleQueue[Any]):
        def qsize(self) -> int:
            return super().qsize() + 1

    monkeypatch.setattr("nsqext.integrations.celery.transport.SimpleQueue", Raced)
    with kombu.Connection("nsq://127.0.0.1:1") as connection:
        channel: Any = connection.channel()
        consume(channel, name)
        servers.consumers[0].handle(message := ScriptedMessage())
        channel.close()
    assert message.answers == [0.0]


def test_a_connection_closes_its_channels(servers: ScriptedServers, name: str) -> None:
    connection = kombu.Connection("nsq://127.0.0.1:1")
    consume(connection.channel(), name)
    connection.release()
    assert servers.consumers[0].calls[-1] == "close"


def test_without_lookup_nothing_is_deleted(servers: ScriptedServers, name: str) -> None:
    with kombu.Connection("nsqd://127.0.0.1:1") as connection:
        channel: Any = connection.channel()
        kombu.Queue(name)(channel).declare()
        channel.queue_delete(name)
        assert servers.calls == []


def test_celery_uses_its_event_loop_and_sends_no_heartbeats() -> None:
    assert (Transport.implements.asynchronous, Transport.implements.heartbeats) == (True, False)


@table(
    "broken",
    [
        {"text": True},  # and the body is not
        {"properties": {"expiration": "9" * 400}},
        {"properties": {"body_encoding": "unknown"}},
        {"properties": {"body_encoding": 1}},
        {"properties": {"delivery_info": {"exchange": "exchange", "routing_key": 1}}},
        {"properties": {"delivery_info": {"exchange": 1, "routing_key": "queue"}}},
    ],
)
def test_a_broken_message_of_another_program_reaches_the_receiver(
    servers: ScriptedServers, channel: Any, broken: dict[str, Any]
) -> None:
    exchange = kombu.Exchange("exchange", type="topic")
    queue = kombu.Queue("queue", exchange, routing_key="#")(channel)
    queue.declare()
    received: list[Any] = []
    with kombu.Consumer(channel, queue, on_message=received.append):
        route = {"exchange": "", "routing_key": "queue"}
        properties = {"delivery_info": route, **broken.pop("properties", {})}
        header = {"headers": {}, "properties": properties, **broken}
        servers.consumers[-1].handle(ScriptedMessage(b"\xff", {"kombu": orjson.dumps(header).decode()}))
        drain(channel)
    (message,) = received
    assert message.body == b"\xff"
