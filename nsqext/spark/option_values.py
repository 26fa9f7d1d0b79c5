"""How the values of options are read, which Spark hands over as text; each reader raises ValueError."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from nsqext.protocol.headers import encode_headers
from nsqext.protocol.names import check_channel, check_partition, check_topic

__all__ = (
    "read_assignment",
    "read_bool",
    "read_channel",
    "read_choice",
    "read_header",
    "read_number",
    "read_seconds",
    "read_text",
    "read_topics",
)


def read_text(value: str) -> str:
    """Read text that is not empty."""
    if not value:
        raise ValueError("it is empty")
    return value


def read_bool(value: str) -> bool:
    """Read true or false."""
    if value.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return value.lower() == "true"


def read_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number that lies within bounds."""

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
    """Read milliseconds as seconds."""
    return read_number(1)(value) / 1000


def read_choice(*choices: str) -> Callable[[str], str]:
    """Return what reads one of several words."""

    def read(value: str) -> str:
        if value.lower() not in choices:
            raise ValueError(f"write {' or '.join(choices)}")
        return value.lower()

    return read


def read_topics(value: str) -> tuple[str, ...]:
    """Read names of topics, with commas between them."""
    topics = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not topics:
        raise ValueError("it names no topic")
    return tuple(check_topic(topic) for topic in topics)


def read_assignment(value: str) -> dict[str, tuple[int, ...]]:
    """Read partitions by topic, in JSON."""
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


def read_channel(value: str) -> str:
    """Read the name of a channel that stays."""
    if "#" in check_channel(value):
        raise ValueError("an ephemeral channel keeps no position")
    return value


def read_header(value: str) -> str:
    """Read the name of an extend header."""
    encode_headers({value: ""})
    return value
