"""Options as Spark hands them over."""

from __future__ import annotations

import pickle
import ssl
from pathlib import Path

import pytest
import trustme

from nsqext.errors import InvalidSetting
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.columns import ALL_COLUMNS, BASE_COLUMNS
from nsqext.spark.options import SinkOptions, SourceOptions, columns_of
from nsqext.spark.read.offsets import EARLIEST, LATEST, RangeLimit
from nsqext.spark.source import NsqDataSource

READ = {"lookupd": "a:4161, b:4161", "subscribe": "t"}
WRITE = {"lookupd": "a:4161"}
SECRET = "very-hidden"


def test_defaults_of_a_batch_read() -> None:
    options = SourceOptions.parse(READ)
    assert options == SourceOptions(ClientConfig(("a:4161", "b:4161"), {}, 60.0), {"t": None})
    assert (options.start, options.end, options.fail_on_data_loss) == (RangeLimit(EARLIEST), RangeLimit(LATEST), True)
    assert (options.arrow_batch_rows, options.rdy, options.read_mode) == (2000, 1000, "offset")


def test_names_have_no_case() -> None:
    given = {
        "LOOKUPD": "a:4161",
        "Assign": '{"t": [2, 0, 2], "u": [1]}',
        "startingtimestamp": "5",
        "ENDINGTIMESTAMP": "6",
        "minpartitions": "3",
        "maxRecordsPerPartition": "4",
        "failondataloss": "False",
        "includeHeaders": "TRUE",
        "readTimeoutMs": "1500",
        "arrowBatchRows": "7",
        "rdy": "8",
        "channel": "c",
    }
    options = SourceOptions.parse(given)
    assert options.topics == {"t": (0, 2), "u": (1,)}
    assert (options.start.number, options.end.number, options.start.timed, options.end.timed) == (5, 6, True, True)
    assert (options.min_partitions, options.max_records_per_partition) == (3, 4)
    assert (options.fail_on_data_loss, options.columns) == (False, ALL_COLUMNS)
    assert (options.read_timeout, options.client.timeout) == (1.5, 1.5)
    assert (options.arrow_batch_rows, options.rdy, options.channel) == (7, 8, "c")


def test_a_stream_is_read() -> None:
    given = {**READ, "channel": "c", "maxOffsetsPerTrigger": "9", "resetChannel": "true", "startingOffsets": "earliest"}
    options = SourceOptions.parse(given, streaming=True)
    assert (options.channel, options.max_offsets_per_trigger, options.reset_channel) == ("c", 9, True)
    assert (options.start.number, options.start.timed) == (EARLIEST, False)
    assert SourceOptions.parse({**READ, "channel": "c"}, streaming=True).start.is_latest


def test_values_may_have_spaces_and_choices_have_no_case() -> None:
    options = SourceOptions.parse({**READ, "channel": " c ", "readMode": " CHANNEL "}, streaming=True)
    assert (options.channel, options.read_mode) == ("c", "channel")


def test_the_limits_of_values_are_accepted() -> None:
    given = {**READ, "rdy": "2500", "startingTimestamp": "5", "endingTimestamp": "5"}
    options = SourceOptions.parse(given)
    assert (options.rdy, options.start.number, options.end.number) == (2500, 5, 5)
    given = {**READ, "channel": "c", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "5"}
    options = SourceOptions.parse(given, streaming=True)
    assert (options.min_offsets_per_trigger, options.max_offsets_per_trigger) == (5, 5)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30 s", 30), ("1m", 60), ("2min", 120), ("1H", 3600), ("1d", 86400)]
)
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    given = {**READ, "channel": "c", "minOffsetsPerTrigger": "5", "maxTriggerDelay": text}
    assert SourceOptions.parse(given, streaming=True).max_trigger_delay == seconds


def test_options_that_spark_adds_to_tables_are_ignored() -> None:
    given = {**READ, "serialization.format": "1", "provider": "nsqext", "path": "/warehouse/orders"}
    assert SourceOptions.parse(given) == SourceOptions.parse(READ)


def test_a_pattern_of_topics() -> None:
    options = SourceOptions.parse({"lookupd": "a:1", "subscribePattern": "orders_.*"})
    assert (options.topics, options.subscribe_pattern) == ({}, "orders_.*")
    with pytest.raises(InvalidSetting, match="it is not a regular expression"):
        SourceOptions.parse({"lookupd": "a:1", "subscribePattern": "("})


def test_duplicate_topics_are_removed() -> None:
    assert list(SourceOptions.parse({**READ, "subscribe": "b, a,,b "}).topics) == ["b", "a"]


def test_options_added_by_spark_are_ignored() -> None:
    given = {**WRITE, "checkpointLocation": "/tmp/c", "queryName": "q"}
    assert SinkOptions.parse(given) == SinkOptions(ClientConfig(("a:4161",)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"subscibe": "t"}, "option subscibe is unknown: do you mean subscribe?"),
        ({"zzz": "t"}, "option zzz is unknown: known options: arrowBatchRows, assign"),
        ({"topic": "t"}, "option topic cannot be used to read: it belongs to write options"),
        ({"path": "t"}, "topics have no path"),
        ({"lookupd": ""}, "option lookupd='' is invalid: it is empty"),
        ({"lookupd": "here:"}, "'here:' is not an address"),
        ({"subscribe": ","}, "it names no topic"),
        ({"subscribe": "a b"}, "option subscribe='a b' is invalid"),
        ({"assign": '{"t": [0]}'}, "options subscribe and assign contradict each other"),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "startingOffsets and startingTimestamp"),
        ({"endingOffsets": "latest", "endingTimestamp": "1"}, "endingOffsets and endingTimestamp"),
        ({"maxOffsetsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "maxOffsetsPerTrigger and maxBytesPerTrigger"),
        ({"startingTimestamp": "2", "endingTimestamp": "1"}, "endingTimestamp=1 is before startingTimestamp=2"),
        ({"startingTimestamp": "-1"}, "it is less than 0"),
        ({"subscribePattern": "t.*"}, "options subscribe and subscribePattern contradict each other"),
        ({"columns": "body"}, "option columns='body' is invalid: 'body' is not one of value, topic"),
        ({"columns": ","}, "it names no column"),
        ({"columns": "value", "includeHeaders": "true"}, "options columns and includeHeaders contradict each other"),
        ({"headersFormat": "array"}, "option headersFormat has no effect without headers"),
        ({"headersFormat": "array", "columns": "value"}, "option headersFormat has no effect without headers"),
        ({"maxTasks": "0"}, "it is less than 1"),
        ({"startingTimestamp": "1", "startingOffsetsByTimestamp": "{}"}, "startingTimestamp and startingOffsetsByTime"),
        ({"minPartitions": "0"}, "it is less than 1"),
        ({"minPartitions": "many"}, "option minPartitions='many' is invalid: write a whole number"),
        ({"rdy": "2501"}, "it is not within 1..2500"),
        ({"failOnDataLoss": "maybe"}, "write true or false"),
        ({"readTimeoutMs": "0"}, "it is less than 1"),
        ({"channel": "c#ephemeral"}, "an ephemeral channel keeps no position"),
        ({"maxOffsetsPerTrigger": "1"}, "option maxOffsetsPerTrigger is for streaming reads only"),
        ({"maxBytesPerTrigger": "1"}, "option maxBytesPerTrigger is for streaming reads only"),
        ({"readMode": "channel"}, "option readMode is for streaming reads only"),
        ({"nsqext.tlss": "true"}, "do you mean nsqext.tls?"),
        ({"nsqext.on_unknown": "raise"}, "nsqext.on_unknown cannot be used to read: it belongs to write"),
        ({"nsqext.max_in_flight": "7"}, "option nsqext.max_in_flight is unknown"),
        ({"nsqext.connect_timeout": "soon"}, "option nsqext.connect_timeout='soon' cannot be"),
        ({"nsqext.connect_timeout": "-1"}, "option nsqext.connect_timeout=-1.0 is not a p"),
        ({"nsqext.lookup_poll_jitter": "2"}, "option nsqext.lookup_poll_jitter=2.0 is not within 0..1"),
        ({"nsqext.tls": "/no/such/file"}, "write true, false, or a file of certificates"),
    ],
)
def test_a_batch_read_is_refused(change: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        SourceOptions.parse({**READ, **change})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lookupd": "a:1"}, "no topic is given: use one of the options subscribe, subscribePattern and assign"),
        ({"subscribe": "t"}, "option lookupd is missing"),
        ({"lookupd": "a:1", "assign": "[]"}, 'write {"topic": [0, 1]}'),
        ({"lookupd": "a:1", "assign": "t:0"}, "it is not JSON"),
        ({"lookupd": "a:1", "assign": '{"t": []}'}, "topic 't' has no list of partitions"),
        ({"lookupd": "a:1", "assign": '{"t": [-1]}'}, "option assign"),
    ],
)
def test_the_topics_to_read_are_required(given: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        SourceOptions.parse(given)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "option channel is missing"),
        ({"channel": "c", "endingOffsets": "latest"}, "option endingOffsets is for batch reads only"),
        (
            {"channel": "c.setup"},
            "option channel='c.setup' is invalid: the source itself uses channels that end with .setup",
        ),
        ({"channel": "c", "readMode": "both"}, "write offset or channel"),
        ({"channel": "c", "maxTriggerDelay": "5m"}, "maxTriggerDelay has no effect without minOffsetsPerTrigger"),
        ({"channel": "c", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "write a number and a unit"),
        (
            {"channel": "c", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"},
            "minOffsetsPerTrigger=5 is more than maxOffsetsPerTrigger=4",
        ),
        ({"channel": "c", "maxBytesPerTrigger": str(1 << 63)}, "option maxBytesPerTrigger="),
        ({"channel": "c", "maxOffsetsPerTrigger": str(1 << 63)}, "option maxOffsetsPerTrigger="),
        ({"channel": "c", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "0s"}, "write a number and a unit"),
        ({"channel": "c", "resetChannel": "true"}, "resetChannel cannot start at the latest message"),
        ({"channel": "c", "readMode": "channel", "failOnDataLoss": "true"}, "failOnDataLoss contradicts readMode"),
        ({"channel": "c", "readMode": "channel", "maxBytesPerTrigger": "2"}, "maxBytesPerTrigger contradicts readMode"),
        ({"channel": "c", "readMode": "channel", "minPartitions": "2"}, "minPartitions contradicts readMode=channel"),
        ({"channel": "c", "readMode": "channel", "resetChannel": "true"}, "resetChannel contradicts readMode=channel"),
        ({"channel": "c", "readMode": "channel", "arrowBatchRows": "9"}, "arrowBatchRows contradicts readMode=channel"),
    ],
)
def test_a_streaming_read_is_refused(change: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        SourceOptions.parse({**READ, **change}, streaming=True)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"subscribe": "t"}, "option subscribe cannot be used to write: it belongs to read options"),
        ({"topic": "a b"}, "option topic"),
        ({"idempotenceHeader": "##own"}, "is reserved"),
        ({"idempotenceHeader": "a b"}, "is not valid"),
        ({"ackBatchBytes": "6000000"}, "is more than servers accept in one batch"),
        ({"nsqext.decompress": "true"}, "decompress cannot be used to write: it belongs to read"),
        ({"nsqext.on_unknown": "perhaps"}, "on_unknown='perhaps'"),
        ({"badRows": "topic"}, "option badRowsTopic is missing"),
        ({"badRows": "table"}, "option badRows='table' is invalid: write fail or topic"),
        ({"badRowsTopic": "bad"}, "option badRowsTopic has no effect without badRows=topic"),
        ({"topic": "t", "badRows": "topic", "badRowsTopic": "t"}, "options topic and badRowsTopic are both t"),
    ],
)
def test_a_write_is_refused(change: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        SinkOptions.parse({**WRITE, **change})
    assert expected in str(caught.value)


def test_the_schema_needs_one_option_only() -> None:
    assert columns_of({"INCLUDEHEADERS": "true"}) == (ALL_COLUMNS, False)
    assert columns_of({"includeHeaders": "true", "headersFormat": "array"}) == (ALL_COLUMNS, True)
    assert columns_of({"subscribe": "t"}) == (BASE_COLUMNS, False)
    assert columns_of({"columns": "Offset, value"}) == (("value", "offset"), False)
    with pytest.raises(InvalidSetting, match="includeHeaders"):
        columns_of({"includeHeader": "true"})


def test_settings_reach_the_client(tmp_path: Path) -> None:
    authority = trustme.CA()
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(file)
    given = {
        **WRITE,
        "ackBatchBytes": "6000000",
        "nsqext.tls": str(file),
        "nsqext.auth_secret": SECRET,
        "nsqext.connect_timeout": "1.5",
        "nsqext.lookup_request_timeout": "3",
        "nsqext.max_batch_size": "7000000",
        "nsqext.on_unknown": "raise",
    }
    options: SinkOptions = pickle.loads(pickle.dumps(SinkOptions.parse(given)))  # noqa: S301 (our own bytes)
    producer = options.client.producer()
    assert (producer.on_unknown, producer.max_batch_size, producer.timeout) == ("raise", 7_000_000, 30.0)
    assert producer.connection.tls_context() is not None
    assert (producer.connection.auth_secret, producer.connection.connect_timeout) == (SECRET, 1.5)
    assert producer.lookup.request_timeout == options.client.consumer().lookup.request_timeout == 3.0
    assert options.client.consumer().connection.connect_timeout == 1.5
    assert SECRET not in repr(options)
    assert "***" in repr(options)


def test_a_secret_is_not_shown_in_errors() -> None:
    with pytest.raises(InvalidSetting) as caught:
        SourceOptions.parse({**READ, "nsqext.connection_auth_secrets": SECRET})
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidSetting) as caught:
        SourceOptions.parse({**READ, "lookupd": f"user:{SECRET}@host"})
    assert SECRET not in str(caught.value)


def test_bodies_are_restored_unless_it_is_turned_off() -> None:
    assert SourceOptions.parse(READ).client.consumer().delivery.decompress
    assert not SourceOptions.parse({**READ, "nsqext.decompress": "false"}).client.consumer().delivery.decompress


def test_a_start_by_time_needs_a_time_for_its_strategy() -> None:
    assert SourceOptions.parse(READ).starting_offsets_by_timestamp_strategy == "latest"
    timed = {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "error"}
    assert SourceOptions.parse({**READ, **timed}).starting_offsets_by_timestamp_strategy == "error"
    with pytest.raises(InvalidSetting, match="no effect without a time"):
        SourceOptions.parse({**READ, "startingOffsetsByTimestampStrategy": "error"})


def test_a_channel_is_continued_or_reset() -> None:
    given = {**READ, "channel": "c", "startingOffsets": "earliest", "existingChannel": "continue"}
    assert SourceOptions.parse(given, streaming=True).existing_channel == "continue"
    with pytest.raises(InvalidSetting, match="existingChannel and resetChannel contradict"):
        SourceOptions.parse({**given, "resetChannel": "true"}, streaming=True)


def test_a_job_names_the_rows_of_a_batch() -> None:
    assert SinkOptions.parse({**WRITE, "job": "day 1"}).job == "day 1"
    with pytest.raises(InvalidSetting, match="option job is for batch writes only"):
        SinkOptions.parse({**WRITE, "job": "day 1"}, streaming=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kafka.bootstrap.servers", "option kafka.bootstrap.servers belongs to Kafka: use lookupd"),
        ("groupidprefix", "option groupIdPrefix belongs to Kafka: use channel"),
        ("kafka.ssl.keystore.location", "belongs to Kafka: use nsqext. and a setting of the client"),
        ("StartingOffset", "option StartingOffset is unknown: do you mean startingOffsets?"),
    ],
)
def test_names_of_kafka_are_explained(name: str, expected: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        SourceOptions.parse({**READ, name: "x"})
    assert expected in str(caught.value)
    with pytest.raises(InvalidSetting, match=r"belongs to|unknown"):
        SinkOptions.parse({**WRITE, name: "x"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"subscribe": "t"}, "option lookupd is missing"),
        ({"lookupd": "a:1"}, "no topic is given"),
        ({"maxOffsetsPerTrigger": "5"}, "option channel is missing"),
        ({"subscribe": "t", "assign": '{"t": [0]}'}, "options subscribe and assign contradict"),
        ({"startingOffsets": "newest"}, "startingOffsets='newest' is invalid"),
        ({"readMode": "channel", "channel": "c", "assign": '{"t": [0]}'}, "contradict"),
        ({"endingOffsets": "latest", "readMode": "offset", "channel": "c"}, "option endingOffsets is for batch reads"),
    ],
)
def test_a_wrong_query_is_refused_when_it_is_loaded(given: dict[str, str], expected: str) -> None:
    known = READ if not {"subscribe", "lookupd"} & given.keys() else {}
    if "assign" in given:
        known = READ
    with pytest.raises(InvalidSetting) as caught:
        NsqDataSource({**known, **given}).schema()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "given", [{}, {"channel": "c"}, {"channel": "c", "readMode": "channel"}, {"startingOffsets": "latest"}]
)
def test_a_query_is_loaded(given: dict[str, str]) -> None:
    assert NsqDataSource({**READ, **given}).schema().fieldNames() == list(BASE_COLUMNS)


def test_the_case_of_an_option_of_the_other_kind_does_not_matter() -> None:
    with pytest.raises(InvalidSetting, match="option ackBatchBytes cannot be used to read"):
        SourceOptions.parse({**READ, "ACKBATCHBYTES": "1"})


def test_settings_to_read_are_checked_before_anything_is_read() -> None:
    config = ClientConfig(("127.0.0.1:1",), {"decompress": "maybe"})
    with pytest.raises(InvalidSetting, match=r"option nsqext\.decompress"):
        config.check("read")


def test_settings_of_programs_are_used_as_they_are() -> None:
    """Those of `nsqext.arrow` are no text."""
    context = ssl.create_default_context()
    assert ClientConfig(("127.0.0.1:1",), {"tls": context}).consumer().connection.tls is context
