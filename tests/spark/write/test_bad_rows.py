"""Rows that cannot be published."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidBody, InvalidInput, TopicNotFound
from nsqext.spark.options import SinkOptions
from nsqext.spark.write.publisher import publish_rows
from nsqext.spark.write.row_ids import ContentIds
from nsqext.spark.write.row_mapper import describe_row
from tests.support.spark_cluster import collect

if TYPE_CHECKING:
    from tests.support.spark_cluster import Servers

COLUMNS = {
    "value": pa.binary(),
    "topic": pa.string(),
    "key": pa.string(),
    "partition": pa.int32(),
    "headers": pa.map_(pa.string(), pa.string()),
}


def write(servers: Servers, rows: list[dict[str, Any]], *columns: str, **options: str) -> int:
    """Publish rows as a task does; return the number of messages."""
    return write_as(ContentIds("q/4", 2, "run"), servers, rows, *columns, **options)


def write_as(ids: ContentIds, servers: Servers, rows: list[dict[str, Any]], *columns: str, **options: str) -> int:
    """Publish rows as the task with these ids."""
    given = SinkOptions.parse({**servers.options, **options})
    batch = pa.RecordBatch.from_pylist(rows, schema=pa.schema([(name, COLUMNS[name]) for name in columns or COLUMNS]))
    return publish_rows(given, columns or tuple(COLUMNS), ids, iter([batch])).total()


def test_bad_rows_are_described(servers: Servers) -> None:
    topic, bad = servers.make_topic("good", 1), servers.make_topic("bad", 1, extend=True)
    rows: list[dict[str, Any]] = [{"value": b"first"}]
    rows += [{"value": None}, {"value": b""}, {"value": b"x", "key": "k", "partition": 0}]
    rows += [{"value": b"\xff", "headers": {"a": "b"}}, {"value": b"x", "topic": "no topic"}]
    rows += [{"value": b"y", "partition": 7}, {"value": b"z" * 900, "key": "k"}, {"value": b"last"}]
    options = {"badRows": "topic", "badRowsTopic": bad, "nsqext.max_message_size": "800"}
    assert write(servers, [{"topic": topic, **row} for row in rows], **options) == len(rows)
    assert [message.body for message in collect(servers, topic, 2)] == [b"first", b"last"]
    found = sorted(collect(servers, bad, 7), key=lambda message: json.loads(message.body)["row"])
    described = [json.loads(message.body) for message in found]
    assert [one["row"] for one in described] == list(range(1, 8))
    assert len({message.headers["nsqext_id"] for message in found}) == 7
    words = ("null", "empty", "key and a partition", "headers", "name", "partition", "800")
    for one, word in zip(described, words, strict=True):
        assert word in one["error"], one
        assert one["task"] == 2
    assert "value" not in described[0]
    assert (described[2]["value"], described[2]["key"], described[2]["partition"]) == ("x", "k", 0)
    assert (described[3]["value_base64"], described[3]["headers"]["a"]) == ("/w==", "b")
    assert (described[6]["value_size"], described[6]["key"]) == (900, "k")


def test_bad_rows_of_columns_that_are_published_together(servers: Servers) -> None:
    topic, bad = servers.make_topic("good", 1), servers.make_topic("bad", 1)
    rows = [{"value": b"" if number % 10 == 3 else b"%d" % number} for number in range(40)]
    assert write(servers, rows, "value", topic=topic, badRows="topic", badRowsTopic=bad) == 40
    assert [int(message.body) for message in collect(servers, topic, 36)] == [n for n in range(40) if n % 10 != 3]
    found = collect(servers, bad, 4)
    assert [json.loads(message.body)["row"] for message in found] == [3, 13, 23, 33]
    ids = {message.trace_id for message in found}
    assert len(ids) == 4
    # another task with the same rows repeats the ids
    other = ContentIds("q/4", 5, "other")
    assert write_as(other, servers, rows[10:], "value", topic=topic, badRows="topic", badRowsTopic=bad) == 30
    assert {message.trace_id for message in collect(servers, bad, 3)} < ids


def test_any_number_of_bad_rows_is_described(servers: Servers) -> None:
    """From about 700 bad rows in a chunk on, the task failed with RecursionError, whenever it was tried again."""
    topic, bad = servers.make_topic("good", 1), servers.make_topic("bad", 1)
    rows = [{"value": b"%d" % number if number % 2 else b""} for number in range(4000)]
    assert write(servers, rows, "value", topic=topic, badRows="topic", badRowsTopic=bad) == 4000
    assert [int(message.body) for message in collect(servers, topic, 2000)] == list(range(1, 4000, 2))
    found = [json.loads(message.body)["row"] for message in collect(servers, bad, 2000)]
    assert found == list(range(0, 4000, 2))


def test_without_the_option_the_task_fails(servers: Servers) -> None:
    topic = servers.make_topic("good", 1)
    with pytest.raises(InvalidInput, match="row 1 of Spark partition 2"):
        write(servers, [{"value": b"x"}, {"value": b""}], "value", topic=topic)


def test_a_topic_that_does_not_exist_fails_the_task(servers: Servers) -> None:
    topic = servers.make_topic("good", 1)
    for options in ({"topic": "absent", "badRowsTopic": topic}, {"topic": topic, "badRowsTopic": "absent"}):
        with pytest.raises(TopicNotFound):
            write(servers, [{"value": b"x"}], "value", badRows="topic", **options)


@given(
    value=st.binary(max_size=200) | st.binary(min_size=150, max_size=200),
    size=st.integers(100, 400),
    key=st.none() | st.text(max_size=5),
)
def test_a_description_is_short_enough_and_complete(value: bytes, size: int, key: str | None) -> None:
    error = InvalidBody("it is bad")
    row = {"value": value, "key": key}
    described = describe_row(3, 1, error, row, size)
    one = json.loads(described)
    assert (one["row"], one["task"], one["error"]) == (3, 1, "InvalidBody: it is bad")
    assert one.get("key") == key
    if "value_size" in one:
        assert one["value_size"] == len(value)
        assert len(describe_row(3, 1, error, row, 1 << 20)) > size
    else:
        assert len(described) <= size
        assert (one["value"].encode() if "value" in one else b64decode(one["value_base64"])) == value


def test_headers_as_an_array_are_described() -> None:
    fields = {"value": b"x", "headers": [{"key": "a", "value": b"b"}, {"key": "c", "value": b"\xff"}, None]}
    one = json.loads(describe_row(0, 0, InvalidBody("bad"), fields, 1000))
    assert one["headers"] == [{"key": "a", "value": "b"}, {"key": "c", "value_base64": "/w=="}, {}]


def test_the_description_of_a_row_with_large_headers_has_none() -> None:
    """It would be larger than servers accept."""
    fields = {"value": b"x", "headers": {"a": "b" * 1000}, "key": "k"}
    described = describe_row(0, 0, InvalidBody("bad"), fields, 500)
    assert len(described) < 500
    assert (one := json.loads(described))["key"] == "k"
    assert (one["value_size"], "headers" in one) == (1, False)
