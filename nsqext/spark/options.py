"""Options of ``spark.read/readStream/write/writeStream.format("nsqext")``.

Spark hands them over as text, with names in lower case. What is unknown, out of range or contradictory is refused
before anything is connected. Names that begin with ``nsqext.`` are settings of the client, see `Access`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import attrs
import orjson
from attrs import field, frozen

from nsqext.client.configure import consumer_settings, producer_settings
from nsqext.client.options import ProducerOptions
from nsqext.errors import InvalidSetting
from nsqext.lookup.addresses import parse_addresses
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.names import check_channel, check_partition, check_topic
from nsqext.transport.options import ConnectionOptions

if TYPE_CHECKING:
    from nsqext.settings import Setting

__all__ = ("Access", "SinkOptions", "SourceOptions", "includes_headers")

T = TypeVar("T")

PREFIX = "nsqext."
_HIDDEN = "***"
_MAX_RDY = 2500

# what Spark itself puts among the options of a query
_OF_SPARK = frozenset({"checkpointlocation", "queryname", "path"})


@frozen
class _Option:
    """One option: its name as the documentation has it, the member that it fills, and how it is read."""

    name: str
    member: str
    read: Callable[[str], Any]


# --- how values are read; each raises ValueError --------------------------------------------------------------------


def _text(value: str) -> str:
    if not value:
        raise ValueError("it is empty")
    return value


def _bool(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return value.lower() == "true"


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(value: str) -> int:
        number = int(value)
        if number < least or (most is not None and number > most):
            raise ValueError(f"it is not within {least}..{most}" if most is not None else f"it is less than {least}")
        return number

    return read


def _seconds(value: str) -> float:
    return _number(1)(value) / 1000


def _choice(*choices: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.lower() not in choices:
            raise ValueError(f"write {' or '.join(choices)}")
        return value.lower()

    return read


def _topics(value: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not topics:
        raise ValueError("it names no topic")
    return tuple(check_topic(topic) for topic in topics)


def _assignment(value: str) -> dict[str, tuple[int, ...]]:
    try:
        told = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(told, dict) or not told:
        raise ValueError('write {"topic": [0, 1]}')
    assigned: dict[str, tuple[int, ...]] = {}
    for topic, partitions in told.items():
        if not isinstance(partitions, list) or not partitions:
            raise ValueError(f"topic {topic!r} has no list of partitions")
        assigned[check_topic(topic)] = tuple(sorted({check_partition(partition) for partition in partitions}))
    return assigned


def _channel(value: str) -> str:
    if "#" in check_channel(value):
        raise ValueError("an ephemeral channel keeps no position")
    return value


def _header(value: str) -> str:
    encode_headers({value: ""})
    return value


_COMMON = (_Option("lookupd", "lookupd", lambda value: parse_addresses(_text(value), "lookupd")),)

_SOURCE = (
    *_COMMON,
    _Option("subscribe", "subscribe", _topics),
    _Option("assign", "assign", _assignment),
    _Option("channel", "channel", _channel),
    _Option("startingOffsets", "starting_offsets", _text),
    _Option("endingOffsets", "ending_offsets", _text),
    _Option("startingTimestamp", "starting_timestamp", _number(0)),
    _Option("endingTimestamp", "ending_timestamp", _number(0)),
    _Option("maxOffsetsPerTrigger", "max_offsets_per_trigger", _number(1)),
    _Option("minPartitions", "min_partitions", _number(1)),
    _Option("maxRecordsPerPartition", "max_records_per_partition", _number(1)),
    _Option("failOnDataLoss", "fail_on_data_loss", _bool),
    _Option("includeHeaders", "include_headers", _bool),
    _Option("readMode", "read_mode", _choice("offset", "channel")),
    _Option("resetChannel", "reset_channel", _bool),
    _Option("readTimeoutMs", "read_timeout", _seconds),
    _Option("arrowBatchRows", "arrow_batch_rows", _number(1, 1_000_000)),
    _Option("rdy", "rdy", _number(1, _MAX_RDY)),
)

_SINK = (
    *_COMMON,
    _Option("topic", "topic", check_topic),
    _Option("idempotenceHeader", "idempotence_header", _header),
    _Option("ackBatchBytes", "ack_batch_bytes", _number(1)),
)

_NAMES = {"read": _SOURCE, "write": _SINK}
_OTHER = {"read": "write", "write": "read"}

# options that make no sense in one of the ways to read
_BATCH_ONLY = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "resetChannel", "readMode")
_OFFSET_ONLY = (
    "startingOffsets",
    "startingTimestamp",
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
)


# --- where the servers are ------------------------------------------------------------------------------------------


@cache
def _client_settings(kind: str) -> Mapping[str, Setting]:
    """Return the settings of the client that mean something here, by name."""
    if kind == "write":
        return producer_settings()
    groups = ("connection", "lookup")
    known = {name: setting for name, setting in consumer_settings().items() if setting.group in groups}
    return known | {"delivery_decompress": consumer_settings()["delivery_decompress"]}


@frozen
class Access:
    """How a job reaches the servers; it can be pickled, since files and certificates are read where they are used.

    Attributes:
        lookupd: ``host:port`` of nsqlookupd's HTTP side, one or several.
        settings: settings of the client as text, by name without ``nsqext.``; never shown.
        timeout: seconds within which a question to the servers has to be answered, other leaders included.
    """

    lookupd: tuple[str, ...]
    settings: Mapping[str, str] = field(factory=dict, repr=lambda settings: str(_shown(settings)))
    timeout: float = 60.0

    def transport(self) -> ConnectionOptions:
        """Return how connections to nodes are made.

        Raises:
            InvalidSetting: a setting cannot be read, or contradicts another one.
        """
        return self._group(ConnectionOptions, "connection")

    def lookup(self) -> LookupOptions:
        """Return how the lookup service is asked.

        Raises:
            InvalidSetting: a setting cannot be read, or contradicts another one.
        """
        return self._group(LookupOptions, "lookup")

    def producer(self) -> ProducerOptions:
        """Return how messages are published.

        Raises:
            InvalidSetting: a setting cannot be read, or contradicts another one.
        """
        own = {name: value for name, value in self._read("write").items() if not producer_settings()[name].group}
        return ProducerOptions(**own, connection=self.transport(), lookup=self.lookup())

    @property
    def decompress(self) -> bool:
        """Whether bodies are restored that the publishing client compressed."""
        return bool(_value(self.settings.get("delivery_decompress", "true"), "delivery_decompress", "read"))

    def _group(self, options: type[T], group: str) -> T:
        known = producer_settings()
        names = {name: known[name].member for name in self.settings if name in known and known[name].group == group}
        values = {member: _value(self.settings[name], name, "write") for name, member in names.items()}
        return options(**values)

    def _read(self, kind: str) -> dict[str, Any]:
        return {name: _value(text, name, kind) for name, text in self.settings.items()}

    def check(self, kind: str) -> None:
        """Raise if a setting cannot be right.

        Args:
            kind: ``read`` or ``write``.

        Raises:
            InvalidSetting: it cannot.
        """
        known = _client_settings(kind)
        for name in self.settings:
            if name not in known:
                raise _unknown(f"{PREFIX}{name}", kind, (f"{PREFIX}{other}" for other in known))
        self._read(kind)
        if kind == "write":
            self.producer()
        else:
            self.transport()
            self.lookup()


def _shown(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: _HIDDEN if "secret" in name else value for name, value in settings.items()}


def _value(text: str, name: str, kind: str) -> Any:
    setting = _client_settings(kind)[name]
    if setting.read is None:
        raise InvalidSetting(f"option {PREFIX}{name} cannot be written as text")
    try:
        return setting.read(text)
    except ValueError as error:
        shown = _shown({name: text})[name]
        raise InvalidSetting(f"option {PREFIX}{name}={shown!r} cannot be read: {error}") from None


# --- parsing --------------------------------------------------------------------------------------------------------


def _unknown(name: str, kind: str, known: Iterable[str]) -> InvalidSetting:
    names = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    other = next((option.name for option in _NAMES[_OTHER[kind]] if option.name.lower() == name), None)
    if other is not None:
        return InvalidSetting(f"option {other} cannot be used to {kind}", hint=f"it is there to {_OTHER[kind]}")
    hint = f"do you mean {names[near[0]]}?" if near else f"there are {', '.join(sorted(names.values()))}"
    return InvalidSetting(f"option {name} is unknown", hint=hint)


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
                raise InvalidSetting(f"option {option.name}={text!r} cannot be right: {error}") from None
        elif name == "path":
            raise InvalidSetting(f"path {text!r}: topics have no path", hint="use the option subscribe, or topic")
        elif name not in _OF_SPARK:
            raise _unknown(name, kind, (option.name for option in known.values()))
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
    idempotence_header: str = "nsqext_id"
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
