"""How consumers share keys, by the server or over tags: what is asked for and refused, and the order that is kept."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from anyio import create_task_group

from nsqext import Consumer, ExtFilter, Message, Producer
from nsqext.broker import Cluster, ClusterOptions
from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.key_buckets import DeliveryWatch
from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
from nsqext.errors import InvalidSetting
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import Address, TopicMeta
from tests.support.consumers import QUICK, eventually
from tests.support.stats import channel_stats, client_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.lookup.node_stats import PartitionChannelStats


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node, shared by the tests of this module."""
    with Cluster(nodes=1) as cluster:
        yield cluster


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


@pytest.mark.parametrize("settings", [{}, {"key_tags": 4}], ids=["chosen by the server", "tags"])
def test_keys_of_a_node_without_partitions_are_not_shared_by_tags(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="only lookup knows the partitions"):
        _request(None, TopicMeta(), **settings).supported_by(Negotiated(version="0.3.7-HA.1.13.0"))
    with pytest.raises(InvalidSetting, match="the original has no tags"):
        _request(None, EXTEND, **settings).supported_by(Negotiated(version="1.3.0"))


def test_a_consumer_that_has_chosen_tags_uses_them_at_every_server() -> None:
    request = _request(0, EXTEND, key_tags=4)
    assert request.supported_by(RELEASED) is request
    assert request.supported_by(Negotiated(dispatch="shared")) is request
    asked = request.identify()
    assert (asked.desired_tag, asked.extra) == ("x", {"dispatch": "shared", "client_id": "me"})


def test_a_consumer_shares_keys_as_the_server_supports_it() -> None:
    request = _request(0, EXTEND)
    asked = request.identify()
    assert (asked.desired_tag, asked.extra) == (None, {"dispatch": "key_failover"})
    assert (request.supported_by(EMBEDDED), request.key_sharing, request.verb) == (request, KeySharing.SERVER, "SUB")
    by_tags = request.supported_by(RELEASED)
    assert (by_tags.key_sharing, by_tags.key_tags, by_tags.verb) == (KeySharing.TAGS, 16, "SUB_ADVANCED")
    asked = by_tags.identify()
    assert (asked.desired_tag, asked.extra) == ("keys-16-none", {"dispatch": "shared", "client_id": "me"})
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
