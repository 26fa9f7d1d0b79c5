"""Publish requests: encoding of commands, and parsing of replies into receipts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.producer import delayed_request as delayed_request_module
from nsqext.client.producer.batch import BatchPlanner
from nsqext.client.producer.delayed_request import delayed as delayed_request
from nsqext.client.producer.keys import keys_of
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.client.producer.request import MessageRequest, check_choice, default_trace_id, encode_message, key_bytes
from nsqext.client.producer.route import Route, Target
from nsqext.client.trace_log import trace_log
from nsqext.errors import (
    DelayNotSupported,
    ExtendNotSupported,
    InvalidBody,
    InvalidInput,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    OperationNotSupported,
    ProtocolError,
    PublishFailed,
)
from nsqext.errors.server import LeaderLost, NotLeader, PubRefused, RecordTooLarge
from nsqext.key_ranges import bucket_tag, shared_tag
from nsqext.protocol.client.body_compression import COMPRESS_HEADER
from nsqext.protocol.frames import encode_trace_reply
from nsqext.protocol.hashing import key_hash
from nsqext.protocol.headers import decode_headers
from nsqext.types import Receipt, TopicMeta
from tests.support.publish_bench import route_of, target_of

_OPTIONS = ProducerOptions()


def _sorter(route: Route, options: ProducerOptions = _OPTIONS, key: bytes | None = None) -> BatchPlanner:
    return BatchPlanner(route, options, key_hash("murmur3"), key, None)


def _request(**members: Any) -> MessageRequest:
    return MessageRequest(_OPTIONS, "t", OutgoingMessage(b"x", **members))


@given(
    headers=st.none() | st.dictionaries(st.sampled_from("ab"), st.text("xyz", max_size=3)),
    tag=st.none() | st.just("red"),
    trace_id=st.none() | st.integers(0, 9),
    key=st.none() | st.just(b"k"),
    due=st.none() | st.just(1_700_000_000_000),
    extend=st.booleans(),
)
def test_a_header_has_all_parts_of_its_message(
    headers: dict[str, str] | None,
    tag: str | None,
    trace_id: int | None,
    key: bytes | None,
    due: int | None,
    extend: bool,
) -> None:
    message = OutgoingMessage(b"x", headers=headers, tag=tag, trace_id=trace_id)
    body, header, trace = encode_message(_OPTIONS, TopicMeta(extend_support=extend), message, key, due=due)
    assert (body, trace) == (b"x", trace_id)
    expected = dict(headers or {})
    if tag is not None:
        expected["##client_dispatch_tag"] = tag
    if due is not None:
        expected["##due"] = str(due)
    if key is not None and extend:
        expected["##key"] = "k"
    if trace_id is not None and header:
        expected["##trace_id"] = str(trace_id)
    assert decode_headers(header) == expected
    assert bool(header) is bool(headers or tag is not None or due is not None or (key is not None and extend))


@pytest.mark.parametrize(
    ("message", "extend", "overhead"),
    [
        (OutgoingMessage(b"x"), False, 0),
        (OutgoingMessage(b"x"), True, 1),
        (OutgoingMessage(b"x", trace_id=5), False, 8),
        (OutgoingMessage(b"x", headers={"a": "b"}), False, 2 + len(b'{"a":"b"}')),
        (OutgoingMessage(b"x", headers={"a": "b"}), True, 2 + len(b'{"a":"b"}') + 1),
    ],
)
def test_a_body_may_be_as_large_as_the_limit_without_what_is_sent_with_it(
    message: OutgoingMessage, extend: bool, overhead: int
) -> None:
    options, meta = ProducerOptions(max_message_size=1024), TopicMeta(extend_support=extend)
    largest = evolve(message, body=b"x" * (1024 - overhead))
    assert encode_message(options, meta, largest)[0] == largest.body
    with pytest.raises(InvalidBody, match="is larger than 1024"):
        encode_message(options, meta, evolve(message, body=largest.body + b"x"))


def test_a_message_has_the_default_trace_id_where_it_fits() -> None:
    options = ProducerOptions(max_message_size=1024)
    for size, trace in ((1024 - 8, 7), (1024 - 7, None)):
        assert encode_message(options, TopicMeta(), b"x" * size, default_trace=7)[2] == trace
    assert encode_message(options, TopicMeta(), OutgoingMessage(b"x", trace_id=0), default_trace=7)[2] == 0


@pytest.mark.parametrize(
    ("compression", "extend", "size", "compressed"),
    [
        ("gzip", True, 100, True),
        ("gzip", True, 99, False),
        ("gzip", False, 100, False),
        ("none", True, 30_000, False),
    ],
)
def test_large_bodies_are_compressed_where_topics_have_headers(
    compression: Literal["gzip", "none"], extend: bool, size: int, compressed: bool
) -> None:
    least = 20_480 if compression == "none" else 100
    options = ProducerOptions(compression=compression, compression_min=least)
    body, header, _ = encode_message(options, TopicMeta(1, extend_support=extend), b"x" * size)
    assert (len(body) < size, header != b"") == (compressed, compressed)


@pytest.mark.parametrize(
    ("members", "plain", "extend", "original", "redesigned"),
    [
        ({}, b"PUB t 0\n", b"PUB t 0\n", b"PUB t\n", b"PUB t\n"),
        ({"trace_id": 5}, b"PUB_TRACE t 0\n", b"PUB_TRACE t 0\n", None, b"PUB_TRACE t\n"),
        ({"tag": "x"}, None, b"PUB_EXT t 0\n", None, b"PUB_EXT t\n"),
        ({"headers": {"a": "b"}, "trace_id": 5}, None, b"PUB_EXT t 0\n", None, b"PUB_EXT t\n"),
    ],
)
def test_topics_and_servers_decide_what_a_message_may_have(
    members: dict[str, Any], plain: bytes | None, extend: bytes | None, original: bytes | None, redesigned: bytes | None
) -> None:
    for target, line in (
        (target_of(TopicMeta(1)), plain),
        (target_of(TopicMeta(1, extend_support=True)), extend),
        (target_of(TopicMeta(), "1.3.0"), original),
        (target_of(TopicMeta()), redesigned),
    ):
        if line is None:
            with pytest.raises(ExtendNotSupported) as caught:
                _request(**members).command(target)
            assert ("trace ids" in str(caught.value)) is (list(members) == ["trace_id"])
        else:
            assert bytes(_request(**members).command(target)).startswith(line)


@pytest.fixture
def tracing() -> Iterator[None]:
    trace_log.on("t")
    yield
    trace_log.off()


def test_the_command_of_a_single_message() -> None:
    route = route_of(2, extend=True)
    target = route.at(1)
    assert _request().command(target) == b"PUB t 1\n\0\0\0\1x"
    traced = _request(trace_id=5)
    assert traced.command(target) == b"PUB_TRACE t 1\n\0\0\0\x09\0\0\0\0\0\0\0\5x"
    headers = _request(headers={"a": "b"})
    assert headers.command(target) == b'PUB_EXT t 1\n\0\0\0\x0c\0\x09{"a":"b"}x'
    assert headers.receipts(target, b"OK") == [target.receipt]
    with pytest.raises(ProtocolError):
        headers.receipts(target, encode_trace_reply(1, 2, 3, 4))
    with pytest.raises(ProtocolError):
        traced.receipts(target, b"OK")


def test_a_traced_topic_returns_receipts_by_default(tracing: None) -> None:
    route = route_of(2, extend=True)
    target = route.at(0)
    single = _request()
    assert bytes(single.command(target)).startswith(b"PUB_TRACE t 0\n")
    assert single.receipts(target, encode_trace_reply(9, 0, 31, 31))[0].message_id == 9
    only = Target("t", 0, target.node, TopicMeta(partition_num=1))
    assert bytes(_request().command(only)).startswith(b"PUB_TRACE t 0\n")
    assert b'"##trace_id":"0"' in bytes(_request(tag="a").command(target))
    assert bytes(_request().command(Target("t", None, target.node, TopicMeta()))).startswith(b"PUB t")
    sorter = _sorter(route)
    sorter.add([b"a", b"b"])
    assert bytes(sorter.rows[0][0].command(target)).startswith(b"MPUB_TRACE t 0\n")


@pytest.mark.parametrize("delay", [-1, "1", True, float("nan"), 1e12])
def test_a_delay_is_a_time(delay: float) -> None:
    with pytest.raises(InvalidInput):
        delayed_request(_OPTIONS, "t", OutgoingMessage(b"x"), delay).check()


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        ("no topic", OutgoingMessage(b"x")),
        ("t", OutgoingMessage(b"")),
        ("t", OutgoingMessage(b"x", trace_id=-1)),
        ("t", OutgoingMessage(b"x", headers={"no name": "x"})),
        ("t", OutgoingMessage(b"x", tag="no tag!")),
    ],
)
def test_a_message_that_no_topic_accepts_is_refused_before_it_is_sent(topic: str, message: OutgoingMessage) -> None:
    MessageRequest(_OPTIONS, "t", OutgoingMessage(b"x")).check()
    with pytest.raises(InvalidInput):
        MessageRequest(_OPTIONS, topic, message).check()


def test_keys_and_partitions() -> None:
    assert key_bytes("ü") == "ü".encode()
    assert key_bytes(-42) == b"-42"
    assert key_bytes(b" \xff ") == b" \xff "
    for value in (True, 1.5, [b"k"]):
        with pytest.raises(InvalidInput, match="has to be str, bytes or int"):
            key_bytes(value)  # type: ignore[arg-type]
    for empty in ("", b""):
        with pytest.raises(InvalidInput, match="the key is empty"):
            key_bytes(empty)
    check_choice(None, 3)
    check_choice("k", None)
    for key, partition in ((None, -1), (None, 1024), (None, True), (None, "0"), ("k", 0)):
        with pytest.raises(InvalidPartition):
            check_choice(key, partition)


def test_batches_split_by_partition_count_and_size() -> None:
    options = ProducerOptions(max_batch_count=2)
    sorter = _sorter(route_of(2), options)
    sorter.add(
        [
            OutgoingMessage(b"a", key="user:42"),
            b"1",
            b"2",
            b"3",
            OutgoingMessage(b"b", key="order-1"),
            OutgoingMessage(b"c", key="order-2"),
        ]
    )
    assert [[batch.indexes for batch in row] for row in sorter.rows] == [[[0, 4], [5]], [[1, 2]], [[3]]]
    assert sorter.keys == {b"user:42", b"order-1", b"order-2"}
    small = _sorter(route_of(2), ProducerOptions(max_batch_size=100))
    small.add([b"x" * 60, b"y" * 60])
    assert len(small.rows) == 2


@pytest.mark.parametrize(
    "members",
    [
        {"timeout": 0},
        {"timeout": "5"},
        {"timeout": True},
        {"timeout": float("nan")},
        {"max_batch_count": 2.5},
        {"compression_min": None},
        {"balance": "fastest"},
        {"on_unknown": "x"},
        {"compression": "zstd"},
        {"close_timeout": -1},
        {"lookup_timeout": -1},
        {"max_delay": -1},
        {"retry_wait": 0},
        {"max_batch_size": 0},
        {"compression_min": -1},
        {"compression_min": 100},
        {"compression": {"orders": "none"}, "compression_min": 100},
        {"key_hash": "crc32"},
        {"key_tags": -1},
        {"key_tags": 1025},
        {"settle_timeout": 5.0},
        {"lookup": {"poll_interval": 5}},
        {"delay_topic": "a b"},
    ],
)
def test_invalid_settings_are_refused(members: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        ProducerOptions(**members)  # type: ignore[arg-type]


def test_settings_at_their_limits_are_accepted() -> None:
    ProducerOptions(key_tags=0, lookup_timeout=0, close_timeout=0, max_delay=0, compression="gzip", compression_min=0)
    assert ProducerOptions(on_unknown="settle", settle_timeout=5.0).settle_timeout == 5.0


@pytest.mark.parametrize(("size", "own"), [(1, True), (1 + 29, True), (1 + 30, False)])
def test_a_record_that_is_larger_than_the_message_is_one_of_another_client(size: int, own: bool) -> None:
    error = RecordTooLarge("E_PUB_FAILED", f"invalid message write size ({size}) maxMsgSize=1")
    assert error.size == size
    refined = _request().refined(error)
    assert (refined is error, type(refined)) == (own, RecordTooLarge if own else PubRefused)
    assert MessageRequest(_OPTIONS, "t", OutgoingMessage(b"x"), key=b"k").largest == len(b'x{"##key":"k"}')
    header = len(b'{"##client_dispatch_tag":"a"}')
    larger = RecordTooLarge("E_PUB_FAILED", f"invalid message write size ({size + header}) maxMsgSize=1")
    assert (_request(tag="a").refined(larger) is larger) is own


@pytest.mark.parametrize(
    ("meta", "members", "marked"),
    [
        (TopicMeta(), {}, None),
        (TopicMeta(), {"trace_id": 5}, (1, False)),
        (TopicMeta(), {"tag": "x"}, (1, True)),
        (TopicMeta(2, extend_support=True), {"tag": "x"}, None),
    ],
)
def test_the_first_message_of_a_batch_that_fixed_nodes_may_not_accept_is_remembered(
    meta: TopicMeta, members: dict[str, Any], marked: tuple[int, bool] | None
) -> None:
    planner = _sorter(route_of(meta.partition_num, extend=meta.extend_support))
    planner.add([b"plain", OutgoingMessage(b"x", **members), OutgoingMessage(b"y", **members)])
    assert planner.marked == marked


def test_each_message_that_may_be_looked_for_has_a_trace_id_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ProducerOptions(on_unknown="settle")
    found = {default_trace_id(options, "t", TopicMeta(1)) or 0 for _ in range(100)}
    assert len(found) == 100
    assert all(0 < trace < 1 << 64 for trace in found)
    monkeypatch.setattr("os.urandom", bytes)
    assert default_trace_id(options, "t", TopicMeta(1)) == 1, "0 is no trace id"
    with pytest.raises(OperationNotSupported):
        default_trace_id(options, "t", TopicMeta())
    delayed = delayed_request(options, "t", OutgoingMessage(b"x"), 5.0)
    with pytest.raises(OperationNotSupported):
        delayed.command(target_of(TopicMeta(), "1.3.0"))


@pytest.mark.parametrize(
    ("delay", "members", "meta", "version", "expected"),
    [
        (0, {}, TopicMeta(), "1.3.0", b"PUB t\n"),
        (3600, {}, TopicMeta(), "1.3.0", b"DPUB t 3600000\n"),
        (3600.1, {}, TopicMeta(), "1.3.0", "3600 s at most"),
        (5, {"headers": {"a": "b"}}, TopicMeta(), "1.3.0", "neither headers nor tag nor trace id"),
        (5, {"tag": "red"}, TopicMeta(), "1.3.0", "neither headers nor tag nor trace id"),
        (5, {"trace_id": 0}, TopicMeta(), "1.3.0", "neither headers nor tag nor trace id"),
        (5, {}, TopicMeta(), "0.3.7-HA.1.9.7", "does not support extend headers"),
        (5, {}, TopicMeta(1), "1.3.0", "does not support extend headers"),
        (5, {}, TopicMeta(1, extend_support=True), "0.3.7-HA.1.9.7", b"PUB_EXT t 0"),
        (5, {}, TopicMeta(1, extend_support=True, ordered=True), "0.3.7-HA.1.9.7", "is ordered"),
    ],
)
def test_who_delays_a_message(
    delay: float,
    members: dict[str, Any],
    meta: TopicMeta,
    version: str,
    expected: bytes | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = delayed_request(_OPTIONS, "t", OutgoingMessage(b"x", **members), delay)
    monkeypatch.setattr(delayed_request_module, "_clock", lambda: request.started)
    if isinstance(expected, bytes):
        assert bytes(request.command(target_of(meta, version))).startswith(expected)
        return
    with pytest.raises(DelayNotSupported, match=expected):
        request.command(target_of(meta, version))


@pytest.mark.parametrize(("waited", "line"), [(1.5, b"DPUB t 3500\n"), (5.5, b"DPUB t 0\n")])
def test_failed_attempts_do_not_lengthen_the_delay_of_the_original_nsq(
    waited: float, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = delayed_request(_OPTIONS, "t", OutgoingMessage(b"x"), 5.0)
    monkeypatch.setattr(delayed_request_module, "_clock", lambda: request.started + waited)
    assert bytes(request.command(target_of(TopicMeta(), "1.3.0"))).startswith(line)


@pytest.mark.parametrize(
    ("key", "partition", "keys"),
    [(None, None, {b"a"}), ("k", None, {b"a", b"k"}), (None, 0, set()), ("k", 0, set())],
)
def test_the_keys_of_a_call(key: str | None, partition: int | None, keys: set[bytes]) -> None:
    assert keys_of([b"x", OutgoingMessage(b"x"), OutgoingMessage(b"x", key="a")], key, partition) == keys
    if partition is None:
        assert keys_of([OutgoingMessage(b"x", key="a")], key, None) == {b"a"}, "it goes before the key of the call"


@pytest.mark.parametrize(
    ("members", "delay", "extend", "plain"),
    [({}, None, True, True), ({}, 5, False, False), ({"trace_id": 0}, None, False, True)],
)
def test_what_a_batch_can_replace(members: dict[str, Any], delay: float | None, extend: bool, plain: bool) -> None:
    request = delayed_request(_OPTIONS, "t", OutgoingMessage(b"x", **members), delay)
    assert request.joinable(TopicMeta(1, extend_support=True)) is extend
    assert request.joinable(TopicMeta(1)) is plain, "the response to MPUB_TRACE has the position of the batch"
    assert request.joinable(TopicMeta()) is (not delay and not members), "the original NSQ has no traces"


def test_what_a_batch_cannot_replace_while_a_topic_is_traced(tracing: None) -> None:
    extend = TopicMeta(1, extend_support=True)
    for topic, trace_id in (("t", 0), ("other", None)):
        assert default_trace_id(_OPTIONS, topic, extend) == trace_id
        assert MessageRequest(_OPTIONS, topic, b"x").joinable(extend) is (topic == "other")
    assert _request().joinable(TopicMeta(1))
    assert _request().joinable(TopicMeta()), "the original NSQ has no traces"


def test_the_first_outcome_of_a_message_remains() -> None:
    request, receipt = _request(), Receipt("t", 0, "n:1")
    with pytest.raises(InvalidState, match="not published yet"):
        request.result()
    request.settle(receipt)
    request.settle(PublishFailed("the producer was closed"))
    assert request.result() is receipt


@pytest.mark.parametrize(("choice", "any_partition"), [({}, True), ({"key": b"k"}, False), ({"partition": 0}, False)])
def test_which_requests_any_partition_can_store(choice: dict[str, Any], any_partition: bool) -> None:
    request = MessageRequest(_OPTIONS, "t", OutgoingMessage(b"x"), **choice)
    assert (request.any_partition, request.count) == (any_partition, 1)


def test_key_tags_are_those_of_all_producers() -> None:
    options, meta = ProducerOptions(key_tags=16), TopicMeta(1, extend_support=True)
    for key, tag in ((b"k", bucket_tag(b"k", 16)), (None, shared_tag(16))):
        header = encode_message(options, meta, b"x", key)[1]
        assert decode_headers(header)["##client_dispatch_tag"] == tag
    with pytest.raises(InvalidSetting, match="contradict each other"):  # no fault of the message
        encode_message(options, meta, OutgoingMessage(b"x", tag="red"))


def test_a_body_that_is_compressed_already_is_sent_as_it_is() -> None:
    options, meta = ProducerOptions(compression="gzip", compression_min=10), TopicMeta(1, extend_support=True)
    headers = {COMPRESS_HEADER: "2"}
    body, header, _ = encode_message(options, meta, OutgoingMessage(b"x" * 100, headers=headers))
    assert (body, decode_headers(header)) == (b"x" * 100, headers)
    body, header, _ = encode_message(options, meta, OutgoingMessage(b"x" * 100, headers={"a": "b"}))
    assert (len(body) < 100, decode_headers(header)["a"]) == (True, "b")
    body, header, _ = encode_message(options, meta, OutgoingMessage(bytes(range(100)), headers={"a": "b"}))
    assert (body, decode_headers(header)) == (bytes(range(100)), {"a": "b"}), "it would not be smaller"


def test_a_leader_that_refuses_a_single_message_may_have_written_it() -> None:
    refused = NotLeader("E_FAILED_ON_NOT_LEADER", "moved", node="n:1")
    refined = _request().refined(refused)
    assert (type(refined), str(refined)) == (LeaderLost, str(refused))
    other = PubRefused("E_PUB_FAILED")
    assert _request().refined(other) is other


def test_a_message_object_as_body_is_refused_with_the_way_to_publish_it() -> None:
    body: Any = OutgoingMessage(b"x")
    with pytest.raises(InvalidBody, match=r"not OutgoingMessage: give its body, .* or use publish_many"):
        encode_message(ProducerOptions(), TopicMeta(), OutgoingMessage(body))


def test_all_attempts_of_a_message_have_one_trace_id() -> None:
    """It is settled by it: the log is searched for the first attempt too."""
    request = MessageRequest(evolve(_OPTIONS, on_unknown="settle"), "t", OutgoingMessage(b"x"))
    sent = {request.encoded(TopicMeta(partition_num=1))[2] for _ in range(3)}
    assert len(sent) == 1
    assert sent.pop()
