"""Rows as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pytest

from nsqext import OutgoingMessage
from nsqext.client.producer.packed import PackedMessages
from nsqext.errors import InvalidHeader, InvalidInput
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.options import SinkOptions
from nsqext.spark.write.packing import PackedRows
from nsqext.spark.write.row_ids import BatchIds, ContentIds, NumberedIds
from nsqext.spark.write.row_mapper import Chunk, Group, RowMapper
from nsqext.types import TopicMeta

IDS = NumberedIds("q", 2)
TRACES = IDS.of_batch({"value": pa.array([b""] * 4)}, 0).trace_ids.tolist()
METAS = {"plain": TopicMeta(2), "extend": TopicMeta(2, extend_support=True), "original": TopicMeta()}
TYPES: dict[str, pa.DataType] = {
    "value": pa.binary(),
    "topic": pa.string(),
    "key": pa.string(),
    "partition": pa.int32(),
    "headers": pa.map_(pa.string(), pa.string()),
    "trace_id": pa.int64(),
    "tag": pa.string(),
    "header": pa.binary(),
}


class Rows:
    """Makes chunks of rows, and notes which topics were asked about."""

    def __init__(self, topic: str | None = None, max_bytes: int = 1 << 20, max_count: int = 1000) -> None:
        client = ClientConfig(("a:1",))
        self._options = SinkOptions(client, topic, ack_batch_bytes=max_bytes, max_rows_per_second=max_count)
        self.asked: list[str] = []

    def _meta(self, topic: str) -> TopicMeta:
        self.asked.append(topic)
        return METAS[topic]

    def chunks(self, *batches: Sequence[dict[str, Any]], types: dict[str, pa.DataType] = TYPES) -> list[Chunk]:
        columns = tuple(batches[0][0])
        schema = pa.schema([(name, types[name]) for name in columns])
        tables = [pa.RecordBatch.from_pylist(batch, schema=schema) for batch in batches]
        return list(RowMapper(self._options, columns, IDS).chunks(tables, self._meta))

    def message(self, **row: Any) -> bytes | OutgoingMessage:
        """Return the message of a single row."""
        (chunk,) = self.chunks([row])
        ((_, group),) = chunk.groups.items()
        assert group.rows == [0]
        return group.messages[0]


def test_a_row_of_an_extend_topic_has_its_id_in_a_header() -> None:
    assert Rows("extend").message(value=b"x") == OutgoingMessage(b"x", headers={"nsqext_id": "q/0/2/0"})
    given = Rows().message(value=b"x", topic="extend", headers={"a": "b"}, tag="blue", trace_id=-1, key="k")
    assert given == OutgoingMessage(b"x", {"a": "b", "nsqext_id": "q/0/2/0"}, "blue", 2**64 - 1, b"k")


def test_a_row_of_a_plain_topic_has_a_hash_of_its_id_as_trace_id() -> None:
    assert Rows("plain").message(value=b"x") == OutgoingMessage(b"x", trace_id=TRACES[0])


def test_the_ids_of_a_batch_are_made_once_although_a_bad_row_is_described_meanwhile() -> None:
    """It is described in another thread: made twice, each row of the batch would count as equal to an earlier one."""
    mappers: list[RowMapper] = []

    class Ids(ContentIds):
        def of_batch(self, columns: Mapping[str, pa.Array], first: int) -> BatchIds:
            if not made:
                made.append(first)
                mappers[0].describe(9, InvalidInput("bad"), {"value": b"bad"})
            else:
                made.append(first)
            return super().of_batch(columns, first)

    made: list[int] = []
    options = SinkOptions(ClientConfig(("a:1",)), "extend", bad_rows_topic="plain")
    mappers.append(RowMapper(options, ("value",), Ids("q/1", 0, "run")))
    (chunk,) = mappers[0].chunks([pa.record_batch({"value": [b"x", b"y"]})], METAS.__getitem__)
    (group,) = chunk.groups.values()
    ids = [
        message.headers["nsqext_id"]
        for message in group.messages
        if isinstance(message, OutgoingMessage) and message.headers
    ]
    assert (made, len(ids), [one.count("-") for one in ids]) == ([0], 2, [0, 0])


def test_columns_of_a_row_are_kept() -> None:
    assert Rows("plain").message(value=b"x", trace_id=7) == OutgoingMessage(b"x", trace_id=7)
    assert Rows("extend").message(value=b"x", headers={"nsqext_id": "mine"}) == OutgoingMessage(
        b"x", {"nsqext_id": "mine"}
    )


def test_a_row_with_its_header_is_published_as_it_was_stored() -> None:
    header = b'{"n": null,"##client_dispatch_tag":"t","##trace_id":"7"}'
    for others in ({}, {"headers": {"n": None}, "tag": "t", "trace_id": 7}):
        row = Rows("extend").message(value=b"x", key="k", header=header, **others)
        assert row == OutgoingMessage(b"x", key=b"k", header=header)
    assert Rows("plain").message(value=b"x", header=b"", trace_id=-1) == OutgoingMessage(
        b"x", trace_id=2**64 - 1, header=b""
    )
    assert Rows("plain").message(value=b"x", header=b"") == OutgoingMessage(b"x", header=b"")
    assert Rows("extend").message(value=b"x", header=None, headers={"a": "b"}) == OutgoingMessage(
        b"x", {"a": "b", "nsqext_id": "q/0/2/0"}
    )


@pytest.mark.parametrize(
    ("column", "value"), [("headers", {"n": "new"}), ("headers", {}), ("tag", "other"), ("trace_id", 8)]
)
def test_a_column_that_was_changed_beside_the_header_is_refused(column: str, value: object) -> None:
    header = b'{"n":null,"##client_dispatch_tag":"t","##trace_id":"7"}'
    with pytest.raises(InvalidHeader, match=f"row 0 .*: the columns header and {column} contradict each other"):
        Rows("extend").message(value=b"x", header=header, **{column: value})
    with pytest.raises(InvalidHeader, match=r"row 0 .*: column header: extend header is not JSON"):
        Rows("extend").message(value=b"x", header=b"{")


def test_headers_in_an_array_agree_with_the_header() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    row = {"value": b"x", "header": b'{"a":"b","n":null}'}
    for value, agrees in ((b"b", True), (b"c", False)):
        pairs = [{"key": "a", "value": value}, {"key": "n", "value": None}]
        if agrees:
            (chunk,) = Rows("extend").chunks([row | {"headers": pairs}], types={**TYPES, "headers": kind})
            assert chunk.groups["extend", None].messages == [OutgoingMessage(b"x", header=row["header"])]
            continue
        with pytest.raises(InvalidHeader, match="the columns header and headers contradict each other"):
            Rows("extend").chunks([row | {"headers": pairs}], types={**TYPES, "headers": kind})


def test_a_body_that_leaves_no_room_for_a_trace_id_has_none() -> None:
    largest = 1 << 20
    for size, traced in ((largest, False), (largest - 7, False), (largest - 8, True)):
        for row in ({"value": b"x" * size}, {"value": b"x" * size, "tag": None}):
            message = Rows("plain").message(**row)
            assert (isinstance(message, OutgoingMessage) and message.trace_id is not None) == traced


def test_trace_id_0_means_no_trace_id() -> None:
    assert Rows("plain").message(value=b"x", trace_id=0) == OutgoingMessage(b"x", trace_id=TRACES[0])
    assert Rows("extend").message(value=b"x", trace_id=0) == OutgoingMessage(b"x", {"nsqext_id": "q/0/2/0"})


def test_the_original_nsq_gets_bodies() -> None:
    assert Rows("original").message(value=b"x") == b"x"


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()])
def test_values_and_keys_are_bytes_or_text(kind: pa.DataType) -> None:
    types = {**TYPES, "value": kind, "key": kind, "topic": pa.large_string()}
    text: Any = "ü" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "ü".encode()
    (chunk,) = Rows().chunks([{"value": text, "key": text, "topic": "original"}], types=types)
    assert chunk.groups["original", None].messages == [OutgoingMessage("ü".encode(), key="ü".encode())]


def test_rows_are_grouped_by_topic_and_partition() -> None:
    rows = Rows()
    first: list[dict[str, Any]] = [
        {"value": b"%d" % number, "topic": "plain", "partition": number % 2 or None} for number in range(4)
    ]
    second: list[dict[str, Any]] = [
        {"value": b"4", "topic": "original", "partition": None},
        {"value": b"5", "topic": "plain", "partition": 1},
    ]
    (chunk,) = rows.chunks(first, second)
    groups = {place: group.rows for place, group in chunk.groups.items()}
    assert groups == {("plain", None): [0, 2], ("plain", 1): [1, 3, 5], ("original", None): [4]}
    assert chunk.count == 6
    assert rows.asked == ["plain", "original"]


def test_the_option_topic_wins_over_the_column() -> None:
    for row in ({"value": b"x", "topic": "extend"}, {"value": b"x", "topic": None, "tag": None}):
        (chunk,) = Rows("plain").chunks([row])
        assert list(chunk.groups) == [("plain", None)]


def test_the_option_topic_wins_over_the_column_of_rows_that_are_mapped_alone() -> None:
    for topic in ("extend", None):
        (chunk,) = Rows("plain").chunks([{"value": b"x", "topic": topic, "trace_id": 1}])
        assert list(chunk.groups) == [("plain", None)]


@pytest.mark.parametrize("topic", ["plain", "extend", "original"])
def test_a_null_among_values_is_refused(topic: str) -> None:
    with pytest.raises(InvalidInput, match=r"row 1 of Spark partition 2: the value is null"):
        Rows(topic).chunks([{"value": b"x"}, {"value": None}])


def test_chunks_are_bounded_by_bytes_and_by_number() -> None:
    sizes = [400, 400, 400, 2000, 10, 10]
    by_bytes = Rows("original", max_bytes=1000).chunks([{"value": b"x" * size} for size in sizes])
    assert [chunk.count for chunk in by_bytes] == [2, 1, 1, 2]
    by_number = Rows("original", max_count=4).chunks([{"value": b"x"}] * 6, [{"value": b"x"}] * 3)
    assert [chunk.count for chunk in by_number] == [4, 4, 1]
    assert [row for chunk in by_number for group in chunk.groups.values() for row in group.rows] == list(range(9))
    # rows that are mapped one by one count as more bytes than their values
    by_bytes = Rows("plain", max_bytes=1000).chunks([{"value": b"x" * size, "trace_id": 1} for size in sizes])
    assert [chunk.count for chunk in by_bytes] == [2, 1, 1, 2]
    by_number = Rows("plain", max_count=4).chunks([{"value": b"x", "trace_id": 1}] * 6)
    assert [chunk.count for chunk in by_number] == [4, 2]


def test_equal_rows_of_a_topic_without_headers_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows, options = pa.record_batch({"value": [b"x", b"x"]}), SinkOptions(ClientConfig(("a:1",)), "plain")
    list(RowMapper(options, ("value",), ContentIds("q/0", 2, "run")).chunks([rows, rows], METAS.__getitem__))
    assert len([record for record in caplog.records if "dedupe would remove equal rows" in record.getMessage()]) == 1


def test_the_description_of_a_row_is_that_of_every_run() -> None:
    options = SinkOptions(ClientConfig(("a:1",)), "extend", bad_rows_topic="original")
    headers = pa.array([[("a", "b"), ("nsqext_id_task", "run/1")]], TYPES["headers"])
    rows = pa.RecordBatch.from_arrays([pa.array([None], pa.binary()), headers], ["value", "headers"])
    (chunk,) = RowMapper(options, ("value", "headers"), IDS).chunks([rows], METAS.__getitem__)
    (description,) = chunk.groups["original", None].messages
    assert orjson.loads(bytes(description))["headers"] == {"a": "b"}  # type: ignore[arg-type]


@pytest.mark.parametrize("topic", ["plain", "extend", "original"])
@pytest.mark.parametrize("limits", [(1000, 10), (1 << 20, 7), (100, 1000), (1 << 20, 1000)])
@pytest.mark.parametrize("others", [["key"], []])
def test_rows_of_values_and_keys_are_mapped_together(topic: str, limits: tuple[int, int], others: list[str]) -> None:
    """The fast path for them gives the messages that single rows give."""
    rows: list[dict[str, Any]] = [
        {"value": b"x" * (number * 37 % 400 + 1), "key": "k" if number % 3 and others else None} for number in range(50)
    ]
    slow = Rows(topic, *limits).chunks([{**row, "trace_id": 0} for row in rows])
    rows = [{name: row[name] for name in ("value", *others)} for row in rows]
    fast = Rows(topic, *limits).chunks(rows[:20], rows[20:])

    def messages(chunks: list[Chunk]) -> list[tuple[int, Any]]:
        return [
            pair
            for chunk in chunks
            for group in chunk.groups.values()
            for pair in zip(group.rows, group.messages, strict=True)
        ]

    assert messages(fast) == messages(slow)
    assert [number for number, _ in messages(fast)] == list(range(50))
    for chunk in fast:
        assert chunk.count == sum(len(group.rows) for group in chunk.groups.values()) <= limits[1]
        assert chunk.count == 1 or chunk.size <= limits[0] + 64 * chunk.count + 30 * chunk.count


def test_headers_may_be_an_array() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    row = {"value": b"x", "headers": [{"key": "a", "value": b"b"}, {"key": "n", "value": b""}]}
    (chunk,) = Rows("extend").chunks([row], types={**TYPES, "headers": kind})
    ((_, group),) = chunk.groups.items()
    assert group.messages == [OutgoingMessage(b"x", {"a": "b", "n": "", "nsqext_id": "q/0/2/0"})]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([("a", b"b"), ("a", b"c")], "row 0 of Spark partition 2: the header 'a' occurs twice"),
        ([("a", b"\xff")], "the header 'a' is not UTF-8"),
        ([("a", None)], "the header 'a' is null"),
        ([(None, b"b")], "a header has no key"),
        ([None], "a header has no key"),
    ],
)
def test_an_array_that_headers_cannot_represent(pairs: list[tuple[str, bytes] | None], expected: str) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = [pair and {"key": pair[0], "value": pair[1]} for pair in pairs]
    with pytest.raises(InvalidHeader) as caught:
        Rows("extend").chunks([{"value": b"x", "headers": headers}], types={**TYPES, "headers": kind})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"value": None, "topic": "plain"}, "row 1 of Spark partition 2: the value is null (topic plain)"),
        ({"value": b"x", "topic": None}, "row 1 of Spark partition 2: the row has no topic: fill the column topic"),
        ({"value": b"x", "topic": ""}, "row 1 of Spark partition 2: topic name '' is not valid"),
        ({"value": b"x", "topic": "a b"}, "row 1 of Spark partition 2: "),
        ({"value": b"x", "topic": "plain", "partition": -1}, "partition -1 is not valid (topic plain)"),
        ({"value": b"x", "topic": "plain", "partition": 1, "key": "k"}, "the row has a key and a partition"),
    ],
)
def test_an_error_names_the_row(row: dict[str, Any], expected: str) -> None:
    fine: dict[str, Any] = {"value": b"x", "topic": "plain", "partition": 1, "key": None}
    with pytest.raises(InvalidInput) as caught:
        Rows().chunks([fine, {**dict.fromkeys(fine), **row}])
    assert expected in str(caught.value)


def test_a_column_without_any_topic_names_none() -> None:
    rows = pa.RecordBatch.from_pydict({"value": [b"x", b"y"], "topic": pa.nulls(2, pa.string())})
    with pytest.raises(InvalidInput, match="row 0 of Spark partition 2: the row has no topic"):
        list(RowMapper(SinkOptions(ClientConfig(("a:1",))), ("value", "topic"), IDS).chunks([rows], METAS.__getitem__))


@pytest.mark.parametrize("topic", ["plain", "extend", "original"])
def test_bodies_and_ids_stay_packed_until_other_messages_follow(topic: str) -> None:
    values = [b"%d" % number for number in range(3)]
    (chunk,) = Rows(topic).chunks([{"value": values[0]}], [{"value": value} for value in values[1:]])
    (group,) = chunk.groups.values()
    by_topic: dict[str, list[Any]] = {
        "plain": [OutgoingMessage(value, trace_id=trace) for value, trace in zip(values, TRACES, strict=False)],
        "extend": [OutgoingMessage(value, {"nsqext_id": f"q/0/2/{row}"}) for row, value in enumerate(values)],
        "original": values,
    }
    expected = by_topic[topic]
    packed = group.messages
    assert isinstance(packed, PackedMessages)
    assert (list(packed), group.rows, chunk.count) == (expected, [0, 1, 2], 3)
    assert group.part(1, 3).messages == expected[1:3]
    other = OutgoingMessage(b"other", trace_id=7)
    chunk.add((topic, None), 3, other, 5)
    chunk.extend((topic, None), range(4, 7), packed, 1)
    assert (group.messages, group.rows) == ([*expected, other, *expected], [*range(7)])


JOB = 'a "\\\x01ü'


@pytest.mark.parametrize("make", [lambda: NumberedIds(JOB, 2), lambda: ContentIds(JOB, 2, "run")])
def test_an_id_that_json_escapes_is_packed(make: Callable[[], NumberedIds | ContentIds]) -> None:
    batch = pa.RecordBatch.from_pydict({"value": [b"x", b"x", b"y"]})
    ids = make().of_batch(dict(zip(batch.schema.names, batch.columns, strict=True)), 0)
    (chunk,) = RowMapper(SinkOptions(ClientConfig(("a:1",)), "extend"), ("value",), make()).chunks(
        [batch], METAS.__getitem__
    )
    (group,) = chunk.groups.values()
    assert isinstance(group.messages, PackedMessages)
    assert [message.headers for message in group.messages if isinstance(message, OutgoingMessage)] == [
        ids.headers_of("nsqext_id", index) for index in range(3)
    ]


def test_messages_of_two_commands_are_not_packed_together() -> None:
    values, group = pa.array([b"a", b"b"]), Group()
    packed = PackedRows.of_bodies(values)[:], PackedRows.with_traces(values, IDS.of_batch({"value": values}, 0))[:]
    for number, messages in enumerate(packed):
        group.extend(range(2 * number, 2 * number + 2), messages)
    assert group.messages == [*packed[0], *packed[1]]


@pytest.mark.parametrize("topic", ["plain", "extend"])
def test_a_column_of_one_topic_and_columns_of_nulls_cost_no_object_for_each_row(topic: str) -> None:
    rows: list[dict[str, Any]] = [
        {"value": b"%d" % row, "topic": topic, "tag": None, "headers": None} for row in range(3)
    ]
    (chunk,) = Rows().chunks(rows)
    assert isinstance(chunk.groups[topic, None].messages, PackedMessages)
    (chunk,) = Rows().chunks([*rows[:2], {**rows[2], "topic": "original"}])
    assert chunk.groups[topic, None].rows == [0, 1]
    (chunk,) = Rows().chunks([*rows[:2], {**rows[2], "trace_id": 7}])
    assert len(chunk.groups[topic, None].messages) == 3
