"""Settings of keys over tags, their errors, and what consumers say about a partition that is blocked."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import create_task_group
from attrs import evolve

from nsqext import Consumer, ExtFilter, Message, Producer
from nsqext.broker import Cluster, ClusterOptions
from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions import key_buckets
from nsqext.client.consumer.subscriptions.key_buckets import DeliveryWatch, KeyBuckets
from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
from nsqext.client.consumer.subscriptions.subscription import Subscription
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.lookup.node_channels import NodeChannels
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import Address, TopicMeta
from tests.support.consumers import QUICK, eventually
from tests.support.stats import channel_stats, client_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.lookup.node_stats import PartitionChannelStats

TAGS: dict[str, Any] = {"dispatch": "key_failover", "key_tags": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node, shared by the tests of this module."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"key_tags": 4}, "key_tags has no effect without dispatch='key_failover'"),
        ({**TAGS, "tag": "blue"}, "tag and key_tags contradict each other"),
        ({"key_tags": 0}, "key_tags has no effect without dispatch='key_failover'"),
        ({**TAGS, "key_tags": -1}, "key_tags=-1 is not a number of buckets, 0 to 1024"),
        ({**TAGS, "ordered": True}, "ordered and dispatch='key_failover' contradict each other"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Consumer("t", "ch", lookupd="127.0.0.1:1", **settings)


def _request(partition: int | None, meta: TopicMeta, **settings: Any) -> SubscribeRequest:
    """Return the first request of a consumer, which has chosen tags if it has a number of them."""
    count = settings.get("key_tags", 0)
    options = ConsumerOptions(dispatch="key_failover", **settings)
    return SubscribeRequest(
        "t",
        "ch",
        partition,
        Address("h", 1),
        meta,
        tag="x" if count else None,
        options=options,
        client_id="me",
        key_tags=count,
    )


RELEASED = Negotiated(version="0.3.7")
EMBEDDED = Negotiated(dispatch="key_failover")
EXTEND = TopicMeta(1, extend_support=True)


@pytest.mark.parametrize("settings", [{}, {"key_tags": 4}], ids=["chosen by the server", "tags"])
def test_servers_and_topics_without_tags_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="needs a redesigned NSQ with lookup"):
        _request(None, TopicMeta(), **settings).supported_by(RELEASED)
    with pytest.raises(InvalidSetting, match="does not support extend headers, which key_tags needs"):
        _request(0, TopicMeta(1), **settings).supported_by(RELEASED)
    with pytest.raises(
        InvalidSetting, match=r"tags share the keys of publish\(key=...\), not keys of the header 'order'"
    ):
        _request(0, EXTEND, key="order", **settings).supported_by(RELEASED)


def test_a_consumer_that_has_chosen_tags_uses_them_at_every_server() -> None:
    request = _request(0, EXTEND, key_tags=4)
    assert request.supported_by(RELEASED) is request
    assert request.supported_by(Negotiated(dispatch="shared")) is request
    asked = request.identify()
    assert (asked.client_id, asked.desired_tag, asked.extra) == ("me", "x", {"dispatch": "shared"})


def test_a_consumer_shares_keys_as_the_server_supports_it() -> None:
    request = _request(0, EXTEND)
    asked = request.identify()
    assert (asked.client_id, asked.desired_tag, asked.extra) == ("", None, {"dispatch": "key_failover"})
    assert (request.supported_by(EMBEDDED), request.key_sharing, request.verb) == (request, KeySharing.SERVER, "SUB")
    by_tags = request.supported_by(RELEASED)
    assert (by_tags.key_sharing, by_tags.key_tags, by_tags.verb) == (KeySharing.TAGS, 16, "SUB_ADVANCED")
    asked = by_tags.identify()
    assert (asked.client_id, asked.desired_tag, asked.extra) == ("me", "keys-16-none", {"dispatch": "shared"})
    assert by_tags.supported_by(RELEASED) is by_tags
    with pytest.raises(InvalidSetting, match="supports dispatch by key_failover now"):  # it was replaced meanwhile
        by_tags.supported_by(Negotiated(dispatch="shared"))


@pytest.mark.parametrize(
    ("settings", "given"),
    [({"tag": "blue"}, "tag"), ({"ext_filter": ExtFilter(1, "a", "b")}, "ext_filter"), ({"key_tags": 0}, "key_tags=0")],
)
def test_settings_that_leave_no_tags_are_refused_where_tags_are_needed(settings: dict[str, Any], given: str) -> None:
    request = _request(0, EXTEND, **settings)
    assert request.supported_by(EMBEDDED) is request
    with pytest.raises(InvalidSetting, match=f"version 0.3.7.*, and {given} leaves no tags to share the keys by"):
        request.supported_by(RELEASED)


@pytest.mark.anyio
async def test_a_consumer_without_lookup_is_refused(cluster: Cluster) -> None:
    cluster.create_topic("fixed", extend=True, channels=["ch"])
    [node] = cluster.nodes.values()
    consumer = Consumer("fixed", "ch", nsqd=node.tcp, **TAGS, **QUICK)
    consumer.handler(_nothing)
    with pytest.raises(InvalidSetting, match="needs a redesigned NSQ with lookup"):
        await consumer.serve()


def _recorded(*consumers: Consumer) -> list[bytes]:
    """Return the bodies of the messages that consumers handle, while they do."""
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    for consumer in consumers:
        consumer.handler(handle)
    return got


async def _nothing(_: Message) -> None:
    await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_a_tag_of_the_caller_is_refused(cluster: Cluster) -> None:
    cluster.create_topic("tagged", extend=True, channels=["ch"])
    async with Producer(cluster.lookupd, key_tags=4) as producer:
        with pytest.raises(InvalidInput, match="tag='blue' and key_tags contradict each other"):
            await producer.publish("tagged", b"x", key="a", tag="blue")


@pytest.mark.anyio
async def test_a_message_without_a_bucket_is_logged_and_taken_by_another_consumer(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_buckets, "_POLL", 0.05)
    name = "blocked"
    cluster.create_topic(name, extend=True, channels=["ch"])
    buckets = Consumer(name, "ch", lookupd=cluster.lookupd, **TAGS, **QUICK)
    plain = Consumer(name, "ch", lookupd=cluster.lookupd, **QUICK)
    got = _recorded(buckets, plain)
    async with (
        create_task_group() as tasks,
        Producer(cluster.lookupd) as untagged,
        Producer(cluster.lookupd, key_tags=4) as producer,
    ):
        tasks.start_soon(buckets.serve)
        await eventually(lambda: len(buckets.connections) == 5)
        await producer.publish(name, b"first", key="b")
        await eventually(lambda: got == [b"first"])
        await untagged.publish(name, b"old", key="a")
        await producer.publish(name, b"new", key="a")
        await eventually(lambda: "the next message has no tag of key_tags=4" in caplog.text)
        assert got == [b"first"]
        tasks.start_soon(plain.serve)
        await eventually(lambda: got == [b"first", b"old", b"new"])
        buckets.stop()
        plain.stop()


@pytest.fixture(scope="module")
def released() -> Iterator[Cluster]:
    """A node that does not know dispatch types, like all released servers."""
    with Cluster(nodes=1, options=ClusterOptions(limits=ServerLimits(key_failover=False))) as cluster:
        yield cluster


@pytest.mark.anyio
@pytest.mark.parametrize("by_tags", [False, True], ids=["command", "tags"])
async def test_the_same_consumer_keeps_the_order_at_both_kinds_of_servers(
    cluster: Cluster, released: Cluster, caplog: pytest.LogCaptureFixture, *, by_tags: bool
) -> None:
    caplog.set_level("INFO")
    used = released if by_tags else cluster
    used.create_topic("both", partitions=2, extend=True, channels=["ch"])
    got: dict[str, list[int]] = defaultdict(list)

    async def handle(message: Message) -> None:
        got[str(message.key)].append(int(message.body))

    consumers = [
        Consumer("both", "ch", lookupd=used.lookupd, dispatch="key_failover", concurrency=4, **QUICK) for _ in range(2)
    ]
    connections = 2 * (2 + 16 * by_tags)  # to each partition, one of each consumer and one for each bucket
    async with create_task_group() as tasks, Producer(used.lookupd, key_tags=16) as producer:
        for consumer in consumers:
            consumer.handler(handle)
            tasks.start_soon(consumer.serve)
        await eventually(lambda: sum(len(one.connections) for one in consumers) == connections)
        for number in range(200):
            await producer.publish("both", b"%d" % number, key=f"key-{number % 20}")
        await eventually(lambda: sum(map(len, got.values())) == 200)
        for consumer in consumers:
            consumer.stop()
    assert dict(got) == {f"key-{first}": list(range(first, 200, 20)) for first in range(20)}
    how = "by their tags, with key_tags=16" if by_tags else "by the server"
    assert f"consumers share the keys {how}" in caplog.text


@pytest.mark.anyio
async def test_producers_that_write_no_tags_end_the_consumer(
    released: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_buckets, "_POLL", 0.05)
    released.create_topic("untagged", extend=True, channels=["ch"])
    async with Producer(released.lookupd) as producer:
        await producer.publish("untagged", b"x", key="a")
    consumer = Consumer("untagged", "ch", lookupd=released.lookupd, dispatch="key_failover", **QUICK)
    consumer.handler(_nothing)
    with pytest.raises(InvalidSetting, match="the next message has no tag of key_tags=16") as error:
        await consumer.serve()
    assert "give all producers of the topic key_tags=16" in str(error.value)


@pytest.mark.anyio
async def test_a_paused_consumer_is_no_reason_to_end(
    released: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages wait and none is in flight, because the owner of their bucket requests none."""
    monkeypatch.setattr(key_buckets, "_POLL", 0.02)
    monkeypatch.setattr(key_buckets, "_BLOCKED", 2)
    released.create_topic("paused", extend=True, channels=["ch"])
    looks = 0
    consumer = Consumer("paused", "ch", lookupd=released.lookupd, dispatch="key_failover", **QUICK)
    got = _recorded(consumer)

    def count(self: KeyBuckets, found: PartitionChannelStats) -> None:
        nonlocal looks
        looks += found.depth > 0
        watch(self, found)

    watch = KeyBuckets._watch
    monkeypatch.setattr(KeyBuckets, "_watch", count)
    async with create_task_group() as tasks, Producer(released.lookupd, key_tags=16) as producer:
        tasks.start_soon(consumer.serve)
        await eventually(lambda: len(consumer.connections) == 17)
        consumer.pause()
        await producer.publish("paused", b"x", key="a")
        await eventually(lambda: looks > 5)
        assert got == []
        consumer.resume()
        await eventually(lambda: got == [b"x"])
        consumer.stop()
    assert "no message is delivered" not in caplog.text


@pytest.mark.anyio
async def test_consumers_with_different_numbers_are_logged(
    released: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_buckets, "_POLL", 0.05)
    released.create_topic("mixed", extend=True, channels=["ch"])
    first, second = (
        Consumer("mixed", "ch", lookupd=released.lookupd, **{**TAGS, "key_tags": count}, **QUICK) for count in (4, 8)
    )
    async with create_task_group() as tasks:
        for consumer in (first, second):
            consumer.handler(_nothing)
            tasks.start_soon(consumer.serve)
        await eventually(lambda: caplog.text.count("give all producers and consumers the same number") == 2)
        first.stop()
        second.stop()
    assert "other consumers have key_tags=8, and this consumer 4" in caplog.text
    assert "other consumers have key_tags=4, and this consumer 8" in caplog.text


def _found(read: int, *clients: tuple[str, int, int], paused: bool = False) -> PartitionChannelStats:
    entries = (
        client_entry("me", tag, ready_count=ready, in_flight_count=in_flight) for tag, in_flight, ready in clients
    )
    return channel_stats(*entries, paused=paused, message_count=read)


@pytest.mark.parametrize(
    ("looks", "delivers"),
    [
        ([_found(0, ("a", 0, 1), ("b", 0, 1))], 1),  # nothing can hold back a message
        ([_found(0, ("a", 0, 1), ("b", 1, 1))], 0),  # one of b may hold back those of a
        ([_found(0, ("a", 0, 1), ("b", 1, 1), ("b", 0, 1))], 1),  # not while another consumer takes it
        ([_found(0, ("a", 0, 1), ("b", 0, 0))], 0),  # the owner of b requests nothing, or has sent CLS
        ([_found(0, ("a", 0, 1))], 0),  # b has no owner
        ([_found(9, ("b", 1, 1)), _found(9, ("b", 1, 1))], 0),
        ([_found(8, ("b", 1, 1)), _found(9, ("b", 1, 1))], 1),  # the server has read on
        ([_found(9, ("b", 1, 1)), _found(8, ("b", 1, 1))], 0),  # the channel was moved back
        ([_found(9, ("a", 0, 1), ("b", 0, 1), paused=True)] * 2, 0),
    ],
)
def test_when_the_server_has_redelivered_what_was_requeued(looks: list[PartitionChannelStats], delivers: int) -> None:
    watch = DeliveryWatch({"a", "b"})
    for found in looks:
        watch.note(found)
    assert (watch.looks, watch.last) == (delivers, looks[-1])


class Nodes:
    """What nodes say about channels, changed for the consumers of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes: dict[str, Any] = {}
        """Members of the statistics that are replaced."""
        self.hidden: set[str] = set()
        """Consumers that have died as far as the nodes say."""
        self.looks = 0
        self.owned: Counter[str] = Counter()
        """Connections of each consumer."""
        channel = NodeChannels.channel

        async def changed(channels: NodeChannels, *where: Any) -> PartitionChannelStats | None:
            found = await channel(channels, *where)
            if found is None:
                return None
            self.looks += 1
            self.owned = Counter(client.client_id for client in found.clients)
            clients = tuple(client for client in found.clients if client.client_id not in self.hidden)
            return evolve(found, clients=clients, **self.changes)

        monkeypatch.setattr(NodeChannels, "channel", changed)
        monkeypatch.setattr(key_buckets, "_POLL", 0.05)
        monkeypatch.setattr(key_buckets, "_TAKEOVER_POLL", 0.05)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Answers of nodes that can be changed, and short pauses between two looks."""
    return Nodes(monkeypatch)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """RDY counts of each client for the only bucket."""
    requested: dict[str, list[int]] = defaultdict(list)
    set_ready = Subscription.set_ready

    def record(self: Subscription, count: int) -> None:
        if self.request.tag == "keys-1-0":
            requested[self.request.client_id].append(count)
        set_ready(self, count)

    monkeypatch.setattr(Subscription, "set_ready", record)
    return requested


@pytest.mark.anyio
@pytest.mark.parametrize(("unconfirmed", "first_request"), [(100, 100), (1000, 150), (5, 10)])
async def test_a_new_owner_requests_what_the_last_one_may_have_in_flight(
    released: Cluster, nodes: Nodes, requested: dict[str, list[int]], unconfirmed: int, first_request: int
) -> None:
    name = f"takeover_{unconfirmed}"
    released.create_topic(name, extend=True, channels=["ch"])
    first, second = (
        Consumer(name, "ch", lookupd=released.lookupd, **{**TAGS, "key_tags": 1, "max_in_flight": most}, **QUICK)
        for most in (300, 10)
    )
    nodes.changes = {"depth": unconfirmed, "in_flight": 1}
    async with create_task_group() as tasks:
        first.handler(_nothing)
        tasks.start_soon(first.serve)
        await eventually(lambda: len(first.connections) == 2 and 150 in next(iter(requested.values())))
        second.handler(_nothing)
        tasks.start_soon(second.serve)
        await eventually(lambda: len(second.connections) == 1)
        before = nodes.looks
        await eventually(lambda: nodes.looks > before + 4)
        nodes.hidden = {*requested}
        await eventually(lambda: len(second.connections) == 2)
        first.stop()
        second.stop()
    _, by_second = requested.values()
    assert by_second[0] == first_request


@pytest.mark.anyio
async def test_a_new_owner_handles_nothing_while_other_buckets_hold_back_messages(
    released: Cluster, nodes: Nodes, requested: dict[str, list[int]]
) -> None:
    released.create_topic("held", extend=True, channels=["ch"])
    nodes.changes = {"paused": True}
    consumer = Consumer("held", "ch", lookupd=released.lookupd, **{**TAGS, "key_tags": 1, "max_in_flight": 10}, **QUICK)
    got = _recorded(consumer)
    async with create_task_group() as tasks, Producer(released.lookupd, key_tags=1) as producer:
        await producer.publish_many("held", [b"%d" % number for number in range(35)], key="a")
        tasks.start_soon(consumer.serve)
        await eventually(lambda: [10, 20, 30, 40] in requested.values())
        assert got == []
        nodes.changes = {}
        await eventually(lambda: len(got) == 35)
        consumer.stop()
    assert got == [b"%d" % number for number in range(35)]


@pytest.mark.anyio
async def test_a_bucket_that_is_released_before_its_messages_are_sorted_is_not_handled(
    released: Cluster, nodes: Nodes
) -> None:
    released.create_topic("returned", extend=True, channels=["ch"])
    consumers = [Consumer("returned", "ch", lookupd=released.lookupd, **TAGS, **QUICK) for _ in range(2)]
    got = [_recorded(consumer) for consumer in consumers]
    nodes.changes = {"paused": True}
    async with create_task_group() as tasks, Producer(released.lookupd, key_tags=4) as producer:
        for number in range(40):
            await producer.publish("returned", b"%d" % number, key=f"key-{number % 20}")
        for consumer, owned in zip(consumers, ([5], [3, 3]), strict=True):
            tasks.start_soon(consumer.serve)
            await eventually(lambda: [*nodes.owned.values()] == owned)  # noqa: B023 - it is awaited at once
        assert got == [[], []]
        nodes.changes = {}
        await eventually(lambda: sum(map(len, got)) == 40)
        assert all(got)
        for consumer in consumers:
            consumer.stop()


@pytest.mark.anyio
async def test_a_takeover_that_takes_too_long_is_logged(
    released: Cluster, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_buckets, "_LONGEST_TAKEOVER", 0.3)
    released.create_topic("late", extend=True, channels=["ch"])
    nodes.changes = {"paused": True}
    consumer = Consumer("late", "ch", lookupd=released.lookupd, **{**TAGS, "key_tags": 1}, **QUICK)
    got = _recorded(consumer)
    async with create_task_group() as tasks, Producer(released.lookupd, key_tags=1) as producer:
        await producer.publish("late", b"x", key="a")
        tasks.start_soon(consumer.serve)
        await eventually(lambda: got == [b"x"])
        consumer.stop()
    assert "messages of other buckets have held back those of keys-1-0" in caplog.text
