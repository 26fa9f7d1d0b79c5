"""Options of ``spark.read/readStream/write/writeStream.format("nsqext")``.

Spark hands them over as text, with names in lower case. What is unknown, out of range or contradictory is refused
before anything is connected. Names that begin with ``nsqext.`` are settings of the client, see `Access`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import attrs
from attrs import frozen

from nsqext.errors import InvalidSetting
from nsqext.lookup.options import parse_lookup_addresses
from nsqext.protocol.names import check_topic
from nsqext.spark.cluster.client_config import PREFIX, Access, unknown
from nsqext.spark.cluster.ephemeral_channel import MARK
from nsqext.spark.option_values import (
    read_assignment,
    read_bool,
    read_channel,
    read_choice,
    read_header,
    read_number,
    read_seconds,
    read_text,
    read_topics,
)

__all__ = ("ID_HEADER", "Access", "SinkOptions", "SourceOptions", "includes_headers")

ID_HEADER = "nsqext_id"
"""Header that carries the id of a row, unless another one is chosen."""

_MAX_RDY = 2500
_LONG = (1 << 63) - 1
"""Limits of micro-batches go through Java."""

# what Spark itself puts among the options of a query
_OF_SPARK = frozenset({"checkpointlocation", "queryname"})


@frozen
class _Option:
    """One option: its name as the documentation has it, the member that it fills, and how it is read."""

    name: str
    member: str
    read: Callable[[str], Any]


_COMMON = (_Option("lookupd", "lookupd", lambda value: parse_lookup_addresses(read_text(value))),)

_SOURCE = (
    *_COMMON,
    _Option("subscribe", "subscribe", read_topics),
    _Option("assign", "assign", read_assignment),
    _Option("channel", "channel", read_channel),
    _Option("startingOffsets", "starting_offsets", read_text),
    _Option("endingOffsets", "ending_offsets", read_text),
    _Option("startingTimestamp", "starting_timestamp", read_number(0)),
    _Option("endingTimestamp", "ending_timestamp", read_number(0)),
    _Option("maxOffsetsPerTrigger", "max_offsets_per_trigger", read_number(1, _LONG)),
    _Option("maxBytesPerTrigger", "max_bytes_per_trigger", read_number(1, _LONG)),
    _Option("minPartitions", "min_partitions", read_number(1)),
    _Option("maxRecordsPerPartition", "max_records_per_partition", read_number(1)),
    _Option("failOnDataLoss", "fail_on_data_loss", read_bool),
    _Option("includeHeaders", "include_headers", read_bool),
    _Option("readMode", "read_mode", read_choice("offset", "channel")),
    _Option("resetChannel", "reset_channel", read_bool),
    _Option("readTimeoutMs", "read_timeout", read_seconds),
    _Option("arrowBatchRows", "arrow_batch_rows", read_number(1, 1_000_000)),
    _Option("rdy", "rdy", read_number(1, _MAX_RDY)),
)

_SINK = (
    *_COMMON,
    _Option("topic", "topic", check_topic),
    _Option("idempotenceHeader", "idempotence_header", read_header),
    _Option("ackBatchBytes", "ack_batch_bytes", read_number(1)),
)

_NAMES = {"read": _SOURCE, "write": _SINK}
_OTHER = {"read": "write", "write": "read"}

# options that make no sense in one of the ways to read
_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "resetChannel", "readMode")
_OFFSET_ONLY = (
    "startingOffsets",
    "startingTimestamp",
    "maxBytesPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "resetChannel",
    "assign",
)
_EXCLUDING = (
    ("subscribe", "assign"),
    ("startingOffsets", "startingTimestamp"),
    ("endingOffsets", "endingTimestamp"),
    ("maxOffsetsPerTrigger", "maxBytesPerTrigger"),
)


def _unknown(name: str, kind: str) -> InvalidSetting:
    other = next((option.name for option in _NAMES[_OTHER[kind]] if option.name.lower() == name), None)
    if other is not None:
        return InvalidSetting(f"option {other} cannot be used to {kind}", hint=f"it is there to {_OTHER[kind]}")
    return unknown(name, (option.name for option in _NAMES[kind]))


def _read_all(given: Mapping[str, str], kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the options by member, and the settings of the client as text."""
    known = {option.name.lower(): option for option in _NAMES[kind]}
    values: dict[str, Any] = {}
    settings: dict[str, str] = {}
    for key, text in given.items():
        name = key.lower()
        if name.startswith(PREFIX):
            settings[name.removeprefix(PREFIX)] = str(text)
        elif name in known:
            option = known[name]
            try:
                values[option.member] = option.read(str(text).strip())
            except ValueError as error:
                shown = str(text).rpartition("@")[2]  # what is before an @ may be a secret
                raise InvalidSetting(f"option {option.name}={shown!r} cannot be right: {error}") from None
        elif name == "path":
            raise InvalidSetting(f"path {text!r}: topics have no path", hint="use the option subscribe, or topic")
        elif name not in _OF_SPARK:
            raise _unknown(name, kind)
    return values, settings


def _access(values: dict[str, Any], settings: dict[str, str], kind: str) -> Access:
    lookupd = values.pop("lookupd", None)
    if lookupd is None:
        raise InvalidSetting("option lookupd is missing", hint="give nsqlookupd's HTTP address, host:port")
    access = Access(tuple(map(str, lookupd)), settings)
    access.check(kind)
    return access


def includes_headers(given: Mapping[str, str]) -> bool:
    """Return whether rows are to have the columns ``headers`` and ``key``.

    Raises:
        InvalidSetting: an option is unknown, or cannot be read.
    """
    return bool(_read_all(given, "read")[0].get("include_headers", False))


@frozen
class SourceOptions:
    """What is read, and how.

    Attributes:
        connection: how the servers are reached; its ``timeout`` is ``readTimeoutMs``, in seconds.
        topics: what is read, by topic: its partitions, None for all that there are.
        channel: name of the anchor channel; that of scratch channels begins with it.
        starting_offsets: as the user wrote it; None for the default: ``earliest``, for streams ``latest``.
        ending_offsets: as the user wrote it; None for the default, ``latest``.
        starting_timestamp: only messages of this time or later, in milliseconds since 1970.
        ending_timestamp: only messages of before this time, in milliseconds since 1970.
        max_offsets_per_trigger: messages of one micro-batch.
        max_bytes_per_trigger: bytes of one micro-batch in the partitions' logs, more or less.
        min_partitions: tasks that there are at least.
        max_records_per_partition: messages of one task.
        fail_on_data_loss: fail where messages are gone that should have been read; otherwise go on behind them.
        include_headers: rows have the columns ``headers`` and ``key``.
        read_mode: ``offset`` reads ranges that can be read again, ``channel`` consumes a channel.
        reset_channel: start where the starting offsets say, although the anchor channel is there.
        read_timeout: seconds within which the next message of a range has to come.
        arrow_batch_rows: rows of one record batch.
        rdy: messages in flight of one task.
    """

    connection: Access
    topics: Mapping[str, tuple[int, ...] | None]
    channel: str | None = None
    starting_offsets: str | None = None
    ending_offsets: str | None = None
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    read_mode: Literal["offset", "channel"] = "offset"
    reset_channel: bool = False
    read_timeout: float = 60.0
    arrow_batch_rows: int = 2000
    rdy: int = 1000

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool = False) -> Self:
        """Return the options that Spark hands over.

        Args:
            given: the options by name, in any case.
            streaming: they are those of ``readStream``.

        Raises:
            InvalidSetting: one is unknown, cannot be read, is missing, or contradicts another one.
        """
        values, settings = _read_all(given, "read")
        present = {option.name for option in _SOURCE if option.member in values}
        _check_source(present, values, streaming)
        connection = _access(values, settings, "read")
        subscribed = dict.fromkeys(values.pop("subscribe", ()))
        topics: Mapping[str, tuple[int, ...] | None] = values.pop("assign", subscribed)
        options = cls(connection=connection, topics=topics, **values)
        return attrs.evolve(options, connection=attrs.evolve(connection, timeout=options.read_timeout))


def _check_source(present: set[str], values: Mapping[str, Any], streaming: bool) -> None:
    for one, other in _EXCLUDING:
        if one in present and other in present:
            raise InvalidSetting(f"options {one} and {other} contradict each other", hint="give one of them")
    if not present & {"subscribe", "assign"}:
        raise InvalidSetting("no topic is named", hint="give the option subscribe, or assign")
    for name in _BATCH_ONLY if streaming else _STREAM_ONLY:
        if name in present:
            kind = "batch" if streaming else "streaming"
            raise InvalidSetting(f"option {name} is for {kind} reads only", hint="leave it out")
    if streaming and "channel" not in present:
        raise InvalidSetting(
            "option channel is missing",
            hint="a streaming read needs the name of a channel of its own, which keeps what it has not read yet",
        )
    if values.get("read_mode") == "channel":
        for name in _OFFSET_ONLY:
            if name in present:
                raise InvalidSetting(f"option {name} contradicts readMode=channel", hint="leave one of them out")
    elif streaming and values["channel"].endswith(MARK):
        raise InvalidSetting(
            f"option channel={values['channel']!r} cannot be right: names that end with {MARK} are those of channels "
            "that queries make for a moment"
        )
    first, last = values.get("starting_timestamp"), values.get("ending_timestamp")
    if first is not None and last is not None and last < first:
        raise InvalidSetting(f"endingTimestamp={last} is before startingTimestamp={first}")


@frozen
class SinkOptions:
    """Where rows are published, and how.

    Attributes:
        connection: how the servers are reached, and how messages are published.
        topic: topic of rows that name none.
        idempotence_header: header of extend topics that carries the id of a row.
        ack_batch_bytes: bytes that a task publishes before it waits for the servers' answers.
    """

    connection: Access
    topic: str | None = None
    idempotence_header: str = ID_HEADER
    ack_batch_bytes: int = 1 << 20

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options that Spark hands over.

        Args:
            given: the options by name, in any case.

        Raises:
            InvalidSetting: one is unknown, cannot be read, is missing, or contradicts another one.
        """
        values, settings = _read_all(given, "write")
        connection = _access(values, settings, "write")
        options = cls(connection=connection, **values)
        largest = connection.producer().max_batch_size
        if options.ack_batch_bytes > largest:
            raise InvalidSetting(
                f"option ackBatchBytes={options.ack_batch_bytes} is more than servers take in one batch, {largest}",
                hint="lower it, or raise nsqext.max_batch_size together with the servers' limit",
            )
        return options
