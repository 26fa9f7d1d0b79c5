"""Ids of rows."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyspark
from hypothesis import given
from hypothesis import strategies as st

from nsqext.spark.write.row_ids import ContentIds, NumberedIds, Repeats, content_hashes

if TYPE_CHECKING:
    import pytest

TYPES = {
    "value": pa.binary(),
    "topic": pa.string(),
    "key": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "message_id": pa.binary(),
    "headers": pa.map_(pa.string(), pa.string()),
    "trace_id": pa.int64(),
}


def columns(*rows: dict[str, Any]) -> dict[str, pa.Array]:
    """Return rows as the sink receives them."""
    return {name: pa.array([row[name] for row in rows], TYPES[name]) for name in rows[0]}


class Context:
    """What a task knows about itself."""

    def __init__(self, **properties: str) -> None:
        self._properties = {name.replace("_", "."): value for name, value in properties.items()}

    def partitionId(self) -> int:
        return 3

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


def within(patch: pytest.MonkeyPatch, context: Context | None) -> None:
    class Tasks:
        @staticmethod
        def get() -> Context | None:
            return context

    patch.setattr(pyspark, "TaskContext", Tasks)


def test_a_stream_is_identified_by_query_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context(sql_streaming_queryId="q-1", streaming_sql_batchId="12"))
    ids = ContentIds.of_query("0123456789abcdef")
    assert (ids.scope, ids.partition, ids.run) == ("q-1/12", 3, "0123456789ab")


def test_a_batch_is_identified_by_its_job_even_inside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context(sql_streaming_queryId="q-1", streaming_sql_batchId="12"))
    once, named = ContentIds.of_job("run"), ContentIds.of_job("run", "job")
    assert (once.scope, once.run) == ("run/3", None), "its rows are never in another task"
    assert (named.scope, named.run) == ("job/0", "run")


def test_without_a_query_the_run_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for context, partition in ((Context(), 3), (None, 0)):
        within(monkeypatch, context)
        ids = ContentIds.of_query("run")
        assert (ids.scope, ids.partition, ids.run) == (f"run/{partition}", partition, None)


def test_ids_are_stable() -> None:
    """Readers compare them with ids that are stored already."""
    numbered = NumberedIds("q").of_batch(columns({"value": b"a"}, {"value": b"b"}), 5)
    assert numbered.texts == ["q/0/0/5", "q/0/0/6"]
    assert numbered.trace_ids.tolist() == [8848000727024582487, 3723406903710705843]
    rows = columns(*({"value": value, "key": "k", "partition": None} for value in (b"a", b"b", b"a")))
    found = ContentIds("q/4", 2, "run").of_batch(rows, 0)
    texts = ["q/4/73377c7530273cc6", "q/4/15d8dbeda5cc3c90", "q/4/73377c7530273cc6-1"]
    traces = [7557593146676476467, 6363098872632672782, 482152632241817171]
    assert (found.texts, found.trace_ids.tolist()) == (texts, traces)
    assert (found.task, found.ambiguous) == ("run/2", True)
    assert found.headers_of("n", 2) == {"n": texts[2], "n_task": "run/2"}


def test_many_rows_have_different_ids() -> None:
    values = pa.array(np.arange(100_000).astype(str), pa.string())
    texts, traces = set(), set()
    for batch in range(2):
        ids = ContentIds(f"q/{batch}", 0).of_batch({"value": values}, 0)
        texts |= set(ids.texts)
        traces |= set(ids.trace_ids.tolist())
    assert len(texts) == len(traces) == 200_000
    assert all(0 < trace < 2**64 for trace in traces)


ROWS = st.lists(
    st.fixed_dictionaries({"value": st.sampled_from([b"a", b"b", b"c", b""]), "key": st.sampled_from(["k", "", None])}),
    min_size=1,
    max_size=30,
)


@given(rows=ROWS, cuts=st.lists(st.integers(0, 30), max_size=4), other=st.lists(st.integers(0, 30), max_size=4))
def test_ids_of_rows_with_positions_do_not_depend_on_the_split(
    rows: list[dict[str, Any]], cuts: list[int], other: list[int]
) -> None:
    """Rows of one message, which may be equal, are in one task."""
    placed = [{**row, "topic": "t", "partition": 0, "offset": number} for number, row in enumerate(rows)]

    def published(edges: list[int]) -> list[str]:
        parts = zip([0, *sorted(edges)], [*sorted(edges), len(rows)], strict=True)
        tasks = [[row for row in placed[start:stop] for _ in range(2)] for start, stop in parts]
        found = [ContentIds("q/1", task, "r").of_batch(columns(*part), 0) for task, part in enumerate(tasks) if part]
        assert all(ids.task is None for ids in found)
        return sorted(text for ids in found for text in ids.texts)

    texts = published(cuts)
    assert texts == published(other)
    assert len(set(texts)) == 2 * len(rows)


@given(parts=st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=8))
def test_equal_rows_of_a_task_are_numbered(parts: list[list[int]]) -> None:
    repeats, counts = Repeats(), Counter[int]()
    for part in parts:
        expected = {}
        for index, content in enumerate(part):
            if counts[content]:
                expected[index] = counts[content]
            counts[content] += 1
        assert repeats.numbers(np.array(part, np.uint64)) == expected


def test_rows_of_different_content_differ() -> None:
    rows: list[dict[str, Any]] = [
        {"value": b"a", "topic": "b", "key": None},
        {"value": b"a", "topic": "b", "key": "None"},
        {"value": b"a", "topic": "b", "key": ""},
        {"value": b"a", "topic": None, "key": "b"},
        {"value": b"b", "topic": "a", "key": None},
        {"value": b"a\0", "topic": "b", "key": None},
    ]
    assert len(set(content_hashes(columns(*rows)).tolist())) == len(rows)
    numbers = [{"value": b"a", "partition": number} for number in (None, 0, 1)]
    assert len(set(content_hashes(columns(*numbers)).tolist())) == 3
    pairs = [{"value": b"a", "headers": headers} for headers in (None, {"a": "b"}, {"b": "a"}, {"a": "b", "c": "d"})]
    assert len(set(content_hashes(columns(*pairs)).tolist())) == 4


def test_the_same_content_in_another_form_is_the_same() -> None:
    value = pa.array(["a", None], pa.string())
    expected = content_hashes({"value": value}).tolist()
    kinds = (pa.binary(), pa.large_string(), pa.large_binary())
    assert all(content_hashes({"value": value.cast(kind)}).tolist() == expected for kind in kinds)
    assert content_hashes({"value": value.dictionary_encode()}).tolist() == expected
    headers = [columns({"value": b"", "headers": pairs}) for pairs in ({"a": "b", "c": "d"}, {"c": "d", "a": "b"})]
    assert content_hashes(headers[0]).tolist() == content_hashes(headers[1]).tolist()
    # when a message was read does not matter
    read = pa.array([0, 0], pa.int32())
    assert content_hashes({"value": value, "attempts": read}).tolist() == expected


def test_a_row_without_its_position_may_be_in_another_task() -> None:
    ids = ContentIds("q/0", 2, "run")
    row = {"value": b"x", "topic": "t", "partition": 0, "offset": 1}
    assert ids.of_batch(columns(row), 0).task is None
    assert ids.of_batch(columns(row, {**row, "offset": None}), 1).task == "run/2"
    assert ids.of_batch(columns({"value": b"x", "topic": "t", "message_id": None}), 3).task == "run/2"
    assert ids.of_batch(columns({"value": b"x", "message_id": b"1"}), 4).task == "run/2", "topics have equal ids"


def test_descriptions_are_numbered_while_no_rows_are() -> None:
    """They are made in another thread: two rows of one number would be duplicates."""
    lock, held = Lock(), list[bool]()

    class Watched(Repeats):
        def numbers(self, hashes: Any) -> dict[int, int]:
            held.append(lock.locked())
            return super().numbers(hashes)

    ids = ContentIds("q/0", 2, "run", Watched(), lock)
    ids.of_batch(columns({"value": b"x"}), 0)
    assert ids.of_description(0, b"y").task == "run/2", "another task may have this row"
    assert held == [True, True]
    assert not lock.locked()
