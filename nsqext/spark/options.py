"""Options of ``spark.read/readStream/write/writeStream.format("nsqext")``.

Spark passes them as text, with names in lower case. Unknown, invalid and contradictory options raise before any
connection. Names that begin with ``nsqext.`` are client settings, see `ClientConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import attrs
from attrs import frozen

from nsqext.errors import InvalidSetting
from nsqext.lookup.options import parse_lookup_addresses
from nsqext.protocol.messages import IDENTITY_HEADER
from nsqext.protocol.names import check_topic
from nsqext.spark.cluster.admin import MARK
from nsqext.spark.cluster.client_config import PREFIX, ClientConfig, client_settings, wrong_option
from nsqext.spark.columns import ALL_COLUMNS, BASE_COLUMNS, Columns
from nsqext.spark.option_values import (
    kafka_hint,
    read_assignment,
    read_bool,
    read_channel,
    read_choice,
    read_columns,
    read_duration,
    read_header,
    read_number,
    read_pattern,
    read_seconds,
    read_text,
    read_topics,
)
from nsqext.spark.read.offsets import (
    EARLIEST,
    LATEST,
    RangeLimit,
    parse_ending,
    parse_starting,
    parse_time,
    parse_times,
)

ID_HEADER = IDENTITY_HEADER
"""Default header for the id of a row."""

_MAX_RDY = 2500
_SHOWN = 120
_EARLIEST, _LATEST = RangeLimit(EARLIEST), RangeLimit(LATEST)
_LONG = (1 << 63) - 1  # Spark keeps limits of micro-batches as Java longs

# options that Spark adds to queries and tables (CREATE TABLE … USING nsqext)
_OF_SPARK = frozenset({"checkpointlocation", "queryname", "serialization.format", "owner", "provider"})
TABLE_OPTION = "provider"
"""Option that Spark adds for tables."""
_TABLE_PREFIX = "option."  # Spark repeats each table option with this prefix
_OF_SPARK_PREFIXES = ("__", _TABLE_PREFIX, "spark.")


@frozen
class SparkOption:
    """An option of the source or the sink."""

    read: Callable[[str], Any]
    only: Literal["batch", "stream"] | None = None  #: kind of query with this option; None for both
    of_ranges: bool = False  #: not in `readMode=channel`
    name: str = ""  #: in the documentation; by default the attribute in camel case
    member: str = ""


def _option(
    default: Any, read: Callable[[str], Any], only: Literal["batch", "stream"] | None = None, **more: Any
) -> Any:
    return attrs.field(default=default, metadata={SparkOption: SparkOption(read, only, **more)})


def _options_of(kind: type, **others: SparkOption) -> tuple[SparkOption, ...]:
    declared = {
        field.name: field.metadata[SparkOption] for field in attrs.fields(kind) if SparkOption in field.metadata
    }
    return tuple(
        attrs.evolve(
            option, member=member, name=option.name or re.sub("_([a-z])", lambda found: found[1].upper(), member)
        )
        for member, option in {**others, **declared}.items()
    )


def _unknown(name: str, kind: str) -> InvalidSetting:
    kafka = kafka_hint(name)
    if kafka is not None:
        return InvalidSetting(f"option {kafka[0]} belongs to Kafka", hint=kafka[1])
    known, others = ([option.name for option in _NAMES[one]] for one in (kind, _OTHER[kind]))
    return wrong_option(name, kind, known, others)


def _read_all(given: Mapping[str, str], kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of options by attribute, and the client settings as text."""
    known = {option.name.lower(): option for option in _NAMES[kind]}
    values: dict[str, Any] = {}
    settings: dict[str, str] = {}
    for key, text in given.items():
        name = key.lower()
        if name.startswith(PREFIX):
            settings[name.removeprefix(PREFIX)] = text
        elif name in known:
            option = known[name]
            try:
                values[option.member] = option.read(str(text).strip())
            except ValueError as error:
                shown = str(text).rpartition("@")[2][:_SHOWN]  # the part before an @ may be a secret
                raise InvalidSetting(f"option {option.name}={shown!r} is invalid: {error}") from None
        elif name == "path" and TABLE_OPTION not in {other.lower() for other in given}:
            raise InvalidSetting(f"path {text!r}: topics have no path", hint="use the option subscribe, or topic")
        elif name not in {*_OF_SPARK, "path"} and not name.startswith(_OF_SPARK_PREFIXES):
            raise _unknown(key, kind)
    return values, settings


def _client_config(values: dict[str, Any], settings: dict[str, str], kind: str) -> ClientConfig:
    lookupd = values.pop("lookupd", None)
    if lookupd is None:
        raise InvalidSetting("option lookupd is missing", hint="give nsqlookupd's HTTP address, host:port")
    config = ClientConfig(tuple(map(str, lookupd)), settings)
    config.check(kind)
    return config


def table_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return a table's options (CREATE TABLE … USING nsqext OPTIONS) from its properties."""
    if "location" in given:
        raise InvalidSetting(f"location {given['location']!r}: topics have no path", hint="use the option subscribe")
    return {name: value for name, value in given.items() if f"{_TABLE_PREFIX}{name}" in given}


def names_by_keyword(kind: str) -> dict[str, str]:
    """Return the names of options to read or write, by Python keyword."""
    return {option.member: option.name for option in _NAMES[kind]}


def _names(kind: str) -> frozenset[str]:
    return frozenset(option.name.lower() for option in _NAMES[kind])


def of_table(given: Mapping[str, str], kind: Literal["read", "write"]) -> dict[str, str]:
    """Return a table's options for reading or writing."""
    others = _names(_OTHER[kind]) - _names(kind)
    others |= {f"{PREFIX}{name}" for name in client_settings(_OTHER[kind]).keys() - client_settings(kind).keys()}
    return {name: value for name, value in given.items() if name.lower() not in others}


def columns_of(given: Mapping[str, str]) -> tuple[Columns, bool]:
    """Return the columns of read rows, and whether headers are an array."""
    values, _ = _read_all(given, "read")
    return _columns(values)


def check_load(given: Mapping[str, str]) -> None:
    """Check a query's options at its load, when batch or stream is unknown."""
    names = {name.lower() for name in given}
    SourceOptions.load(given, streaming=any(name.lower() in names for name in STREAM_ONLY))


def _columns(values: Mapping[str, Any]) -> tuple[Columns, bool]:
    as_array = values.get("headers_format") == "array"
    if as_array and not (values.get("include_headers") or "headers" in values.get("columns", ())):
        raise InvalidSetting("option headersFormat has no effect without headers", hint="add includeHeaders=true")
    if "columns" in values:
        if values.get("include_headers") and "headers" not in values["columns"]:
            raise InvalidSetting(
                "options columns and includeHeaders contradict each other", hint="add headers to columns"
            )
        return values["columns"], as_array
    return (ALL_COLUMNS if values.get("include_headers") else BASE_COLUMNS), as_array


@frozen
class SourceOptions:
    """Options of a read, in seconds and bytes; see docs/reference/spark.md."""

    client: ClientConfig  #: its `timeout` is `readTimeoutMs`, in seconds
    topics: Mapping[str, tuple[int, ...] | None]  #: partitions by topic; None for all
    #: regular expression for names of topics, instead of `topics`
    subscribe_pattern: str | None = _option(None, read_pattern, of_ranges=True)
    columns: tuple[str, ...] = _option(BASE_COLUMNS, read_columns)
    #: the column `headers` is an array of key and value (binary), as in Kafka's source
    headers_as_array: bool = False
    channel: str | None = _option(None, read_channel)
    start: RangeLimit = _EARLIEST  #: where reading begins; for streams by default at the latest message
    end: RangeLimit = _LATEST  #: where reading ends, exclusive
    max_offsets_per_trigger: int | None = _option(None, read_number(1, _LONG), "stream")
    max_bytes_per_trigger: int | None = _option(None, read_number(1, _LONG), "stream", of_ranges=True)
    min_offsets_per_trigger: int | None = _option(None, read_number(1, _LONG), "stream", of_ranges=True)
    max_trigger_delay: float = _option(900.0, read_duration, "stream", of_ranges=True)
    min_partitions: int | None = _option(None, read_number(1), of_ranges=True)
    max_tasks: int = _option(256, read_number(1), of_ranges=True)
    min_messages_per_task: int = _option(100_000, read_number(1), of_ranges=True)
    max_records_per_partition: int | None = _option(None, read_number(1), of_ranges=True)
    fail_on_data_loss: bool = _option(True, read_bool, of_ranges=True)
    read_mode: Literal["offset", "channel"] = _option("offset", read_choice("offset", "channel"), "stream")
    reset_channel: bool = _option(False, read_bool, "stream", of_ranges=True)
    #: what a query with a new checkpoint does at a channel that is not where the options begin; None raises an error
    existing_channel: Literal["continue"] | None = _option(None, read_choice("continue"), "stream", of_ranges=True)
    #: where a partition begins that has no message since its time
    starting_offsets_by_timestamp_strategy: Literal["error", "latest"] = _option(
        "latest", read_choice("error", "latest"), of_ranges=True
    )
    read_timeout: float = _option(60.0, read_seconds, name="readTimeoutMs")
    arrow_batch_rows: int = _option(2000, read_number(1, 1_000_000), of_ranges=True)
    rdy: int = _option(1000, read_number(1, _MAX_RDY))

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool = False) -> Self:
        options = cls.load(given, streaming=streaming)
        if options.start.is_latest and not streaming:
            raise InvalidSetting(
                "startingOffsets cannot be latest in a batch: the batch would be empty",
                hint="write earliest, or numbers",
            )
        if options.start.is_latest and options.reset_channel:
            raise InvalidSetting(
                "resetChannel cannot start at the latest message: after a crash in its first batch, a restarted query "
                "would skip the messages that were published in between",
                hint="use startingOffsets with earliest or numbers, a startingTimestamp, or a new channel",
            )
        return options

    @classmethod
    def load(cls, given: Mapping[str, str], *, streaming: bool) -> Self:
        """Return a query's options while it may still become a stream."""
        values, settings = _read_all(given, "read")
        present = {option.name for option in SOURCE_OPTIONS if option.member in values}
        _check_source(present, values, streaming)
        client = _client_config(values, settings, "read")
        values["columns"], as_array = _columns(values)
        values.pop("include_headers", None)
        values.pop("headers_format", None)
        start = _limit(values, _STARTS, _LATEST if streaming else _EARLIEST)
        end = _limit(values, _ENDS, _LATEST)
        if start.timed and end.timed and (end.number or start.number or 0) < (start.number or 0):
            raise InvalidSetting(f"{end.option}={end.number} is before {start.option}={start.number}")
        subscribed = dict.fromkeys(values.pop("subscribe", ()))
        topics: Mapping[str, tuple[int, ...] | None] = values.pop("assign", subscribed)
        options = cls(client=client, topics=topics, headers_as_array=as_array, start=start, end=end, **values)
        return attrs.evolve(options, client=attrs.evolve(client, timeout=options.read_timeout))


def _check_source(present: set[str], values: Mapping[str, Any], streaming: bool) -> None:
    for group in _EXCLUDING:
        one, *others = [name for name in group if name in present] or [""]
        if others:
            raise InvalidSetting(f"options {one} and {others[0]} contradict each other", hint="use one of them")
    if not present & {"subscribe", "subscribePattern", "assign"}:
        raise InvalidSetting("no topic is given", hint="use one of the options subscribe, subscribePattern and assign")
    for name in BATCH_ONLY if streaming else STREAM_ONLY:
        if name in present:
            kind = "batch" if streaming else "streaming"
            raise InvalidSetting(f"option {name} is for {kind} reads only", hint="remove it")
    if streaming and "channel" not in present:
        raise InvalidSetting(
            "option channel is missing",
            hint="a streaming read needs the name of a channel of its own, which retains messages until they are read",
        )
    if values.get("read_mode") == "channel":
        for name in OFFSET_ONLY:
            if name in present:
                raise InvalidSetting(f"option {name} contradicts readMode=channel", hint="remove one of them")
    elif streaming and values["channel"].endswith(MARK):
        raise InvalidSetting(
            f"option channel={values['channel']!r} is invalid: the source itself uses channels that end with {MARK}"
        )
    if "existingChannel" in present and values.get("reset_channel"):
        raise InvalidSetting("options existingChannel and resetChannel contradict each other", hint="use one of them")
    timed = {"startingTimestamp", "startingOffsetsByTimestamp"}
    if "startingOffsetsByTimestampStrategy" in present and not present & timed:
        raise InvalidSetting("option startingOffsetsByTimestampStrategy has no effect without a time to start at")
    if "maxTriggerDelay" in present and "minOffsetsPerTrigger" not in present:
        raise InvalidSetting("option maxTriggerDelay has no effect without minOffsetsPerTrigger")
    most, least = values.get("max_offsets_per_trigger"), values.get("min_offsets_per_trigger")
    if most is not None and least is not None and least > most:
        raise InvalidSetting(f"minOffsetsPerTrigger={least} is more than maxOffsetsPerTrigger={most}")


def _limit(values: dict[str, Any], members: Iterable[str], default: RangeLimit) -> RangeLimit:
    """Return where reading begins or ends: the given option's value, or the default."""
    names = names_by_keyword("read")
    found = [attrs.evolve(values.pop(member), option=names[member]) for member in members if member in values]
    return found[0] if found else default


@frozen
class SinkOptions:
    """Options of a write; see docs/reference/spark.md."""

    client: ClientConfig
    topic: str | None = _option(None, check_topic)
    idempotence_header: str = _option(ID_HEADER, read_header)
    ack_batch_bytes: int = _option(1 << 20, read_number(1))
    max_rows_per_second: int | None = _option(None, read_number(1))
    bad_rows_topic: str | None = _option(None, check_topic)
    job: str | None = _option(None, read_text, "batch")  #: first part of the ids of rows

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool = False) -> Self:
        values, settings = _read_all(given, "write")
        if streaming and "job" in values:
            raise InvalidSetting(
                "option job is for batch writes only",
                hint="remove it: the ids of a stream contain the id of its query and the number of the micro-batch",
            )
        client = _client_config(values, settings, "write")
        bad_rows, bad_topic = values.pop("bad_rows", "fail"), values.get("bad_rows_topic")
        if bad_rows == "topic" and bad_topic is None:
            raise InvalidSetting("option badRowsTopic is missing", hint="badRows=topic needs a topic for them")
        if bad_rows == "fail" and bad_topic is not None:
            raise InvalidSetting("option badRowsTopic has no effect without badRows=topic")
        if bad_topic is not None and bad_topic == values.get("topic"):
            raise InvalidSetting(f"options topic and badRowsTopic are both {bad_topic}", hint="use another topic")
        options = cls(client=client, **values)
        largest = client.producer().max_batch_size
        if options.ack_batch_bytes > largest:
            raise InvalidSetting(
                f"option ackBatchBytes={options.ack_batch_bytes} is more than servers accept in one batch, {largest}",
                hint="lower it, or raise nsqext.max_batch_size together with the servers' limit",
            )
        return options


_STARTS = {
    "starting_offsets": parse_starting,
    "starting_timestamp": parse_time,
    "starting_offsets_by_timestamp": parse_times,
}
_ENDS = {"ending_offsets": parse_ending, "ending_timestamp": parse_time, "ending_offsets_by_timestamp": parse_times}
_LOOKUPD = SparkOption(lambda value: parse_lookup_addresses(read_text(value)))
SOURCE_OPTIONS: tuple[SparkOption, ...] = _options_of(
    SourceOptions,
    lookupd=_LOOKUPD,
    subscribe=SparkOption(read_topics),
    assign=SparkOption(read_assignment, of_ranges=True),
    include_headers=SparkOption(read_bool),
    headers_format=SparkOption(read_choice("map", "array")),
    **{member: SparkOption(read, of_ranges=True) for member, read in _STARTS.items()},
    **{member: SparkOption(read, "batch") for member, read in _ENDS.items()},
)
"""Options of the source."""
SINK_OPTIONS: tuple[SparkOption, ...] = _options_of(
    SinkOptions, lookupd=_LOOKUPD, bad_rows=SparkOption(read_choice("fail", "topic"))
)
"""Options of the sink."""
_NAMES = {"read": SOURCE_OPTIONS, "write": SINK_OPTIONS}
_OTHER = {"read": "write", "write": "read"}

BATCH_ONLY: tuple[str, ...] = tuple(option.name for option in SOURCE_OPTIONS if option.only == "batch")
"""Options of batches that streams refuse."""
STREAM_ONLY: tuple[str, ...] = tuple(option.name for option in SOURCE_OPTIONS if option.only == "stream")
"""Options of streams that batches refuse."""
OFFSET_ONLY: tuple[str, ...] = tuple(option.name for option in SOURCE_OPTIONS if option.of_ranges)
"""Options that ``readMode=channel`` refuses."""
_EXCLUDING = (
    ("subscribe", "subscribePattern", "assign"),
    ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    ("maxOffsetsPerTrigger", "maxBytesPerTrigger"),
)
