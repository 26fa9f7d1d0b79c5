"""The transport of kombu on clusters of both generations."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from attrs import evolve
from kombu.exceptions import ChannelError

from nsqext import sync
from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import InvalidSetting, InvalidState, NotSent, NsqError, OperationNotSupported
from nsqext.lookup.metadata import MetadataCache
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.blocking_client import eventually

Connect = Callable[..., Any]
_SECONDS = 25.0
_NEVER = 0.3
"""Seconds after which a message that must not arrive counts as absent."""


class Receiver:
    """Consumes queues of a connection, and keeps what it received."""

    def __init__(self, connection: Any, *queues: Any, prefetch: int = 0, ack: bool = True) -> None:
        self.messages: list[Any] = []
        self._connection = connection
        self._ack = ack
        self.channel = connection.channel()
        self.consumer = kombu.Consumer(self.channel, queues, callbacks=[self._take], accept=["json"])
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def _take(self, body: Any, message: Any) -> None:
        self.messages.append(message)
        if self._ack:
            message.ack()

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]

    def wait(self, count: int) -> list[Any]:
        """Wait until ``count`` messages have arrived."""
        while len(self.messages) < count:
            self._connection.drain_events(timeout=_SECONDS)
        return self.bodies

    def idle(self) -> bool:
        """Return whether no message arrives."""
        with pytest.raises(socket.timeout):
            self._connection.drain_events(timeout=_NEVER)
        return True


def publish(connection: Any, body: Any, *declare: Any, **options: Any) -> None:
    """Publish from a channel of its own."""
    with connection.channel() as channel:
        kombu.Producer(channel).publish(body, declare=list(declare), serializer="json", **options)


def test_a_queue_keeps_messages_until_a_consumer_comes(connect: Connect, name: str) -> None:
    queue = kombu.Queue(name, kombu.Exchange(name), routing_key=name)
    connection = connect()
    publish(connection, {"n": 1}, queue, exchange=name, routing_key=name, headers={"h": "1"})
    publish(connection, {"n": 2}, routing_key=name)  # the default exchange
    receiver = Receiver(connection, queue)
    assert sorted(body["n"] for body in receiver.wait(2)) == [1, 2]
    first = next(message for message in receiver.messages if message.payload == {"n": 1})
    assert (first.headers["h"], first.delivery_info["exchange"], first.delivery_info["routing_key"]) == (
        "1",
        name,
        name,
    )
    assert receiver.idle()


def test_a_closed_channel_is_an_error_after_which_kombu_connects_again(connect: Connect, name: str) -> None:
    queue = kombu.Queue(name)
    connection = connect()
    receiver = Receiver(connection, queue)
    producer = kombu.Producer(connection.channel(), serializer="json")
    producer.channel.close()
    with pytest.raises(NotSent, match="the channel is closed"):
        producer.publish("lost", routing_key=name)
    assert issubclass(NotSent, connection.connection_errors)
    publish(connection, "kept", routing_key=name)
    assert receiver.wait(1) == ["kept"]


def test_each_queue_of_a_routing_key_gets_a_copy_and_others_do_not(connect: Connect, name: str) -> None:
    exchange = kombu.Exchange(name, "direct")
    one, two = (kombu.Queue(f"{name}_{number}", exchange, routing_key="both") for number in (1, 2))
    other = kombu.Queue(f"{name}_3", exchange, routing_key="other")
    connection = connect()
    publish(connection, "copy", one, two, other, exchange=exchange, routing_key="both")
    first, second = connect(), connect()
    assert Receiver(first, one).wait(1) == Receiver(second, two).wait(1) == ["copy"]
    assert Receiver(connection, other).idle()


@pytest.mark.parametrize("kind", ["fanout", "topic"])
def test_the_publisher_does_not_know_the_queues_of_fanout_and_topic_exchanges(
    connect: Connect, name: str, kind: str
) -> None:
    exchange = kombu.Exchange(name, kind)
    consuming, publishing = connect(), connect()
    queue = kombu.Queue(f"{name}@host/1", exchange, routing_key="worker.#", auto_delete=True)
    receiver = Receiver(consuming, queue)
    publish(publishing, "drop" if kind == "topic" else "all", exchange, exchange=exchange, routing_key="task.sent")
    publish(publishing, "take", exchange, exchange=exchange, routing_key="worker.online")
    assert receiver.wait(1 if kind == "topic" else 2)[-1] == "take"
    assert receiver.bodies[:-1] == ([] if kind == "topic" else ["all"])


def test_a_message_of_a_declared_queue_that_was_deleted_is_not_lost(
    cluster: Cluster, connect: Connect, name: str
) -> None:
    queue = kombu.Queue(name)
    connection = connect()
    queue(connection.default_channel).declare()
    with sync.Admin(cluster.lookupd) as admin:
        admin.delete_topic(name)
    publish(connection, "kept", queue, routing_key=name)
    assert Receiver(connect(), queue).wait(1) == ["kept"]


def test_a_message_without_a_queue_raises_nothing_and_makes_no_queue(
    cluster: Cluster, connect: Connect, name: str
) -> None:
    exchange = kombu.Exchange(name, "fanout", durable=False)
    with sync.Admin(cluster.lookupd) as admin:
        before = admin.topics()
        publish(connect(), "lost", exchange, exchange=exchange)
        made = [found for topic, found in admin.topics().items() if topic not in before]
        assert [found.channels for found in made] == [()] * len(made)


def test_a_queue_that_must_not_be_created_has_to_exist(cluster: Cluster, name: str) -> None:
    """Its tasks were dropped, and their publishers noticed nothing."""
    queue = kombu.Queue(name, kombu.Exchange("", "direct"), routing_key=name)
    with kombu.Connection(f"nsq://{cluster.lookupd[0]}", transport_options={"topic_create": False}) as connection:
        with pytest.raises(InvalidState, match="the topic of a queue does not exist, and topic_create is False"):
            publish(connection, "one", queue, routing_key=name)
        cluster.create_topic(name, channels=["other"])
        with pytest.raises(InvalidState, match=f"the channel {name} of a queue does not exist"):
            publish(connection, "one", queue, routing_key=name)
        if cluster.generation == "redesigned":  # the first channel of the original NSQ receives all messages
            cluster.create_topic(bare := f"{name}_bare")
            with pytest.raises(InvalidState, match=f"the channel {bare} of a queue does not exist"):
                publish(connection, "one", kombu.Queue(bare), routing_key=bare)
        with sync.Admin(cluster.lookupd) as admin:
            admin.create_channel(name, name)
        publish(connection, "one", queue, routing_key=name)
        receiver = Receiver(connection, queue)
        assert receiver.wait(1) == ["one"]


def test_prefetch_bounds_unacknowledged_messages_and_close_returns_them(connect: Connect, name: str) -> None:
    queue = kombu.Queue(name)
    connection = connect()
    for number in range(5):
        publish(connection, number, queue, routing_key=name)
    receiver = Receiver(connection, queue, prefetch=2, ack=False)
    receiver.wait(2)
    assert receiver.idle()
    assert queue(receiver.channel).queue_declare().message_count == 3, "messages in flight do not wait"
    receiver.messages[0].ack()
    receiver.wait(3)
    assert receiver.idle()
    receiver.consumer.qos(prefetch_count=3)
    receiver.wait(4)
    assert receiver.idle()
    receiver.channel.close()
    rest = Receiver(connect(), queue)
    assert sorted(rest.wait(4)) == sorted(set(range(5)) - {receiver.bodies[0]})


def test_deleting_a_queue_keeps_what_was_received_from_others(connect: Connect, cluster: Cluster, name: str) -> None:
    connection = connect()
    first, second = (kombu.Queue(f"{name}_{number}") for number in range(2))
    for queue in (first, second):
        publish(connection, queue.name, queue, routing_key=queue.name)
    receiver = Receiver(connection, first, second)
    with sync.Admin(cluster.lookupd) as admin:
        for queue in (first, second):
            eventually(lambda queue=queue: any(one.in_flight for one in admin.stats(queue.name).channels.values()))  # type: ignore[misc]
    receiver.channel.queue_delete(first.name)
    assert receiver.wait(1) == [second.name]
    assert not receiver.messages[0].delivery_info.get("redelivered")


def test_an_exchange_that_is_deleted_leaves_the_queues_that_are_consumed(connect: Connect, name: str) -> None:
    """Kombu deletes the queues of an exchange that are unused and empty; their consumers and tasks in flight count."""
    queue = kombu.Queue(name, kombu.Exchange(name), routing_key="a")
    receiver, other = Receiver(worker := connect(), queue, ack=False), connect()
    publish(worker, 1, queue, exchange=name, routing_key="a")
    assert receiver.wait(1) == [1]
    with other.channel() as channel:
        queue(channel).declare()
        queue.exchange(channel).delete()
    receiver.channel.close()
    assert Receiver(worker, queue).wait(1) == [1], "it was not acknowledged"


def test_a_message_without_a_bound_queue_is_logged(
    cluster: Cluster, connect: Connect, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The original NSQ keeps it for the first queue; events and replies need no receiver."""
    connection = connect()
    for kind, durable in (("direct", True), ("fanout", True), ("topic", True), ("direct", False)):
        exchange = kombu.Exchange(f"{name}_{kind}_{durable}", kind, durable=durable)
        publish(connection, 1, exchange, exchange=exchange, routing_key="other")
    text = f"a message is dropped, because no queue is bound: exchange '{name}_direct_True', routing key 'other'"
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert found == [text] * (cluster.generation == "redesigned")


def test_messages_of_a_removed_binding_are_dropped(connect: Connect, name: str) -> None:
    exchange = kombu.Exchange(name, "topic")
    queue = kombu.Queue(name, bindings=[kombu.binding(exchange, "a"), kombu.binding(exchange, "b")])
    connection = connect()
    receiver = Receiver(connection, queue)
    receiver.channel.queue_unbind(name, name, "a")
    for key in ("a", "b"):
        publish(connection, key, exchange, exchange=exchange, routing_key=key)
    assert receiver.wait(1) == ["b"]
    assert receiver.idle()


def test_an_expired_message_is_not_delivered(connect: Connect, name: str) -> None:
    with connect().channel() as channel:
        channel.deliver(SimpleNamespace(queue=name), {}, SimpleNamespace(expired=True))  # nothing else is used of it


def test_the_pipe_that_wakes_the_loop_of_celery_is_closed(connect: Connect) -> None:
    connection = connect()
    added: list[int] = []
    loop = SimpleNamespace(add_reader=lambda end, *_: added.append(end))
    connection.connect()
    transport = connection.transport
    transport.register_with_event_loop(connection.connection, loop)
    assert stat.S_ISFIFO(os.fstat(added[0]).st_mode)
    pipe = os.fstat(added[0]).st_ino
    connection.release()
    with suppress(OSError):  # another thread may have opened a file with this number
        assert os.fstat(added[0]).st_ino != pipe
    transport.close_connection(connection)  # again: the numbers may be those of other files


def test_a_transient_queue_ends_with_its_last_consumer(connect: Connect, cluster: Cluster, name: str) -> None:
    connection = connect()
    queue = kombu.Queue(name, kombu.Exchange(name, "fanout", durable=False), auto_delete=True)
    receiver = Receiver(connection, queue)
    publish(connection, 1, exchange=name)
    assert receiver.wait(1) == [1]
    (topic,) = connection.transport.queues[name].topics
    publish(connection, 2, exchange=name)  # received, not delivered
    receiver.consumer.cancel()
    with sync.Admin(cluster.lookupd) as admin:
        eventually(lambda: not admin.channels(topic))
    assert Receiver(connection, queue).idle()


def test_reject_and_requeue(connect: Connect, name: str) -> None:
    queue = kombu.Queue(name)
    connection = connect()
    publish(connection, "again", queue, routing_key=name)
    receiver = Receiver(connection, queue, ack=False)
    receiver.wait(1)
    receiver.messages[0].requeue()
    receiver.wait(2)
    assert receiver.messages[1].delivery_info["redelivered"]
    receiver.consumer.cancel()
    receiver.messages[1].reject()  # after cancel, before the channel closes
    receiver.channel.close()
    assert Receiver(connect(), queue).idle()


def test_count_purge_get_and_delete(connect: Connect, cluster: Cluster, name: str) -> None:
    connection = connect()
    with connection.channel() as channel:
        queue = kombu.Queue(name)(channel)
        assert queue.queue_declare().message_count == 0
        for number in range(3):
            publish(connection, number, routing_key=name)
        channel.queue_delete(name, if_empty=True)
        assert queue.queue_declare().message_count == 3
        found = connection.transport
        assert found.clients.waiting([f"{name}_gone", name], found.queues[name].channel) == 3
        message = queue.get(no_ack=True)
        assert message is not None
        with sync.Admin(cluster.lookupd) as admin:
            eventually(lambda: not any(one.clients for one in admin.stats(name).channels.values()))
        assert queue.purge() == 2
        if cluster.generation == "original":  # the redesigned NSQ delivers the record that it had read ahead
            assert queue.get() is None
        queue.delete()
        with sync.Admin(cluster.lookupd) as admin:
            assert name not in admin.topics()
        with pytest.raises(ChannelError, match="no queue"):
            queue.queue_declare(passive=True)


def test_a_task_with_an_eta_stays_at_the_server_until_then(connect: Connect, name: str) -> None:
    queue = kombu.Queue(name)
    connection = connect(eta_hold=0.2)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    publish(connection, "later", queue, routing_key=name, headers={"eta": later.isoformat()})
    publish(connection, "now", queue, routing_key=name)
    receiver = Receiver(connection, queue)
    assert receiver.wait(1)[0] == "now" or datetime.datetime.now(datetime.UTC) > later, "on a slow machine it is due"
    assert sorted(receiver.wait(2)) == ["later", "now"]
    assert datetime.datetime.now(datetime.UTC) > later - datetime.timedelta(seconds=0.5)
    assert not any(message.delivery_info.get("redelivered") for message in receiver.messages)


@pytest.mark.parametrize("cluster", ["redesigned"], indirect=True)  # the original NSQ has no ordered topics
def test_a_task_with_an_eta_on_an_ordered_topic_does_not_fail_until_then(
    cluster: Cluster, connect: Connect, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic(name, ordered=True, channels=[name])
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
    queue = kombu.Queue(name)
    connection = connect(eta_hold=0.2, topic_create=False)
    publish(connection, "later", queue, routing_key=name, headers={"eta": later.isoformat()})
    publish(connection, "behind", queue, routing_key=name)
    assert Receiver(connection, queue).wait(2) == ["later", "behind"]
    assert datetime.datetime.now(datetime.UTC) > later - datetime.timedelta(seconds=0.5)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_expired_messages_are_dropped(connect: Connect, name: str) -> None:
    queue = kombu.Queue(name)
    connection = connect()
    publish(connection, "expired", queue, routing_key=name, expiration=0.1)
    publish(connection, "kept", queue, routing_key=name, expiration=60)
    time.sleep(0.2)
    receiver = Receiver(connection, queue)
    assert receiver.wait(1) == ["kept"]
    assert receiver.idle()


def test_a_task_beyond_the_longest_timeout_of_the_server_is_an_error_in_the_log(
    cluster: Cluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = evolve(
        ServerLimits() if cluster.generation == "redesigned" else ServerLimits.original(), max_msg_timeout=2.0
    )
    options = ClusterOptions(limits=limits)
    with (
        Cluster(1, generation=cluster.generation, options=options) as strict,
        kombu.Connection(f"nsq://{strict.lookupd[0]}", transport_options={"msg_timeout": 1.0}) as connection,
    ):
        publish(connection, "long", kombu.Queue(name), routing_key=name)
        receiver = Receiver(connection, kombu.Queue(name), ack=False)
        receiver.wait(2)
        eventually(lambda: "and the server delivers it again" in caplog.text)  # while the first one still runs
        assert "-max-msg-timeout (2 s)" in caplog.text
        receiver.messages[0].ack()
        assert f"queue {name}: a message was acknowledged after the server had taken it back" in caplog.text
        receiver.messages[1].ack()
        assert receiver.idle()


def test_a_connection_survives_the_restart_of_its_servers(cluster: Cluster, name: str, tmp_path: Path) -> None:
    with (
        Cluster(1, generation=cluster.generation, data_path=tmp_path) as killed,
        kombu.Connection(
            f"nsq://{killed.lookupd[0]}", transport_options={"lookup_poll_interval": 0.5, "timeout": 20.0}
        ) as connection,
    ):
        queue = kombu.Queue(name)
        receiver = Receiver(connection, queue)
        for number, server in enumerate(("n1", "l1", "n1")):
            killed.kill(server)
            killed.restart(server)
            publish(connection, number, queue, routing_key=name)
            while number not in receiver.bodies:  # others may be delivered again
                connection.drain_events(timeout=_SECONDS)


def test_the_clients_of_a_connection_share_a_lookup(
    connect: Connect, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[MetadataCache] = []
    original = MetadataCache.__init__

    def record(cache: MetadataCache, *arguments: Any, **options: Any) -> None:
        made.append(cache)
        original(cache, *arguments, **options)

    monkeypatch.setattr(MetadataCache, "__init__", record)
    connection = connect()
    for number in range(2):
        queue = kombu.Queue(f"{name}_{number}")
        publish(connection, number, queue, routing_key=queue.name)
        assert Receiver(connection, queue).wait(1) == [number]
    assert len(made) == 1


def test_messages_of_other_publishers_are_delivered_as_binary(connect: Connect, cluster: Cluster, name: str) -> None:
    connection = connect()
    receiver = Receiver(connection, kombu.Queue(name))
    receiver.consumer.accept = None
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(name, b"from Go")
    while not receiver.messages:
        connection.drain_events(timeout=_SECONDS)
    message = receiver.messages[0]
    assert (bytes(message.body), message.content_type) == (b"from Go", "application/data")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"visibility_timeout": 3600}, "visibility_timeout has no effect with NSQ"),
        ({"sample_rate": 50}, "tasks would be lost with the transport option sample_rate"),
        ({"partitions": (0,)}, "tasks would be lost with the transport option partitions"),
        ({"dispatch": "key_failover"}, "tasks would be lost with the transport option dispatch"),
        ({"conect_timeout": 3}, "did you mean connect_timeout"),
        ({"topic_partitions": 0}, "topic_partitions=0 is not a positive number"),
        ({"connect_timeout": -1}, "connect_timeout=-1 is not"),
    ],
)
def test_transport_options_are_checked(connect: Connect, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        connect(**options).transport  # noqa: B018 - made when it is asked for


def test_what_nsq_does_not_have_is_refused(connect: Connect, name: str) -> None:
    connection = connect()
    with pytest.raises(OperationNotSupported, match="NSQ has no priorities"):
        publish(connection, "x", kombu.Queue(name), routing_key=name, priority=5)
    with connection.channel() as channel, pytest.raises(ChannelError, match="no exchanges of type 'headers'"):
        kombu.Exchange(name, "headers")(channel).declare()
    with connection.channel() as channel, pytest.raises(ChannelError, match="NSQ has no priorities"):
        kombu.Queue(name, max_priority=9)(channel).declare()


def test_a_lookup_that_does_not_respond_is_a_connection_error() -> None:
    connection = kombu.Connection("nsq://127.0.0.1:1", transport_options={"lookup_timeout": 0.1})
    with pytest.raises(NsqError) as caught:
        connection.connect()
    assert isinstance(caught.value, connection.connection_errors)


def test_a_server_that_is_no_lookup_service_is_not_tried_again(cluster: Cluster) -> None:
    address = next(iter(cluster.nodes.values())).tcp
    with kombu.Connection(f"nsq://{address}") as connection:
        with pytest.raises(InvalidState, match="lookup") as caught:
            connection.ensure_connection(errback=lambda error, _: pytest.fail(f"tried again after {error}"))
        assert not isinstance(caught.value, connection.connection_errors)


def test_the_next_broker_is_used_when_one_does_not_respond(cluster: Cluster, name: str) -> None:
    urls = f"nsq://127.0.0.1:1;nsq://{cluster.lookupd[0]}"
    with kombu.Connection(urls, transport_options={"lookup_timeout": 0.1}) as connection:
        connection.ensure_connection(max_retries=2)
        publish(connection, 1, kombu.Queue(name), routing_key=name)
        assert Receiver(connection, kombu.Queue(name)).wait(1) == [1]


def test_one_nsqd_without_lookup(cluster: Cluster, name: str) -> None:
    if cluster.generation == "redesigned":
        cluster.create_topic(name, channels=[name])
    address = next(iter(cluster.nodes.values())).tcp
    with kombu.Connection(f"nsqd://{address}") as connection:
        publish(connection, 1, kombu.Queue(name), routing_key=name)
        receiver = Receiver(connection, kombu.Queue(name))
        assert receiver.wait(1) == [1]
        with pytest.raises(NsqError, match="use nsq://"):
            kombu.Queue(name)(receiver.channel).purge()
