"""Topics as Arrow record batches, without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nsqext.arrow
from nsqext.errors import InvalidInput, InvalidSetting, LookupUnreachable, TopicNotFound, UnknownSetting
from nsqext.spark.columns import arrow_schema
from nsqext.spark.read.channel_batches import ChannelReader
from tests.support.spark_cluster import Servers, collect, running_servers

if TYPE_CHECKING:
    from nsqext.spark.options import SourceOptions


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """One node."""
    with running_servers(nodes=1) as servers:
        yield servers


def values(table: Any) -> list[bytes]:
    """Return the bodies of a table or a batch."""
    found: list[bytes] = table.column("value").to_pylist()
    return found


def test_rows_are_read_as_they_were_written(servers: Servers) -> None:
    topic = servers.make_topic("t", 1, extend=True)
    headers = pa.array([{"a": "b"}, None], pa.map_(pa.string(), pa.string()))
    rows = pa.table({"value": ["one", "two"], "key": ["k", None], "headers": headers, "tag": ["blue", None]})
    assert nsqext.arrow.write(rows, servers.lookupd, topic=topic, job="j") == 2
    reader = nsqext.arrow.read(topic, servers.lookupd, include_headers=True)
    assert reader.schema == arrow_schema((*arrow_schema().names, "headers", "key"))
    found = reader.read_all()
    assert values(found) == [b"one", b"two"]
    assert found.column("offset").to_pylist() == [0, 1]
    assert found.column("key").to_pylist() == ["k", None]
    assert found.column("tag").to_pylist() == ["blue", None]
    one, two = (dict(pairs) for pairs in found.column("headers").to_pylist())
    assert (one["a"], one["nsqext_id"], two["nsqext_id"]) == ("b", "j/0/0/0", "j/0/0/1")


def test_rows_of_two_writes_without_a_job_are_not_the_same(servers: Servers) -> None:
    topic = servers.make_topic("t", 1, extend=True)
    for _ in range(2):
        nsqext.arrow.write(pa.table({"value": ["equal"]}), servers.lookupd, topic=topic)
    found = nsqext.arrow.read(topic, servers.lookupd, include_headers=True).read_all()
    assert len({dict(pairs)["nsqext_id"] for pairs in found.column("headers").to_pylist()}) == 2


def test_the_largest_body_of_a_plain_topic_is_written_as_it_was_read(servers: Servers) -> None:
    source, copy = (servers.make_topic("t", 1) for _ in range(2))
    bodies = [b"x" * (1 << 20), b"y" * ((1 << 20) - 8), b"small"]
    servers.publish(source, bodies)
    for columns in (["value"], ["value", "tag", "headers"], ["value", "header", "trace_id"]):
        rows = nsqext.arrow.read(source, servers.lookupd, columns=columns)
        assert nsqext.arrow.write(rows, servers.lookupd, topic=copy) == 3
    found = nsqext.arrow.read(copy, servers.lookupd, columns=["value", "header", "trace_id"]).read_all()
    assert values(found) == bodies * 3
    assert found.column("header").to_pylist() == [b""] * 9
    assert [trace != 0 for trace in found.column("trace_id").to_pylist()] == [False, True, True] * 2 + [False] * 3


def test_a_row_that_no_topic_can_store_is_named_before_anything_is_sent(servers: Servers) -> None:
    topic = servers.make_topic("t", 1, extend=True)
    rows = pa.table({"value": ["fine", "bad"], "header": [b"{}", b'{"##trace_id":7}']})
    with pytest.raises(InvalidInput, match="row 1: ##trace_id of the header"):
        nsqext.arrow.write(rows, servers.lookupd, topic=topic)
    assert nsqext.arrow.read(topic, servers.lookupd).read_all().num_rows == 0


def test_a_compressed_body_is_read_as_it_is_stored_beside_its_header(servers: Servers) -> None:
    source, copy = (servers.make_topic("t", 1, extend=True) for _ in range(2))
    rows = pa.table({"value": [b"x" * 50_000]})  # smaller bodies are not compressed
    nsqext.arrow.write(rows, servers.lookupd, topic=source, compression="gzip")
    (body,) = values(nsqext.arrow.read(source, servers.lookupd, columns=["value", "header"]).read_all())
    assert len(body) < 1000
    stored = nsqext.arrow.read(source, servers.lookupd, columns=["value", "header"])
    assert nsqext.arrow.write(stored, servers.lookupd, topic=copy, compression="gzip") == 1
    for topic in (source, copy):
        assert values(nsqext.arrow.read(topic, servers.lookupd).read_all()) == [b"x" * 50_000]


def test_the_option_topic_wins_over_the_column(servers: Servers) -> None:
    """As in Kafka's connector: what was read from a topic is copied to another one, and not back."""
    source, copy = (servers.make_topic("t", 1) for _ in range(2))
    servers.publish(source, [b"%d" % number for number in range(10)])
    assert nsqext.arrow.write(nsqext.arrow.read(source, servers.lookupd), servers.lookupd, topic=copy) == 10
    for topic in (source, copy):
        assert len(values(nsqext.arrow.read(topic, servers.lookupd).read_all())) == 10
    # without the option, the column decides
    assert nsqext.arrow.write(nsqext.arrow.read(source, servers.lookupd), servers.lookupd) == 10
    assert len(values(nsqext.arrow.read(source, servers.lookupd).read_all())) == 20


def test_offsets_choose_messages(servers: Servers) -> None:
    topic = servers.make_topic("t", 2)
    for partition in (0, 1):
        servers.publish(topic, [b"%d-%d" % (partition, number) for number in range(10)], partition)
    found = nsqext.arrow.read(
        {topic: [1]}, servers.lookupd, starting_offsets={topic: {1: 3}}, ending_offsets={topic: {1: 6}}
    )
    assert values(found.read_all()) == [b"1-3", b"1-4", b"1-5"]
    bounds = nsqext.arrow.bounds(topic, ["127.0.0.1:1", *servers.lookupd])
    assert all(start == 0 < end for start, end in bounds.values())
    part = nsqext.arrow.bounds(
        topic,
        servers.lookupd,
        starting_offsets={topic: {0: 3, 1: -2}},
        ending_offsets={topic: {0: 6, 1: -1}},
    )
    assert part == {0: (3, 6), 1: (0, 10)}
    both = nsqext.arrow.read(
        [topic], servers.lookupd, columns=["partition", "offset"], arrow_batch_rows=4, node_filter=bool
    )
    rows = both.read_all()
    assert rows.column_names == ["partition", "offset"]
    assert rows.to_pydict() == {"partition": [0] * 10 + [1] * 10, "offset": [*range(10), *range(10)]}


def test_times_choose_messages(servers: Servers) -> None:
    topic = servers.make_topic("t", 1)
    servers.publish(topic, [b"early"])
    (stored,) = collect(servers, topic, 1)
    now = datetime.fromtimestamp(stored.timestamp / 1e9, UTC)
    for since, until, count in ((-1, 1, 1), (1, 2, 0), (-2, -1, 0), (-0.02, 0.02, 1)):
        reader = nsqext.arrow.read(
            topic,
            servers.lookupd,
            starting_timestamp=now + timedelta(seconds=since),
            ending_timestamp=now + timedelta(seconds=until),
        )
        assert reader.read_all().num_rows == count
    with pytest.raises(InvalidSetting, match="no time zone"):
        nsqext.arrow.read(topic, servers.lookupd, starting_timestamp=datetime(2026, 1, 1))


def test_a_reader_that_is_abandoned_closes_its_connections(servers: Servers) -> None:
    topic = servers.make_topic("t", 1)
    servers.publish(topic, [b"%d" % number for number in range(100)])
    reader = nsqext.arrow.read(topic, servers.lookupd, arrow_batch_rows=10, rdy=10)
    assert reader.read_next_batch().num_rows == 10
    reader.close()
    del reader
    again = nsqext.arrow.read(topic, servers.lookupd)
    assert again.read_all().num_rows == 100


@pytest.mark.parametrize(
    "values_of",
    [
        pa.array(["a", "b"], pa.string()),
        pa.array(["a", "b"], pa.large_string()),
        pa.array(["a", "b"], pa.string_view()),
        pa.array([b"a", b"b"], pa.binary()),
        pa.array([b"a", b"b"], pa.large_binary()),
        pa.array([b"a", b"b"], pa.binary_view()),
        pa.array(["a", "b"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_types_of_text_and_bytes(servers: Servers, values_of: pa.Array) -> None:
    topic = servers.make_topic("t", 1)
    rows = pa.record_batch({"value": values_of, "key": values_of, "topic": pa.array([topic] * 2).dictionary_encode()})
    assert nsqext.arrow.write(rows, servers.lookupd) == 2
    assert sorted(values(nsqext.arrow.read(topic, servers.lookupd).read_all())) == [b"a", b"b"]


def test_headers_as_a_list_of_structs(servers: Servers) -> None:
    """As libraries have them that have no maps."""
    topic = servers.make_topic("t", 1, extend=True)
    pair = pa.struct([("key", pa.large_string()), ("value", pa.large_string())])
    headers = pa.array([[{"key": "a", "value": "b"}], None], pa.large_list(pair))
    numbers = pa.array([2**64 - 1, None], pa.uint64())
    rows = pa.record_batch({"value": ["x", "y"], "headers": headers, "trace_id": numbers})
    assert nsqext.arrow.write(rows, servers.lookupd, topic=topic) == 2
    first, second = sorted(collect(servers, topic, 2), key=lambda message: message.body)
    assert (first.headers["a"], first.trace_id, second.trace_id) == ("b", 2**64 - 1, 0)
    found = nsqext.arrow.read(topic, servers.lookupd, columns=["headers"], headers_format="array").read_all()
    assert {"key": "a", "value": b"b"} in found.column("headers").to_pylist()[0]


@settings(max_examples=15, deadline=None)
@given(bodies=st.lists(st.lists(st.binary(min_size=1, max_size=30), max_size=8), max_size=5))
def test_batches_are_written_in_their_order(servers: Servers, bodies: list[list[bytes]]) -> None:
    topic = servers.make_topic("t", 1)
    batches = (pa.record_batch({"value": pa.array(part, pa.binary())}) for part in bodies)
    expected = [body for part in bodies for body in part]
    assert nsqext.arrow.write(batches, servers.lookupd, topic=topic) == len(expected)
    assert values(nsqext.arrow.read(topic, servers.lookupd).read_all()) == expected


def test_a_channel_is_consumed_at_least_once(servers: Servers) -> None:
    topic = servers.make_topic("t", 2)
    for partition in (0, 1):
        servers.publish(topic, [b"%d-%d" % (partition, number) for number in range(20)], partition)
    batches = nsqext.arrow.consume(topic, servers.channel, servers.lookupd, max_messages=5)
    first = [values(next(batches)) for _ in range(3)]
    batches.close()  # type: ignore[attr-defined]
    rest = nsqext.arrow.consume(topic, servers.channel, servers.lookupd, until_empty=True, columns=["value", "topic"])
    found = [body for batch in rest for body in values(batch)]
    expected = {b"%d-%d" % (partition, number) for partition in (0, 1) for number in range(20)}
    assert {body for part in first for body in part} | set(found) == expected
    assert max(map(len, first)) <= 5
    assert set(first[-1]) <= set(found), "the batch before the close was not finished"
    again = nsqext.arrow.consume(topic, servers.channel, servers.lookupd, until_empty=True)
    assert list(again) == [], "the others were"


def test_messages_published_after_the_call_are_left_in_the_channel(servers: Servers) -> None:
    topic = servers.make_topic("t", 1)
    servers.publish(topic, [b"1", b"2"], 0)
    batches = nsqext.arrow.consume(topic, servers.channel, servers.lookupd, until_empty=True, max_messages=1)
    servers.publish(topic, [b"late"], 0)
    assert values(next(batches)) == [b"1"]
    servers.publish(topic, [b"later"], 0)
    assert [values(batch) for batch in batches] == [[b"2"]]
    empty = servers.make_topic("t", 1)
    batches = nsqext.arrow.consume(empty, servers.channel, servers.lookupd, until_empty=True)
    servers.publish(empty, [b"late"], 0)
    assert list(batches) == []


def test_without_until_empty_messages_are_waited_for(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = servers.make_topic("t", 1)
    take = ChannelReader.take

    def taken(reader: Any, number: int) -> Any:
        found = take(reader, number)
        if not found:
            servers.publish(topic, [b"late"], 0)
        return found

    monkeypatch.setattr(ChannelReader, "take", taken)
    batches = nsqext.arrow.consume(topic, servers.channel, servers.lookupd)
    assert values(next(batches)) == [b"late"]
    batches.close()  # type: ignore[attr-defined]


def test_max_messages_is_the_limit_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, batches of a few messages were as large as before if the messages arrived one by one."""
    limits: list[int | None] = []

    def reader(source: SourceOptions) -> None:
        limits.append(source.max_offsets_per_trigger)
        raise InvalidSetting("not connected")

    monkeypatch.setattr("nsqext.arrow.ChannelReader", reader)
    with pytest.raises(InvalidSetting, match="not connected"):
        next(nsqext.arrow.consume("t", "ch", "127.0.0.1:1", max_messages=5))
    assert limits == [5]


@pytest.mark.parametrize("wrong", [0, None, 1.5, "5"])
def test_a_wrong_number_of_messages_is_named_as_it_was_given(wrong: Any) -> None:
    """The error named an option of Spark's source."""
    with pytest.raises(InvalidSetting, match=f"max_messages={wrong!r} is not a positive number"):
        nsqext.arrow.consume("t", "ch", "127.0.0.1:1", max_messages=wrong)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingoffsets": "earliest"}, "did you mean starting_offsets"),
        ({"min_partitions": 3}, "unknown setting 'min_partitions'"),
        ({"reset_channel": True}, "unknown setting 'reset_channel'"),
        ({"max_in_flight": 3}, "unknown setting 'max_in_flight'"),
        ({"subscribe": "u"}, "unknown setting 'subscribe'"),
        ({"channel": "ch"}, "unknown setting 'channel'"),
    ],
)
def test_unknown_options(options: Any, expected: str) -> None:
    with pytest.raises(UnknownSetting, match=r"nsqext\.arrow\.read") as caught:
        nsqext.arrow.read("t", "127.0.0.1:1", **options)
    assert expected in str(caught.value)


@pytest.mark.parametrize("options", [{"read_mode": "offset"}, {"assign": {"u": [0]}}, {"max_offsets_per_trigger": 3}])
def test_options_that_consume_sets_itself_are_unknown(options: Any) -> None:
    """They had no effect."""
    with pytest.raises(UnknownSetting, match=r"nsqext\.arrow\.consume: unknown setting"):
        nsqext.arrow.consume("t", "ch", "127.0.0.1:1", **options)


def test_an_unknown_option_is_not_taken_for_an_internal_one() -> None:
    """`read` has topics as an argument, and no channel."""
    options: Any = {"subscribed": "t"}
    with pytest.raises(UnknownSetting) as caught:
        nsqext.arrow.read("t", "127.0.0.1:1", **options)
    assert "did you mean subscribe" not in str(caught.value)


def test_options_that_are_refused(servers: Servers) -> None:
    text: Any = "no"
    with pytest.raises(InvalidSetting, match="until_empty='no' is not True or False"):
        nsqext.arrow.consume("t", "ch", servers.lookupd, until_empty=text)
    with pytest.raises(InvalidSetting, match="rdy"):
        nsqext.arrow.read("t", servers.lookupd, rdy=0)
    with pytest.raises(InvalidSetting, match="startingOffsets cannot be latest"):
        nsqext.arrow.read("t", servers.lookupd, starting_offsets="latest")
    for timeout in (float("nan"), float("inf")):
        with pytest.raises(InvalidSetting, match=r"read_timeout=\w+ is not a number of seconds"):
            nsqext.arrow.read("t", servers.lookupd, read_timeout=timeout)
    with pytest.raises(InvalidSetting, match="readTimeout"):
        nsqext.arrow.read("t", servers.lookupd, read_timeout=True)
    with pytest.raises(InvalidSetting, match="option job='' is invalid: it is empty"):
        nsqext.arrow.write(pa.table({"value": ["x"]}), servers.lookupd, topic="t", job="")
    nothing: Any = None
    with pytest.raises(InvalidSetting, match="topic=None is not a value"):
        nsqext.arrow.write(pa.table({"value": ["x"]}), servers.lookupd, topic=nothing)
    with pytest.raises(InvalidSetting, match="connect_timeout"):
        nsqext.arrow.read("t", servers.lookupd, connect_timeout=-1)
    with pytest.raises(TopicNotFound):
        nsqext.arrow.read("absent", servers.lookupd)
    with pytest.raises(LookupUnreachable, match="check the option lookupd"):
        nsqext.arrow.read("t", "127.0.0.1:1", read_timeout=0.2)


BATCH = pa.record_batch({"topic": pa.array([], pa.string()), "value": pa.array([], pa.string())})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (pa.table({"body": ["x"]}), "column body is unknown"),
        (pa.table({"key": ["x"]}), "column value is missing"),
        (pa.table({"value": ["x"]}), "no topic is given"),
        (pa.table({"value": [[1]], "topic": ["t"]}), "column value is list<"),
        (pa.table({"value": ["x"], "topic": ["t"], "partition": ["first"]}), "column partition is string"),
        (7, "int cannot be read as Arrow data"),
        ([{"value": "x"}], "rows contain dict in place of a record batch"),
        ([BATCH, pa.table({"topic": ["t"], "value": ["x"]})], "rows contain Table in place of a record batch"),
    ],
)
def test_rows_that_are_refused(servers: Servers, rows: Any, expected: str) -> None:
    with pytest.raises((InvalidSetting, InvalidInput), match=expected):
        nsqext.arrow.write(rows, servers.lookupd)


def test_batches_with_other_columns_than_the_first_are_refused(servers: Servers) -> None:
    """Keys and values were exchanged."""
    topic = servers.make_topic("t", 1)
    first = pa.record_batch({"value": ["body"], "key": ["key"]})
    for other in (first.select(["key", "value"]), first.select(["value"])):
        with pytest.raises(InvalidInput, match="and the first one value, key"):
            nsqext.arrow.write([first, other], servers.lookupd, topic=topic)
    assert set(values(nsqext.arrow.read(topic, servers.lookupd).read_all())) <= {b"body"}


def test_a_map_with_a_key_twice_is_a_bad_row(servers: Servers) -> None:
    topic, bad = servers.make_topic("t", 1, extend=True), servers.make_topic("t", 1)
    headers = pa.array([[("a", "1"), ("a", "2")], [("a", "3")], None], pa.map_(pa.string(), pa.string()))
    rows = pa.table({"value": ["x", "y", "z"], "headers": headers})
    with pytest.raises(InvalidInput, match="row 0: the header 'a' occurs twice"):
        nsqext.arrow.write(rows, servers.lookupd, topic=topic)
    assert nsqext.arrow.write(rows, servers.lookupd, topic=topic, bad_rows="topic", bad_rows_topic=bad) == 3
    assert values(nsqext.arrow.read(topic, servers.lookupd).read_all()) == [b"y", b"z"]


def test_bad_rows_go_to_a_topic(servers: Servers) -> None:
    topic, bad = servers.make_topic("t", 1), servers.make_topic("t", 1)
    rows = pa.table({"value": ["x", None, "y"]})
    assert nsqext.arrow.write(rows, servers.lookupd, topic=topic, bad_rows="topic", bad_rows_topic=bad) == 3
    assert values(nsqext.arrow.read(topic, servers.lookupd).read_all()) == [b"x", b"y"]
    assert b"the value is null" in values(nsqext.arrow.read(bad, servers.lookupd).read_all())[0]
    with pytest.raises(InvalidInput, match=r"^row 1: the value is null"):
        nsqext.arrow.write(rows, servers.lookupd, topic=topic)


def test_polars(servers: Servers) -> None:
    pl = pytest.importorskip("polars")
    topic = servers.make_topic("t", 1)
    rows = pl.DataFrame({"value": ["a", "b", "c"], "key": ["1", "2", "1"]})
    assert nsqext.arrow.write(rows, servers.lookupd, topic=topic) == 3
    found = pl.from_arrow(nsqext.arrow.read(topic, servers.lookupd))
    assert sorted(found["value"].to_list()) == [b"a", b"b", b"c"]


def test_duckdb(servers: Servers) -> None:
    duckdb = pytest.importorskip("duckdb")
    topic = servers.make_topic("t", 1)
    rows = duckdb.sql("SELECT 'x' || i AS value FROM range(5) t(i)")
    assert nsqext.arrow.write(rows, servers.lookupd, topic=topic) == 5
    messages = nsqext.arrow.read(topic, servers.lookupd)  # noqa: F841 (DuckDB finds it)
    assert duckdb.sql("SELECT count(*), max(decode(value)) FROM messages").fetchall() == [(5, "x4")]


def test_no_spark_is_needed() -> None:
    program = "import sys\nfor name in ('pyspark', 'pandas'): sys.modules[name] = None\nimport nsqext.arrow"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
