"""Rules for names of topics, channels and tags, for trace ids and partition numbers."""

from __future__ import annotations

import re
from functools import lru_cache

from nsqext.arguments import is_whole
from nsqext.errors import InvalidInput, InvalidName, InvalidPartition

__all__ = (
    "DEFAULT_CHANNEL",
    "MAX_IDENTITY",
    "MAX_NAME_LENGTH",
    "MAX_PARTITION",
    "MAX_PARTITIONS",
    "MAX_TAG_BYTES",
    "check_channel",
    "check_identity",
    "check_partition",
    "check_tag",
    "check_topic",
    "check_topic_pattern",
    "check_trace_id",
    "is_ephemeral",
    "is_storable",
    "is_topic_pattern",
    "is_valid_channel",
    "is_valid_tag",
    "is_valid_topic",
    "topic_and_partition",
)

DEFAULT_CHANNEL = "default"
"""Of new topics without named channels; the redesigned NSQ refuses publishes to a topic without channels."""
MAX_NAME_LENGTH = 64
MAX_TAG_BYTES = 100
MAX_IDENTITY = 200
"""Characters."""
MAX_PARTITION = 1023
"""Clients and nodes refuse larger numbers; clusters make fewer, see `MAX_PARTITIONS`."""
MAX_PARTITIONS = 254
"""Largest number of partitions that servers create for a topic."""

_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")
_PATTERN = re.compile(r"[.a-zA-Z0-9_*?-]+(#ephemeral)?")
_WILDCARDS = {"*": "[.a-zA-Z0-9_-]*", "?": "[.a-zA-Z0-9_-]"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"[a-zA-Z0-9_-]+")
_RULE = "1 to 64 letters, digits, '.', '_' or '-'; '#ephemeral' at the end is allowed, and counts"


@lru_cache(maxsize=4096)
def is_valid_topic(name: str) -> bool:
    """Return whether servers accept a topic name (captured: sub_bad_names)."""
    return 1 <= len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


is_valid_channel = is_valid_topic


@lru_cache(maxsize=4096)
def is_valid_tag(tag: str) -> bool:
    """Return whether all clients accept the tag."""
    return len(tag) <= MAX_TAG_BYTES and _TAG.fullmatch(tag) is not None


def is_ephemeral(name: str) -> bool:
    """Return whether a topic or channel is deleted with its last client."""
    return name.endswith("#ephemeral")


def check_topic(name: str, what: str = "topic") -> str:
    """Return the name; raise `InvalidName` if servers do not accept it."""
    if not (isinstance(name, str) and is_valid_topic(name)):
        raise InvalidName(f"{what} name {name!r} is not valid", hint=f"use {_RULE}")
    return name


def is_topic_pattern(name: object) -> bool:
    """Return whether a topic name has wildcards, which no topic can have."""
    return isinstance(name, str) and ("*" in name or "?" in name)


def check_topic_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression for a pattern; raise `InvalidName` if no topic can match.

    ``*`` stands for any number of characters, ``?`` for one. ``#ephemeral`` matches only where written.
    """
    if not (isinstance(pattern, str) and _PATTERN.fullmatch(pattern)):
        raise InvalidName(
            f"topic pattern {pattern!r} is not valid",
            hint="use '*' for any characters and '?' for one, in a name of letters, digits, '.', '_' and '-'",
        )
    if len(pattern.replace("*", "")) > MAX_NAME_LENGTH:
        raise InvalidName(f"topic pattern {pattern!r} is longer than any name", hint=f"use {_RULE}")
    return re.compile("".join(_WILDCARDS.get(character) or re.escape(character) for character in pattern))


def check_channel(name: str) -> str:
    """Return the name; raise `InvalidName` if servers do not accept it."""
    return check_topic(name, "channel")


def check_tag(tag: str) -> str:
    """Return the tag; raise `InvalidName` if not all clients accept it.

    Servers check only the length (100 bytes, captured: identify_bounds).
    """
    if not (isinstance(tag, str) and is_valid_tag(tag)):
        raise InvalidName(f"tag {tag!r} is not valid", hint="use 1 to 100 letters, digits, '_' or '-'")
    return tag


def check_identity(identity: str) -> str:
    """Return a message's identity; raise `InvalidInput` unless databases and servers can keep it."""
    if not isinstance(identity, str) or not 0 < len(identity) <= MAX_IDENTITY:
        raise InvalidInput(f"identity={str(identity)[:50]!r} is not text of 1 to {MAX_IDENTITY} characters")
    if not is_storable(identity):
        raise InvalidInput(f"identity={identity!r} has a NUL character or half of a surrogate pair")
    return identity


def is_storable(text: str) -> bool:
    """Return whether databases can store a text."""
    return "\0" not in text and _SURROGATE.search(text) is None


def check_partition(partition: int) -> int:
    """Return the partition; raise `InvalidPartition` if no topic can have it."""
    if not is_whole(partition, 0, MAX_PARTITION):
        raise InvalidPartition(f"partition {partition!r} is not valid", hint=f"use a number from 0 to {MAX_PARTITION}")
    return partition


def check_trace_id(trace_id: int) -> int:
    """Return the trace id; raise `InvalidInput` unless it is an unsigned 64-bit number."""
    if not is_whole(trace_id, 0, (1 << 64) - 1):
        raise InvalidInput(f"trace id {trace_id!r} is not valid", hint="use a number from 0 to 2**64 - 1")
    return trace_id


def topic_and_partition(topic: str, partition: int | None) -> str:
    """Return ``topic[partition]``, or the topic."""
    return topic if partition is None else f"{topic}[{partition}]"
