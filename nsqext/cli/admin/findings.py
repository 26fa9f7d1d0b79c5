"""What ``nsqext doctor`` finds, and its judgement of an outbox and of delayed messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from nsqext.cli.connection import counted
from nsqext.errors import NsqError

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.delays import DelaySummary
    from nsqext.transactions.store import OutboxSummary

LONGEST_WAIT: float = 60.0
"""Seconds for which a message may wait in an outbox, or a delayed message after it was due."""


@frozen
class Finding:
    """Result of one examination."""

    status: Literal["ok", "warning", "error"]
    subject: str
    text: str
    hint: str = ""  #: what to do


def examine_outbox(database: str) -> Finding:
    """Read an outbox, and judge it."""
    from nsqext.transactions import OutboxStore

    try:
        with OutboxStore(database) as store:
            return judge_outbox(store.summary(time.time()))
    except NsqError as error:
        return Finding("error", "outbox", error.message, error.hint or "")


def judge_outbox(found: OutboxSummary) -> Finding:
    """Say whether an outbox is published."""
    text = f"{counted(found.waiting, 'message')} waiting"
    text += "" if found.age is None else f", the oldest for {found.age:.0f} s"
    text += f"; {counted(found.relays, 'relay')}"
    if found.waiting and not found.relays:
        return Finding("error", "outbox", text, "start a relay: nsqext outbox relay --database …")
    if found.age is not None and found.age > LONGEST_WAIT:
        return Finding("warning", "outbox", text, "read the log of the relays: why do they not publish?")
    if found.refused:
        hint = "nsqext outbox status --retry publishes them, and --discard deletes them"
        text += f"; {counted(found.refused, 'message')} set aside" + (found.reason and f", the last: {found.reason}")
        return Finding("warning", "outbox", text, hint)
    return Finding("ok", "outbox", text)


def examine_delays(store: Path) -> Finding:
    """Read the store of a relay of delayed messages, and judge it."""
    from nsqext.delays import DelayStore

    try:
        with DelayStore(store, create=False) as opened:
            return judge_delays(opened.summary(time.time()))
    except NsqError as error:
        return Finding("error", "delays", error.message, error.hint or "")


def judge_delays(found: DelaySummary) -> Finding:
    """Say whether delayed messages are published when they are due."""
    text = f"{counted(found.waiting, 'delayed message')} waiting"
    text += f", due for {found.late:.0f} s" if found.late else ", none is due"
    if found.late is not None and found.late > LONGEST_WAIT:
        hint = "does nsqext delay run use this store? nsqext delay list shows why messages were not published"
        return Finding("error", "delays", text, hint)
    if found.refused:
        hint = "nsqext delay list --refused shows them, and nsqext delay discard deletes them"
        return Finding("warning", "delays", f"{text}; {counted(found.refused, 'record')} set aside", hint)
    return Finding("ok", "delays", text)
