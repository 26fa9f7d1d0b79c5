"""Parsers of option values; each raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from nsqext.protocol.headers import encode_headers
from nsqext.protocol.names import check_channel, check_partition, check_topic
from nsqext.spark.columns import READABLE, Columns


def read_text(value: str) -> str:
    if not value:
        raise ValueError("it is empty")
    return value


def read_bool(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return value.lower() == "true"


def read_number(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError("write a whole number") from None
        if number < least or (most is not None and number > most):
            raise ValueError(f"it is not within {least}..{most}" if most is not None else f"it is less than {least}")
        return number

    return read


def read_seconds(value: str) -> float:
    return read_number(1)(value) / 1000


def read_choice(*choices: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.lower() not in choices:
            raise ValueError(f"write {' or '.join(choices)}")
        return value.lower()

    return read


def read_topics(value: str) -> tuple[str, ...]:
    topics = [part.strip() for part in value.split(",") if part.strip()]
    if not topics:
        raise ValueError("it names no topic")
    return tuple(check_topic(topic) for topic in topics)


def read_assignment(value: str) -> dict[str, tuple[int, ...]]:
    try:
        data = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(data, dict) or not data:
        raise ValueError('write {"topic": [0, 1]}')
    assigned: dict[str, tuple[int, ...]] = {}
    for topic, partitions in data.items():
        if not isinstance(partitions, list) or not partitions:
            raise ValueError(f"topic {topic!r} has no list of partitions")
        assigned[check_topic(topic)] = tuple(sorted({check_partition(partition) for partition in partitions}))
    return assigned


def read_channel(value: str) -> str:
    if "#" in check_channel(value):
        raise ValueError("an ephemeral channel keeps no position")
    return value


def read_header(value: str) -> str:
    encode_headers({value: ""})
    return value


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def read_duration(value: str) -> float:
    """Parse a time with a unit, as in Kafka's source: ``500ms``, ``30s``, ``15m``; returns seconds."""
    match = re.fullmatch(r"(\d+)\s*([a-z]+)", value.lower())
    if match is None or match[2] not in _UNITS or not int(match[1]):
        raise ValueError("write a number and a unit: 500ms, 30s, 15m, 1h")
    return int(match[1]) * _UNITS[match[2]]


def read_pattern(value: str) -> str:
    try:
        re.compile(read_text(value))
    except re.error as error:
        raise ValueError(f"it is not a regular expression: {error}") from None
    return value


def read_columns(value: str) -> Columns:
    """Parse column names separated by commas; returns them in the order of the source's schema."""
    names = {part.strip().lower() for part in value.split(",") if part.strip()}
    unknown = sorted(names - set(READABLE))
    if unknown or not names:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(READABLE)}" if unknown else "it names no column")
    return tuple(name for name in READABLE if name in names)


# options of Spark's Kafka source and sink, for users who know these
_INSTEAD_OF_KAFKA = {
    "kafka.bootstrap.servers": "use lookupd: the HTTP addresses of nsqlookupd, host:port",
    "kafka.group.id": "use channel",
    "groupIdPrefix": "use channel: names of ephemeral channels begin with it",
    "kafka.security.protocol": "use nsqext. and a setting of the client, for TLS and secrets",
    "kafkaConsumer.pollTimeoutMs": "use readTimeoutMs",
    "fetchOffset.numRetries": "use readTimeoutMs: requests are repeated until it is over",
    "fetchOffset.retryIntervalMs": "use readTimeoutMs: requests are repeated until it is over",
    "useDeprecatedOffsetFetching": "remove it",
}
_BY_LOWER_NAME = {name.lower(): (name, hint) for name, hint in _INSTEAD_OF_KAFKA.items()}


def kafka_hint(name: str) -> tuple[str, str] | None:
    """Return an option of Kafka in its documentation's spelling, and its replacement; or None."""
    found = _BY_LOWER_NAME.get(name.lower())
    if found is None and name.lower().startswith("kafka."):
        return name, "use nsqext. and a setting of the client"
    return found
