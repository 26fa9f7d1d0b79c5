"""What a subscription asks for: its command, the output buffer, keys; and what it makes of the answer."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest
from attrs import evolve

from nsqext import ExtFilter
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader, SubscribeRequest
from nsqext.errors import ConnectionLost, InvalidSetting, PartitionUnavailable
from nsqext.errors.server import InvalidCommand
from nsqext.protocol.identify import Negotiated
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, TopicMeta

if TYPE_CHECKING:
    from nsqext.transport.connection import Connection

REDESIGNED, ORIGINAL = 0, None


def asked(options: ConsumerOptions, partition: int | None) -> tuple[int | None, float | None]:
    """Return size and timeout in IDENTIFY."""
    plan = SubscribeRequest("orders", "ch", partition, Address("127.0.0.1", 4150), TopicMeta(), options=options)
    request = plan.identify()
    return request.output_buffer_size, request.output_buffer_timeout


@pytest.mark.parametrize(
    ("timeout", "partition", "wanted"),
    [
        (None, REDESIGNED, (None, None)),
        (None, ORIGINAL, (None, None)),
        (0, REDESIGNED, (-1, None)),
        (0, ORIGINAL, (-1, None)),
        (0.001, REDESIGNED, (None, 0.01)),
        (0.001, ORIGINAL, (None, 0.025)),
        (0.2, REDESIGNED, (None, 0.2)),
        (0.2, ORIGINAL, (None, 0.2)),
    ],
)
def test_the_time_that_messages_wait_at_the_server(
    timeout: float | None, partition: int | None, wanted: tuple[int | None, float | None]
) -> None:
    assert asked(ConsumerOptions(output_buffer_timeout=timeout), partition) == wanted


@pytest.mark.parametrize(
    "settings", [{}, {"key": "order"}, {"dispatch": "key_failover"}, {"dispatch": "key_failover", "key_tags": 4}]
)
def test_a_redesigned_node_without_a_partition_is_tried_again(settings: dict[str, Any]) -> None:
    """Found by soaks: it sends messages of a partition that it leads, which another connection reads, too."""
    options = ConsumerOptions(**settings)
    listed, meta = Address("127.0.0.1", 4150), TopicMeta(2, extend_support=True)
    request = SubscribeRequest("orders", "ch", None, listed, meta, options=options, client_id="me")
    with pytest.raises(PartitionUnavailable, match="lists the node, but no partition that it leads") as caught:
        request.supported_by(Negotiated(version="0.3.7-HA.1.13.0"))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("version", "partition", "meta"),
    [("1.3.0", None, TopicMeta(2)), ("0.3.7-HA.1.13.0", None, TopicMeta()), ("0.3.7-HA.1.13.0", 0, TopicMeta(2))],
    ids=["original node", "nsqd= without lookup", "with a partition"],
)
def test_other_nodes_are_subscribed(version: str, partition: int | None, meta: TopicMeta) -> None:
    request = SubscribeRequest(
        "orders", "ch", partition, Address("127.0.0.1", 4150), meta, options=ConsumerOptions(key="order")
    )
    assert request.supported_by(Negotiated(version=version)) is request


def test_by_default_messages_wait_the_shortest_time_of_servers_with_a_buffer() -> None:
    assert asked(ConsumerOptions(), REDESIGNED) == (None, 0.01)
    assert asked(ConsumerOptions(), ORIGINAL) == (None, 0.025)


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_the_size_of_the_buffer(timeout: float | None) -> None:
    options = ConsumerOptions(output_buffer_timeout=timeout, output_buffer_size=65536)
    assert asked(options, REDESIGNED) == (65536, timeout)


@pytest.mark.parametrize("connection", [ConnectionOptions(snappy=True), ConnectionOptions(deflate_level=6)])
def test_compression_is_never_without_a_timer(connection: ConnectionOptions) -> None:
    options = ConsumerOptions(output_buffer_timeout=0, connection=connection)
    assert asked(options, REDESIGNED) == (None, 0.01)
    assert asked(options, ORIGINAL) == (None, 0.025)


def _request(partition: int | None, *, ordered: bool = False, key_tags: int = 0, **settings: Any) -> SubscribeRequest:
    meta = TopicMeta(1, extend_support=True, ordered=ordered)
    options = ConsumerOptions(**settings)
    return SubscribeRequest(
        "t", "ch", partition, Address("h", 1), meta, options=options, tag="red", client_id="me", key_tags=key_tags
    )


_FAILOVER: dict[str, Any] = {"dispatch": "key_failover"}


@pytest.mark.parametrize(
    ("members", "partition", "verb"),
    [
        ({}, 0, "SUB"),
        ({"queue_position": True}, 0, "SUB_ADVANCED"),
        ({"queue_position": True}, None, "SUB"),
        ({"key": "k"}, 0, "SUB_ADVANCED"),
        ({"key": "k"}, None, "SUB"),
        (_FAILOVER, 0, "SUB"),
        ({**_FAILOVER, "queue_position": True}, 0, "SUB_ADVANCED"),
        ({**_FAILOVER, "key_tags": 4}, 0, "SUB_ADVANCED"),
        ({"ordered": True}, 0, "SUB_ORDERED"),
        ({"ordered": True, "key": "k"}, 0, "SUB_ORDERED"),
    ],
)
def test_the_command_says_what_messages_carry(members: dict[str, Any], partition: int | None, verb: str) -> None:
    assert _request(partition, **members).verb == verb


def test_the_order_is_that_of_the_topic_unless_it_is_chosen() -> None:
    for chosen in (None, True, False):
        for topic in (True, False):
            expected = topic if chosen is None else chosen
            subject = SubscribeRequest(
                "t", "ch", 0, Address("h", 1), TopicMeta(1, ordered=topic), options=ConsumerOptions(ordered=chosen)
            )
            assert subject.ordered is expected
            reader = PartitionReader(subject, cast("Connection", None), Negotiated(max_rdy_count=2500))
            assert (reader.max_ready, reader.detail) == ((1, True) if expected else (2500, False))


@pytest.mark.parametrize(
    ("members", "extra"),
    [
        ({}, {}),
        ({"key": "k"}, {}),
        ({"dispatch": "shared"}, {"dispatch": "shared"}),
        (_FAILOVER, {"dispatch": "key_failover"}),
        ({**_FAILOVER, "key": "k"}, {"dispatch": "key_failover", "key_header": "k"}),
        ({**_FAILOVER, "key": str}, {"dispatch": "key_failover"}),
        ({**_FAILOVER, "key_tags": 4}, {"dispatch": "shared", "client_id": "me"}),
    ],
)
def test_how_keys_are_shared_is_asked_for(members: dict[str, Any], extra: dict[str, str]) -> None:
    asked = _request(0, **members).identify()
    assert (asked.extra, asked.desired_tag, asked.extend_support) == (extra, "red", True)


def test_a_consumer_that_shares_keys_by_tags_has_a_name_of_its_own() -> None:
    """All consumers of a service may have the same client_id: none knew which buckets were its own."""
    connection = ConnectionOptions(client_id="billing")
    for key_tags, expected in ((0, "billing"), (4, "me")):
        request = _request(0, **_FAILOVER, key_tags=key_tags, connection=connection)
        sent = evolve(request.identify(), **connection.identify_members()).encode()
        assert orjson.loads(sent)["client_id"] == expected


def test_tags_and_filters_are_asked_for_where_the_topic_has_headers() -> None:
    wanted = ConsumerOptions(ext_filter=ExtFilter(1, "a", "b"))
    for extend in (True, False):
        meta = TopicMeta(1, extend_support=extend)
        asked = SubscribeRequest("t", "ch", 0, Address("h", 1), meta, tag="red", options=wanted).identify()
        expected = ("red", wanted.ext_filter) if extend else (None, None)
        assert (asked.extend_support, asked.desired_tag, asked.ext_filter) == (extend, *expected)


def test_a_channel_of_another_type_is_a_wrong_setting() -> None:
    request = _request(0)
    other = InvalidCommand("E_INVALID channel ch is dispatched by key_failover")
    assert isinstance(request.explain(other), InvalidSetting)
    for error in (InvalidCommand("E_INVALID no"), ConnectionLost("is dispatched by")):
        assert request.explain(error) is error


def test_an_ordered_subscription_of_the_original_nsq_is_a_wrong_setting() -> None:
    explained = _request(0).explain(InvalidCommand("E_INVALID invalid command SUB_ORDERED"))
    assert isinstance(explained, InvalidSetting)
    assert str(explained) == "the original NSQ has no ordered topics (topic t): leave ordered out"


@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_subscription_fits_a_topic_as_long_as_its_headers_and_its_order_are_the_same(
    extend: bool, ordered: bool
) -> None:
    meta = TopicMeta(1, extend_support=True, ordered=True)
    request = SubscribeRequest("orders", "ch", 0, Address("h", 1), meta, options=ConsumerOptions())
    assert request.fits(TopicMeta(2, extend_support=extend, ordered=ordered)) == (extend and ordered)


def test_a_heartbeat_is_missed_once_in_a_silence() -> None:
    connection = SimpleNamespace(received_at=0.0, heartbeat_interval=30.0)
    reader = PartitionReader(_request(0), cast("Connection", connection), Negotiated())
    assert not any(reader.misses_heartbeat(now) for now in (31.0, 31.1, 200.0)), "never read"
    connection.received_at = 100.0
    assert reader.silence_due == pytest.approx(131.05)
    assert not reader.misses_heartbeat(130.9)
    assert reader.misses_heartbeat(131.05)
    assert not reader.misses_heartbeat(140.0), "it was noticed"
    assert reader.silence_due == pytest.approx(161.05), "when the silence is too long"
    connection.received_at = 150.0
    assert reader.silence_due == pytest.approx(181.05)
    assert reader.misses_heartbeat(182.0)
    connection.heartbeat_interval, connection.received_at = 0.0, 200.0
    assert (reader.silence_due, reader.misses_heartbeat(1e9)) == (inf, False)
