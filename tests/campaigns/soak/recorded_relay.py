"""``nsqext relay`` that records what the target acknowledged, and what it finishes in the source.

``python -m tests.campaigns.soak.recorded_relay FILE relay TOPIC …`` appends a line for each acknowledged copy and each
FIN; a line is in the file before the FIN of its message is sent, and survives kill -9. `RelayNotes` reads the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from attrs import define, field, frozen

from nsqext import Message, NsqError, Receipt
from nsqext.cli import main
from nsqext.cli.messages.mirror import Mirror
from nsqext.client.consumer.subscriptions.subscription import Subscription
from tests.campaigns.soak.records import place
from tests.support.programs import ROOT

if TYPE_CHECKING:
    from nsqext.client.producer.publishing import OutgoingMessage

__all__ = ("Copy", "RelayNotes", "explain", "numbers_in_log")

Number = tuple[str, int]
"""Key and number of a message."""


def number_of(body: bytes) -> Number:
    """Return the key and the number of a message."""
    content = orjson.loads(body)
    return content["customer"]["id"], content["number"]


@frozen
class Copy:
    """An acknowledged copy.

    Attributes:
        node: ``host:port`` of the node that acknowledged it.
        partition: its partition; on the original NSQ the port of the node.
        message_id: its id, if the response had it.
        time: when, in seconds since 1970.
    """

    node: str
    partition: int
    message_id: int | None
    time: float


@define
class RelayNotes:
    """What a relay did, over all its processes.

    Attributes:
        copies: the last acknowledged copy of each message.
        acknowledged: number of acknowledged copies.
        finished: messages that were finished in the source.
        early: messages that were finished before any copy was acknowledged.
    """

    copies: dict[Number, Copy] = field(factory=dict)
    acknowledged: int = 0
    finished: set[Number] = field(factory=set)
    early: set[Number] = field(factory=set)

    @classmethod
    def read(cls, file: Path) -> RelayNotes:
        """Read the file; the last line may be incomplete."""
        notes = cls()
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            kind, key, number, *rest = orjson.loads(line)
            if kind == "stored":
                notes.copies[key, number] = Copy(*rest)
                notes.acknowledged += 1
            else:
                notes.finished.add((key, number))
                if (key, number) not in notes.copies:
                    notes.early.add((key, number))
        return notes


def numbers_in_log(lookupd: Sequence[str], topic: str) -> set[Number]:
    """Return the messages in the logs of a topic of the redesigned NSQ, which keeps what was consumed."""
    words = ["nsqext", "tail", topic, "--lookupd", ",".join(lookupd), "--start", "earliest", "--until-end", "--raw"]
    found = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300.0)
    return {number_of(line) for line in found.stdout.splitlines()}


def explain(missing: set[Number], notes: RelayNotes, log: set[Number] | None) -> str:
    """Return what happened to messages that no consumer of the target received; ``log`` as in `numbers_in_log`."""
    unfinished = missing - notes.finished
    gone = set() if log is None else {one for one in missing - log if one in notes.copies}
    counts = {
        "finished before a copy was acknowledged": len(missing & notes.early),
        "not finished in the source": len(unfinished),
        "acknowledged by the target": len(missing & notes.copies.keys()),
    }
    if log is not None:
        counts |= {"acknowledged, and not in its log": len(gone), "in its log, and not delivered": len(missing & log)}
    lost = [notes.copies[one] for one in gone]
    places = Counter(f"{copy.node} partition {copy.partition}" for copy in lost)
    text = ", ".join(f"{count} {what}" for what, count in counts.items())
    if lost:
        times = [copy.time for copy in lost]
        named = ", ".join(f"{count} by {where}" for where, count in places.items())
        text += f"; acknowledged were {named}, from {_clock_time(min(times))} to {_clock_time(max(times))}"
    return text


def _clock_time(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment * 1000) % 1000:03d}"


def _record(file: Path) -> None:
    """Append a line for each acknowledged copy, and for each FIN before it is sent."""
    notes = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    publish, finish = Mirror._publish, Subscription.finish

    async def publish_and_note(
        self: Mirror, partition: int | None, messages: Sequence[OutgoingMessage]
    ) -> Sequence[Receipt | NsqError]:
        outcomes = await publish(self, partition, messages)
        lines = [
            orjson.dumps(("stored", *number_of(message.body), got.node, place(got), got.message_id, time.time()))
            for message, got in zip(messages, outcomes, strict=True)
            if isinstance(got, Receipt)
        ]
        os.write(notes, b"".join(line + b"\n" for line in lines))
        return outcomes

    def note_and_finish(self: Subscription, message: Message) -> None:
        os.write(notes, orjson.dumps(("finished", *number_of(message.body))) + b"\n")
        finish(self, message)

    Mirror._publish = publish_and_note  # type: ignore[method-assign]
    Subscription.finish = note_and_finish  # type: ignore[method-assign]


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
    main(sys.argv[2:])
