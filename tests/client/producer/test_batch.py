"""The fast path of batches: it encodes like the general path, and falls back to it for other messages."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsqext import OutgoingMessage
from nsqext.client.producer.batch import Batch, BatchPlanner, plain_batches
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.request import encode_message
from nsqext.errors import ExtendNotSupported, InvalidInput, ProtocolError
from nsqext.protocol.client.batch_commands import multi, multi_ext, multi_trace
from nsqext.protocol.client.commands import LARGE, LargeCommand, SendQueue, sized
from nsqext.protocol.frames import encode_trace_reply
from nsqext.protocol.record import raw_size
from nsqext.types import TopicMeta
from tests.support.commands import ext_body, multi_body, trace_body
from tests.support.publish_bench import route_of, target_of
from tests.support.tables import table

_OPTIONS = ProducerOptions(max_message_size=300, max_batch_count=8, max_batch_size=1000)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=30))
def test_a_batch_command_is_line_size_and_body(items: list[bytes]) -> None:
    expected = sized(b"MPUB t 0\n", multi_body(items))
    assert multi(b"MPUB t 0\n", items) == expected
    assert multi(b"MPUB t 0\n", items, list(map(len, items))) == expected
    one_size = [item.ljust(20) for item in items]
    assert multi(b"MPUB t 0\n", one_size, 20) == sized(b"MPUB t 0\n", multi_body(one_size))


@given(st.lists(st.integers(min_value=0, max_value=310), min_size=1, max_size=40))
@example([300])
@example([301])
@example([245] * 4)  # 1000 bytes
@example([1] * 8)
@example([1] * 9)
@example([200] * 8)
def test_only_values_that_servers_accept_use_the_fast_path(sizes: list[int]) -> None:
    bodies = [b"x" * size for size in sizes]
    target = route_of().at(0)
    batches = plain_batches(route_of(), 0, bodies, _OPTIONS)
    assert (batches is not None) == (min(sizes) > 0 and max(sizes) <= 300)
    if batches is None:
        return
    assert [index for batch in batches for index in batch.indexes] == list(range(len(sizes)))
    for batch in batches:
        mine = [bodies[index] for index in batch.indexes]
        body = multi_body(mine)
        assert len(mine) <= 8
        assert len(body) <= 1000
        assert batch.command(target) == sized(b"MPUB t 0\n", body)
        assert batch.receipts(target, b"OK") == [target.receipt] * len(mine)
        assert batch.largest == max(map(len, mine))
    if len(sizes) <= 8 and len(multi_body(bodies)) <= 1000:
        assert len(batches) == 1


@given(st.lists(st.tuples(st.integers(1, 250), st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_mixed_messages_fill_batches_up_to_the_limits(parts: list[tuple[int, bool, bool]]) -> None:
    messages = [
        OutgoingMessage(b"x" * size, headers={"a": "b"} if headed else None, trace_id=2**64 - 1 if traced else None)
        for size, headed, traced in parts
    ]
    route = route_of(extend=True)
    planner = BatchPlanner(route, _OPTIONS, lambda key, partitions: 0, None, 0)
    planner.add(messages)
    (row,) = planner.rows
    assert [index for batch in row for index in batch.indexes] == list(range(len(messages)))

    def most_bytes(index: int) -> int:
        """The size of a message in a batch, whether or not others make it send a trace id."""
        _, header, _ = encode_message(_OPTIONS, route.meta, messages[index])
        return 4 + 40 + len(header) + len(messages[index].body)

    for number, batch in enumerate(row):
        assert batch.largest == max(most_bytes(index) - 44 for index in batch.indexes)
        assert batch.trace_ids == [messages[index].trace_id for index in batch.indexes]
        assert len(batch.command(route.at(0))) - len(b"MPUB_TRACE t 0\n") - 4 <= 1000
        filled = 4 + sum(map(most_bytes, batch.indexes))
        assert (filled <= 1000, batch.count <= 8) == (True, True)
        if number + 1 < len(row):
            assert filled + most_bytes(row[number + 1].indexes[0]) > 1000 or batch.count == 8


def test_messages_stored_together_have_consecutive_places() -> None:
    """A response of the server has id, offset and size of the whole batch."""
    planner = BatchPlanner(route_of(extend=True), _OPTIONS, lambda key, partitions: 0, None, 0)
    planner.add([b"x" * 5, b"y" * 7], [3, 0])
    ((batch,),) = planner.rows
    target = route_of(extend=True).at(0)
    first, second = raw_size(5, 0, extend=True), raw_size(7, 0, extend=True)
    receipts = batch.receipts(target, encode_trace_reply(9, 0, 500, first + second))
    assert [(one.message_id, one.trace_id, one.offset, one.size) for one in receipts] == [
        (9, 3, 500, first),
        (10, 0, 500 + first, second),
    ]
    receipts = batch.receipts(target, encode_trace_reply(9, 0, 500, first + second + 1))  # of an unknown format
    assert [(one.message_id, one.trace_id) for one in receipts] == [(9, 3), (receipts[1].message_id, 0)]
    assert receipts[1].offset != 500 + first


_GZIP = {"compression": "gzip", "compression_min": 100}


@table(
    ("messages", "options", "extend", "fast"),
    [
        ([b"a", OutgoingMessage(b"b")], {}, False, False),
        ([b"a", "b"], {}, False, False),
        ([bytearray(b"a")], {}, False, False),
        ([None], {}, False, False),
        ([b"x" * 300], {"max_batch_size": 300}, False, False),  # larger than a batch
        ([b"x" * 99], _GZIP, True, True),
        ([b"x" * 99, b"x" * 100], _GZIP, True, False),  # compressed bodies get headers
        ([b"x" * 100], _GZIP, False, True),
    ],
)
def test_messages_other_than_plain_bodies_are_encoded_one_by_one(
    messages: list[Any], options: dict[str, Any], extend: bool, fast: bool
) -> None:
    batches = plain_batches(route_of(extend=extend), None, messages, ProducerOptions(**options))
    assert (batches is not None) is fast


def test_a_response_to_another_command_is_an_error() -> None:
    batches = plain_batches(route_of(), None, [b"a"], _OPTIONS)
    assert batches is not None
    with pytest.raises(ProtocolError, match="in response to a batch"):
        batches[0].receipts(route_of().at(0), b"OK" + bytes(28))


traced_lists = st.lists(
    st.tuples(st.binary(min_size=1, max_size=292), st.integers(0, 2**64 - 1)), min_size=1, max_size=30
)


@given(traced_lists)
def test_a_command_for_bodies_with_trace_ids(items: list[tuple[bytes, int]]) -> None:
    bodies, traces = [body for body, _ in items], [trace for _, trace in items]
    expected = sized(b"MPUB_TRACE t 0\n", multi_body([trace_body(trace, body) for body, trace in items]))
    assert multi_trace(b"MPUB_TRACE t 0\n", traces, bodies) == expected


@pytest.mark.parametrize("sizes", [(LARGE,), (1, LARGE), (LARGE + 1, 5, 20_000, 3 * LARGE), (LARGE,) * 3])
def test_large_bodies_of_a_batch_are_not_copied(sizes: tuple[int, ...]) -> None:
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    headers, traces = [b"{}"] * len(bodies), list(range(len(bodies)))
    same = sizes[0] if len(set(sizes)) == 1 else list(sizes)
    for command, items in (
        (multi(b"MPUB t 0\n", bodies, same), bodies),
        (multi_trace(b"MPUB t 0\n", traces, bodies), list(map(trace_body, traces, bodies))),
        (multi_ext(b"MPUB t 0\n", headers, bodies), list(map(ext_body, headers, bodies))),
    ):
        assert isinstance(command, LargeCommand)
        assert bytes(command) == sized(b"MPUB t 0\n", multi_body(items))
        assert len(command) == len(bytes(command))
        queue = SendQueue()
        queue.put([b"NOP\n", command])
        parts = queue.first(100)
        assert all(any(part is body for part in parts) for body in bodies if len(body) >= LARGE)
        assert b"".join(parts) == b"NOP\n" + bytes(command)
        assert queue.sent(len(b"NOP\n" + bytes(command))) == 2


@given(traced_lists)
@example([(b"x", 0), (b"y", 2**64 - 1)])
def test_columns_of_bodies_and_trace_ids_are_published_as_the_messages_are(items: list[tuple[bytes, int]]) -> None:
    bodies, trace_ids = [body for body, _ in items], [trace for _, trace in items]
    target = route_of().at(0)
    batches = plain_batches(route_of(), 0, bodies, _OPTIONS, trace_ids)
    assert batches is not None
    sent: list[tuple[bytes, int]] = []
    for batch in batches:
        mine = [items[index] for index in batch.indexes]
        sent += mine
        command = batch.command(target)
        assert command == multi(b"MPUB_TRACE t 0\n", [trace_body(trace, body) for body, trace in mine])
        assert len(mine) <= 8
        assert len(command) - len(b"MPUB_TRACE t 0\n") - 4 <= 1000
        assert [receipt.trace_id or 0 for receipt in batch.receipts(target, b"OK")] == [trace for _, trace in mine]
    assert sent == items


_ids = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=40)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), _ids, _ids), min_size=1, max_size=30), st.booleans())
@example([(b"x" * 200, "y" * 40, "z" * 30)] * 8, False)
def test_columns_of_bodies_and_headers_are_published_as_the_messages_are(
    items: list[tuple[bytes, str, str]], two: bool
) -> None:
    bodies, first, second = map(list, zip(*items, strict=True))
    columns: dict[str, list[str]] = {"a": first, "b": second} if two else {"a": first}
    route = route_of(extend=True)
    batches = plain_batches(route, 0, bodies, _OPTIONS, (), columns)
    messages = [OutgoingMessage(body, {"a": one, "b": other} if two else {"a": one}) for body, one, other in items]
    try:
        encoded = [encode_message(_OPTIONS, route.meta, message) for message in messages]
    except InvalidInput:
        assert batches is None
        return
    assert batches is not None
    target, sent = route.at(0), 0
    for batch in batches:
        mine = [encoded[index] for index in batch.indexes]
        assert [*batch.indexes] == [*range(sent, sent + len(mine))]
        sent += len(mine)
        command = batch.command(target)
        assert command == multi_ext(b"MPUB_EXT t 0\n", [header for _, header, _ in mine], [body for body, _, _ in mine])
        assert len(mine) <= 8
        assert len(command) - len(b"MPUB_EXT t 0\n") - 4 <= 1000
        assert batch.largest == max(len(header) + len(body) for body, header, _ in mine)
        assert batch.receipts(target, b"OK") == [target.receipt] * len(mine)
        assert batch.trace_ids == [None] * len(mine)
    assert sent == len(items)


@pytest.mark.parametrize(
    "options",
    [
        ProducerOptions(transport="http"),
        ProducerOptions(on_unknown="settle"),
        ProducerOptions(compression="gzip", compression_min=1),
        ProducerOptions(key_tags=2),
    ],
)
def test_columns_of_headers_that_are_encoded_one_by_one(options: ProducerOptions) -> None:
    def commands(*columns: Any) -> list[bytes]:
        planner = BatchPlanner(route_of(extend=True), options, lambda key, partitions: 0, None, 0)
        planner.add(*columns)
        return [bytes(batch.command(route_of(extend=True).at(0))) for row in planner.rows for batch in row]

    def sizes(made: list[bytes]) -> list[int]:
        return [len(command) for command in made]

    columns = [b"x" * 200, b"y" * 200], (), {"a": ["b", "c"]}
    messages = [OutgoingMessage(b"x" * 200, {"a": "b"}), OutgoingMessage(b"y" * 200, {"a": "c"})]
    if options.on_unknown != "settle":  # its trace ids are random
        assert commands(*columns) == commands(messages)
    assert all(b"trace_id" in command for command in commands(*columns)) == (options.on_unknown == "settle")
    assert len(sizes(commands(*columns))) == len(sizes(commands(messages)))


def test_columns_of_headers_need_a_topic_that_supports_them() -> None:
    planner = BatchPlanner(route_of(), _OPTIONS, lambda key, partitions: 0, None, 0)
    with pytest.raises(ExtendNotSupported, match="message 0"):
        planner.add([b"x"], (), {"a": ["b"]})


@table(
    ("body", "trace_ids", "headers"),
    [
        (b"", (), {"a": ["b", "y"]}),
        (b"x" * 290, (), {"a": ["b", "y"]}),
        (b"x", (), {"a": ["b", 5]}),
        (b"", [1, 1], {}),
        (b"x" * 293, [1, 1], {}),
        (b"x", [1, -1], {}),
        (b"x", [1, 2**64], {}),
    ],
)
def test_columns_with_a_message_that_servers_refuse_name_it(body: bytes, trace_ids: Any, headers: Any) -> None:
    route, bodies = route_of(extend=bool(headers)), [b"fine", body]
    assert plain_batches(route, 0, bodies, _OPTIONS, trace_ids, headers) is None
    planner = BatchPlanner(route, _OPTIONS, lambda key, partitions: 0, None, 0)
    with pytest.raises(InvalidInput, match="message 1: ") as caught:
        planner.add(bodies, trace_ids, headers)
    assert caught.value.index == 1


@pytest.mark.parametrize(("spare", "count", "has_room"), [(0, 2, True), (-1, 2, False), (0, 1, False)])
def test_a_batch_may_be_as_large_as_its_limits(spare: int, count: int, has_room: bool) -> None:
    most = 4 + 2 * (4 + 40 + 10)  # a count, and two messages, each with its size and a trace id in an extend header
    options = ProducerOptions(max_batch_size=most + spare, max_batch_count=count)
    batch = Batch("t", 0)
    batch.add(0, b"x" * 10, b"", None)
    assert batch.has_room(b"x" * 10, b"", 5, options) is has_room


_PLAIN, _HEADED, _TRACED = (b"", None), (b'{"a":"b"}', None), (b"", 5)


@pytest.mark.parametrize("before", [_PLAIN, _HEADED, _TRACED])
@pytest.mark.parametrize("after", [_PLAIN, _HEADED, _TRACED])
@pytest.mark.parametrize("transport", ["tcp", "http"])
def test_batches_over_http_have_bodies_only(
    before: tuple[bytes, int | None], after: tuple[bytes, int | None], transport: Literal["tcp", "http"]
) -> None:
    options, batch = ProducerOptions(transport=transport), Batch("t", 0)
    assert batch.has_room(b"x", *before, options)
    batch.add(0, b"x", *before)
    assert batch.has_room(b"x", *after, options) is (transport == "tcp" or before == after == _PLAIN)


def test_columns_of_bodies_and_trace_ids_need_tcp_and_a_redesigned_server() -> None:
    columns = [b"x", b"y"], _OPTIONS, [1, 2]
    assert plain_batches(route_of(), None, *columns) is not None
    assert plain_batches(route_of(), None, [b"x"], ProducerOptions(transport="http"), [1]) is None
    assert plain_batches(route_of(0), None, *columns) is None


def test_the_command_and_the_receipts_of_messages_with_and_without_a_trace_id() -> None:
    target, batch = route_of(extend=True).at(0), Batch("t", 0)
    batch.add(0, b"a", b"", None)
    assert batch.command(target) == multi(b"MPUB t 0\n", [b"a"])
    batch.add(1, b"b", b"", 5)
    assert batch.command(target) == multi_trace(b"MPUB_TRACE t 0\n", [0, 5], [b"a", b"b"])
    plain, traced = batch.receipts(target, b"OK")
    assert (plain, traced.trace_id) == (target.receipt, 5)
    size = raw_size(1, 0, extend=True)
    stored = batch.receipts(target, encode_trace_reply(9, 0, 500, 2 * size))
    assert [(one.trace_id, one.offset) for one in stored] == [(0, 500), (5, 500 + size)]
    odd = batch.receipts(target, encode_trace_reply(9, 0, 500, 7))
    assert [(one.trace_id, one.offset) for one in odd] == [(0, 500), (5, None)]
    batch.add(2, b"c", b'{"a":"b"}', None)
    headers = [b"", b'{"##trace_id":"5"}', b'{"a":"b"}']
    assert batch.command(target) == multi_ext(b"MPUB_EXT t 0\n", headers, [b"a", b"b", b"c"])
    with pytest.raises(ProtocolError):
        batch.receipts(target, encode_trace_reply(9, 0, 500, 3 * size))


@pytest.mark.parametrize(("header", "what"), [(b'{"a":"b"}', "headers and tags"), (b"", "trace ids")])
def test_a_batch_that_the_original_nsq_does_not_understand_is_not_sent(header: bytes, what: str) -> None:
    batch = Batch("t", None)
    batch.add(0, b"a", header, 5)
    with pytest.raises(ExtendNotSupported, match=what):
        batch.command(target_of(TopicMeta(), "1.3.0"))


@pytest.mark.parametrize(
    ("extend", "key", "options", "verb"),
    [
        (False, b"k", _OPTIONS, b"MPUB"),
        (True, b"k", _OPTIONS, b"MPUB_EXT"),
        (True, None, _OPTIONS, b"MPUB"),
        (True, None, ProducerOptions(key_tags=16), b"MPUB_EXT"),
    ],
)
def test_keys_and_their_tags_are_in_headers(
    extend: bool, key: bytes | None, options: ProducerOptions, verb: bytes
) -> None:
    route = route_of(extend=extend)
    planner = BatchPlanner(route, options, lambda key, partitions: 0, key, None)
    planner.add([b"a", b"b"])
    ((batch,),) = planner.rows
    assert bytes(batch.command(route.at(0))).startswith(verb + b" t 0\n")


@pytest.mark.parametrize("member", [{"headers": {"a": "b"}}, {"tag": "red"}])
def test_a_topic_without_headers_names_the_message_that_has_some(member: dict[str, Any]) -> None:
    planner = BatchPlanner(route_of(), _OPTIONS, lambda key, partitions: 0, None, None)
    with pytest.raises(ExtendNotSupported, match="message 2: the topic does not accept headers") as caught:
        planner.add([b"a", OutgoingMessage(b"b", trace_id=5), OutgoingMessage(b"c", **member)])
    assert (caught.value.index, caught.value.topic) == (2, "t")


@pytest.mark.parametrize(("key", "partition", "expected"), [(b"k", None, 1), (None, 0, 0), (None, None, None)])
def test_a_key_or_a_partition_decides_where_plain_bodies_are_sent(
    key: bytes | None, partition: int | None, expected: int | None
) -> None:
    planner = BatchPlanner(route_of(2), _OPTIONS, lambda key, partitions: 1, key, partition)
    planner.add([b"%d" % number for number in range(9)])
    found = [[batch.partition for batch in row] for row in planner.rows]
    assert found == ([[None], [None]] if expected is None else [[expected] * 2]), "those of a partition are a row"
    assert planner.keys == ({key} if key else set())
