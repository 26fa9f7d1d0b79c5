"""The page of Spark's options and columns lists exactly the existing ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import attrs
import pytest

from tests.support.programs import ROOT

pytest.importorskip("pyspark", exc_type=ImportError)

from nsqext.spark import columns, options
from nsqext.spark.columns import ALL_COLUMNS

_PAGE = (ROOT / "docs" / "reference" / "spark.md").read_text(encoding="utf-8")
_SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", _PAGE, re.MULTILINE | re.DOTALL))


def rows(section: str) -> dict[str, list[str]]:
    """Return the rows of a section's table by their first cell."""
    lines = re.findall(r"^\| `(\S+)` \|(.*)\|$", _SECTIONS[section], re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in lines}


def names(found: Iterable[options.SparkOption]) -> set[str]:
    """Return the options' names."""
    return {option.name for option in found}


def test_options_to_read() -> None:
    page = rows("Options to read")
    assert page.keys() == names(options.SOURCE_OPTIONS)
    assert {name for name, cells in page.items() if cells[0] == "no"} == set(options.STREAM_ONLY)
    assert {name for name, cells in page.items() if cells[1] == "no"} == set(options.BATCH_ONLY)


def test_options_to_write() -> None:
    assert rows("Options to write").keys() == names(options.SINK_OPTIONS)


def test_each_default_is_written_as_the_option_accepts_it() -> None:
    given = {**rows("Options to read"), **rows("Options to write")}
    shown = {name: cells[-2].strip("`") for name, cells in given.items()}
    found = {
        **_defaults(options.SourceOptions, options.SOURCE_OPTIONS),
        **_defaults(options.SinkOptions, options.SINK_OPTIONS),
    }
    assert {option.name: option.read(shown[option.name]) for option in found} == {
        option.name: default for option, default in found.items()
    }


def _defaults(kind: type[attrs.AttrsInstance], known: Iterable[options.SparkOption]) -> dict[options.SparkOption, Any]:
    """Return the defaults of options that have one."""
    defaults = {member.name: member.default for member in attrs.fields(kind)}
    found = {option: defaults.get(option.member, attrs.NOTHING) for option in known}
    return {option: value for option, value in found.items() if isinstance(value, (bool, int, float, str))}


def test_options_that_a_mode_ignores_are_listed() -> None:
    sentence = re.search(r"`readMode=channel` cannot be combined with (.*?)\.", _SECTIONS["Options to read"], re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(options.OFFSET_ONLY)


def test_columns_that_are_read() -> None:
    kinds = {name: cells[0] for name, cells in rows("Columns that are read").items()}
    assert kinds == {found.name: found.dataType.simpleString() for found in columns.read_schema(ALL_COLUMNS)}


def test_columns_that_are_written() -> None:
    kinds = {name: cells[0] for name, cells in rows("Columns that are written").items()}
    assert kinds == {name: columns.written_type(name) for name in columns.WRITABLE}


_TESTS = {
    "addresses": "tests/spark/test_options.py::test_names_of_kafka_are_explained",
    "names of options": "tests/spark/test_options.py::test_names_have_no_case",
    "settings of the client": "tests/spark/test_options.py::test_settings_reach_the_client",
    "consumer group": "tests/spark/test_options.py::test_a_streaming_read_is_refused",
    "size of a micro-batch": "tests/spark/read/test_stream.py::test_a_batch_waits_for_a_number_of_messages",
    "`availableNow`": "tests/spark/read/test_stream.py::test_a_frozen_query_ends_where_it_was_frozen",
    "tasks": "tests/spark/read/test_batch.py::test_ranges_are_cut_and_can_be_sent",
    "truncated or recreated topic": "tests/spark/read/test_truncation.py::test_a_log_that_regrows_while_the_query_runs",
    "new checkpoint": "tests/spark/read/test_anchor.py::test_a_channel_is_not_where_a_new_checkpoint_wants_to_begin",
    "new partitions, new topics of a pattern": (
        "tests/spark/read/test_stream_servers.py::test_a_partition_that_is_added"
    ),
    "deleted topic": "tests/spark/read/test_stream_servers.py::test_a_topic_that_is_deleted_while_queries_run",
    "start by time, no such message": "tests/spark/read/test_anchor.py::test_a_time_for_each_partition",
    "several starts": "tests/spark/test_options.py::test_a_batch_read_is_refused",
    "end of a batch": "tests/spark/test_kafka_cases.py::test_a_dataframe_keeps_the_end_of_its_first_read",
    "self-joins, several queries of a DataFrame": (
        "tests/spark/read/test_planner_lock.py::test_a_self_join_names_what_it_needs"
    ),
    "a DataFrame twice in a batch job": "tests/spark/test_kafka_cases.py::test_a_dataframe_is_read_twice_in_one_job",
    "headers": "tests/spark/test_schema.py::test_rows_can_be_written_as_they_were_read",
    "key": "tests/spark/write/test_sink.py::test_columns_become_messages",
    "offsets of a partition": "tests/spark/read/test_planning.py::test_batches_together_read_everything_once",
    "errors of options": "tests/spark/test_options.py::test_a_wrong_query_is_refused_when_it_is_loaded",
    "lag": "tests/spark/read/test_streaming.py::test_metrics_as_the_page_shows_them",
    "rows in the progress": "tests/spark/test_kafka_cases.py::test_progress_of_a_stream_that_is_read_and_written",
    "real-time mode (Spark 4.1)": "tests/spark/read/test_streaming.py::test_spark_refuses_real_time_mode",
    "continuous processing": "tests/spark/test_kafka_cases.py::test_spark_refuses_continuous_processing",
    "write: topic": "tests/spark/write/test_row_mapper.py::test_the_option_topic_wins_over_the_column",
    "write: topic that does not exist": (
        "tests/spark/write/test_bad_rows.py::test_a_topic_that_does_not_exist_fails_the_task"
    ),
    "write: partition": "tests/spark/write/test_sink.py::test_keys_and_partitions_keep_their_order",
    "write: wrong types of columns": (
        "tests/spark/test_kafka_cases.py::test_columns_of_wrong_types_fail_before_a_row_is_written"
    ),
    "write: null value": "tests/spark/write/test_bad_rows.py::test_without_the_option_the_task_fails",
    "write: delivery": "tests/spark/write/test_sink.py::test_dedupe_removes_rows_of_a_second_attempt",
    "write: output modes of streams": "tests/spark/write/test_sink.py::test_a_complete_result_is_published_each_time",
    "write: save mode": "tests/spark/write/test_sink.py::test_spark_refuses_its_default_save_mode",
    "write: repeated batch": "tests/spark/write/test_sink.py::test_a_job_that_is_run_again_publishes_the_same_ids",
    "write: rate": "tests/spark/write/test_pacing.py::test_a_task_publishes_at_the_rate_of_the_option",
    "write: rows that cannot be published": "tests/spark/write/test_bad_rows.py::test_bad_rows_are_described",
    "`transformWithState`": "tests/spark/read/test_state.py::test_state_of_keys_is_kept_over_a_restart",
    "async progress tracking": "tests/spark/test_kafka_cases.py::test_async_progress_tracking_is_for_sinks_of_spark",
    "sinks: Delta, Iceberg": "tests/spark/test_iceberg.py::test_each_message_is_in_the_table_once_after_kills",
    "Spark Connect": (
        "tests/spark/test_shipped_source.py::test_processes_without_the_package_load_the_source_its_readers_and_writers"
    ),
    "tables in SQL": "tests/spark/test_schema.py::test_a_table_is_read_and_written_with_its_options",
}
"""The test that shows each row of the table against the Kafka connector."""


def test_each_row_against_kafka_has_a_test() -> None:
    lines = re.findall(r"^\| (.+?) \|(?:.*\|){2}$", _SECTIONS["Compared with the Kafka connector"], re.MULTILINE)
    assert lines[1:] == list(_TESTS)
    for test in _TESTS.values():
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_tests_that_the_page_about_the_kafka_suites_names() -> None:
    page = (ROOT / "docs/reference/spark-kafka.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", page))
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "tests/spark" / name).exists()] == []
