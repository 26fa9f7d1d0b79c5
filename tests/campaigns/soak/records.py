"""The record of a client process: a line for each event, which survives kill -9, and the history that they make."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import orjson
from attrs import define, field

from nsqext import DeliveryUnknown, Message, NsqError, Receipt
from tests.campaigns.simulation.history import Delivery, DeliveryOutcome, History, Publish, PublishOutcome

__all__ = ("Record", "Recorder", "SoakHistory", "place")


@define(eq=False)
class SoakHistory(History):
    """A history of real processes.

    Attributes:
        observed: violations that a client process noticed itself: changed headers, consumers that ended.
    """

    observed: list[str] = field(factory=list)

    def forget_unfinished(self, moment: float, partition: int) -> None:
        """Take publishes whose messages were not finished when their node was killed for those of unknown outcome.

        Args:
            moment: when it was killed.
            partition: where the node stored messages.
        """
        finished = {
            (found.channel, found.body)
            for found in self.deliveries
            if found.outcome == "returned" and found.end <= moment
        }
        for publish in self.publishes:
            if publish.outcome == "stored" and publish.partition == partition and publish.begin <= moment:
                channels = [channel.name for channel in self.channels if channel.topic == publish.topic]
                if not all((channel, publish.body) in finished for channel in channels):
                    publish.outcome, publish.unsynced = "unknown", True


class Recorder:
    """Writes the events of a client process; every event is in the file when its method returns.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._count = 0

    def write(self, kind: str, **values: Any) -> None:
        """Write an event."""
        os.write(self._file, orjson.dumps({"event": kind, **values}) + b"\n")

    def publish_begins(self, body: bytes, topic: str, key: str, begin: float, patience: float = 0.0) -> None:
        """Record that a publish is about to be called; see `Publish.patience`."""
        self._count += 1
        values = {"number": self._count, "begin": begin, "patience": patience}
        self.write("publish", body=body.decode(), topic=topic, key=key, **values)

    def publish_ends(self, body: bytes, result: Receipt | BaseException) -> None:
        """Record the receipt or the error of a publish."""
        values: dict[str, Any] = {"outcome": _outcome(result)}
        if isinstance(result, Receipt):
            values |= {"partition": place(result), "message_id": result.message_id, "offset": result.offset}
        else:
            values["error"] = repr(result)
        self.write("published", body=body.decode(), end=time.monotonic(), **values)

    def delivery_begins(self, delivery: Delivery) -> int:
        """Record that a handler was called; returns the number of the call."""
        self._count += 1
        values = {name: getattr(delivery, name) for name in _DELIVERY}
        self.write("delivery", call=self._count, body=delivery.body.decode(), **values)
        return self._count

    def delivery_ends(self, call: int, outcome: DeliveryOutcome) -> None:
        """Record how the handler ended; the message is answered after this."""
        self.write("handled", call=call, end=time.monotonic(), outcome=outcome)


_DELIVERY = ("topic", "channel", "consumer", "partition", "message_id", "attempts", "begin")


def place(message: Receipt | Message) -> int:
    """Return the partition of a message; on the original NSQ the port of its node."""
    return int(message.node.rpartition(":")[2]) if message.partition is None else message.partition


def _outcome(result: Receipt | BaseException) -> PublishOutcome:
    if isinstance(result, Receipt):
        return "stored"
    if isinstance(result, NsqError):
        return "unknown" if isinstance(result, DeliveryUnknown) else "failed"
    return "undocumented" if isinstance(result, Exception) else "killed"


@define(eq=False)
class Record:
    """Reads the record of one client process into a history.

    Attributes:
        path: the file.
        history: what the events are added to.
        phases: what the process announced: ``ready``, ``stopped``, ``published``, ``closed``.
    """

    path: Path
    history: SoakHistory
    phases: set[str] = field(factory=set)
    _position: int = 0
    _publishes: dict[str, Publish] = field(factory=dict)
    _deliveries: dict[int, Delivery] = field(factory=dict)

    def read(self) -> None:
        """Read the events that were written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.splitlines():
            event = orjson.loads(line)
            getattr(self, f"_read_{event.pop('event')}")(event)

    def process_died(self, moment: float) -> None:
        """Read the rest; everything that had not ended was killed."""
        self.read()
        for publish in self._publishes.values():
            publish.outcome, publish.end = "killed", moment
        for delivery in self._deliveries.values():
            delivery.outcome, delivery.end = "cancelled", moment

    def _read_publish(self, event: dict[str, Any]) -> None:
        publish = Publish(**event | {"body": event["body"].encode()})
        self._publishes[event["body"]] = publish
        self.history.publishes.append(publish)

    def _read_published(self, event: dict[str, Any]) -> None:
        publish = self._publishes.pop(event.pop("body"))
        for name, value in event.items():
            setattr(publish, name, value)

    def _read_delivery(self, event: dict[str, Any]) -> None:
        call = event.pop("call")
        delivery = self._deliveries[call] = Delivery(**event | {"body": event["body"].encode()})
        self.history.deliveries.append(delivery)

    def _read_handled(self, event: dict[str, Any]) -> None:
        delivery = self._deliveries.pop(event["call"])
        delivery.end, delivery.outcome = event["end"], event["outcome"]

    def _read_phase(self, event: dict[str, Any]) -> None:
        self.phases.add(event["name"])
        self.history.close_seconds = max(self.history.close_seconds, event.get("seconds", 0.0))

    def _read_guest(self, event: dict[str, Any]) -> None:
        self.history.disturbances.append((event["begin"], event["end"]))

    def _read_violation(self, event: dict[str, Any]) -> None:
        self.history.observed.append(event["text"])
