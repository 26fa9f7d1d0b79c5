"""Bytes recorded from a redesigned NSQ 0.3.7-HA.1.13.0 cluster, see data/README.md."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = (
    "Conversation",
    "DiskRecord",
    "OddConversation",
    "RecordedFilter",
    "Step",
    "conversation",
    "conversations",
    "disk_records",
    "edge_conversations",
    "odd_conversations",
    "owner_conversations",
    "recorded_filters",
)

DATA = Path(__file__).parent / "data"
_PIECE = re.compile(r"\{(..)\*(\d+)\}|(..)")


class Step(NamedTuple):
    """What was seen on one connection (see data/README.md for the words), and bytes.

    The note is there for messages and trace replies: what the recorder made of them.
    """

    connection: int
    what: str
    data: bytes
    note: str = ""


class Conversation(NamedTuple):
    """A recorded scenario."""

    name: str
    title: str
    steps: list[Step]

    def connections(self) -> dict[int, list[Step]]:
        """Return the steps of each connection."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.connection, []).append(step)
        return found


class OddTopic(NamedTuple):
    """A topic that exists before a conversation."""

    name: str
    partitions: list[int]
    extend: bool
    channels: list[str]


class OddConversation(NamedTuple):
    """A conversation with a node without a cluster, of one generation (``redesigned`` or ``original``)."""

    generation: str
    name: str
    topics: list[OddTopic]
    steps: list[Step]


class RecordedFilter(NamedTuple):
    """A header filter as IDENTIFY gave it, messages (header or None, and name), and the names that it let through."""

    wanted: dict[str, Any]
    messages: list[tuple[str | None, str]]
    passed: list[str]


class DiskRecord(NamedTuple):
    """A record of a partition's queue file, and what it holds."""

    topic: str
    data: bytes
    internal_id: int
    trace_id: int


def _bytes(text: str) -> bytes:
    parts = (
        bytes.fromhex(one) if one else bytes.fromhex(byte) * int(times) for byte, times, one in _PIECE.findall(text)
    )
    return b"".join(parts)


def conversations() -> tuple[Conversation, ...]:
    """Return the recorded conversations of well-behaved clients, and of single mistakes."""
    return _read("conversations.json")


def edge_conversations() -> tuple[Conversation, ...]:
    """Return recorded conversations that try a server's edges: many odd commands, headers and settings each."""
    return _read("edges.json")


def odd_conversations() -> tuple[OddConversation, ...]:
    """Return recorded conversations with nodes without a cluster, which try odd commands and numbers at limits."""
    return _read_odd("odd.json")


def owner_conversations() -> tuple[OddConversation, ...]:
    """Return recorded conversations of consumers that own buckets of keys by their tags, and lose or release them."""
    return _read_odd("owners.json")


@lru_cache(maxsize=2)
def _read_odd(name: str) -> tuple[OddConversation, ...]:
    return tuple(
        OddConversation(
            one["generation"],
            one["name"],
            [OddTopic(*topic) for topic in one["topics"]],
            [Step(number, what, _bytes(text)) for number, what, text in one["steps"]],
        )
        for one in json.loads((DATA / name).read_text(encoding="utf-8"))
    )


@lru_cache(maxsize=2)
def _read(name: str) -> tuple[Conversation, ...]:
    content = json.loads((DATA / name).read_text(encoding="utf-8"))
    shared = {f"${index}": text for index, text in enumerate(content["shared"])}
    return tuple(
        Conversation(
            one["name"],
            one["title"],
            [Step(number, what, _bytes(shared.get(text, text)), *note) for number, what, text, *note in one["steps"]],
        )
        for one in content["conversations"]
    )


def conversation(name: str) -> Conversation:
    """Return a recorded conversation by its name."""
    return next(one for one in conversations() if one.name == name)


def disk_records() -> list[DiskRecord]:
    """Return the recorded queue records."""
    found = []
    for one in json.loads((DATA / "disk_records.json").read_text(encoding="utf-8")):
        numbers = re.search(r" id=(\d+) trace=(\d+) ", one["note"])
        assert numbers is not None
        found.append(DiskRecord(one["topic"], bytes.fromhex(one["hex"]), int(numbers[1]), int(numbers[2])))
    return found


def recorded_filters() -> list[RecordedFilter]:
    """Return the recorded header filters."""
    content = json.loads((DATA / "filters.json").read_text(encoding="utf-8"))
    return [
        RecordedFilter(wanted, [(header, name) for header, name in group["messages"]], passed)
        for group in content
        for wanted, passed in group["filters"]
    ]
