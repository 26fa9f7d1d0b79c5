"""Numbered messages of some keys: what was lost, and what came out of order."""

from __future__ import annotations

import json
import time
from threading import Thread
from typing import TYPE_CHECKING

from nsqext import sync

if TYPE_CHECKING:
    from nsqext.broker import Cluster

__all__ = ("KEYS", "Publisher", "disordered", "lost")

KEYS = 5


def body(key: int, number: int) -> bytes:
    return json.dumps({"customer": {"id": f"c{key}"}, "number": number}).encode()


class Publisher:
    """Publishes numbered messages of some keys until it is stopped.

    Args:
        cluster: has the topic.
        topic: its name.
        keyed: whether messages have their keys outside of their bodies, too.
        first: first number.
        pause: seconds between numbers, in which a mirror keeps up on a busy machine.
    """

    def __init__(self, cluster: Cluster, topic: str, *, keyed: bool, first: int = 0, pause: float = 0.005) -> None:
        self.published = first
        self._pause = pause
        self._stopped = False
        self._thread = Thread(target=self._run, args=(cluster.lookupd, topic, keyed))
        self._thread.start()

    def _run(self, lookupd: list[str], topic: str, keyed: bool) -> None:
        with sync.Producer(lookupd) as producer:
            while not self._stopped:
                for key in range(KEYS):
                    producer.publish(topic, body(key, self.published), key=f"c{key}" if keyed else None)
                self.published += 1
                time.sleep(self._pause)

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


def lost(found: dict[str, list[int]], published: int) -> dict[str, list[int]]:
    """Return the numbers of each key that were not delivered."""
    missing = {f"c{key}": sorted({*range(published)} - {*found.get(f"c{key}", ())}) for key in range(KEYS)}
    return {key: numbers for key, numbers in missing.items() if numbers}


def disordered(found: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the numbers of each key that were delivered for the first time after a later number."""
    late: dict[str, list[int]] = {}
    for key, numbers in found.items():
        highest = -1
        for number in dict.fromkeys(numbers):
            if number < highest:
                late.setdefault(key, []).append(number)
            highest = max(highest, number)
    return late
