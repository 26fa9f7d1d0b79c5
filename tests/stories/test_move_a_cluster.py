"""A service moves to another cluster under load, as docs/howto/move-a-cluster.md says."""

from __future__ import annotations

import json
import signal
import time
from threading import Thread

import pytest

from nsqext import sync
from nsqext.broker import Cluster
from tests.support.blocking_client import eventually
from tests.support.command_line import lines, run, started
from tests.support.numbered_keys import KEYS, Publisher, disordered, lost
from tests.support.programs import ROOT

_PAUSE = 0.02
"""Seconds between numbers."""
_MORE = 30
"""Numbers that are handled after each step."""
_PAGE = (ROOT / "docs" / "howto" / "move-a-cluster.md").read_text(encoding="utf-8")


def words(command: str, old: Cluster, new: Cluster) -> tuple[str, ...]:
    """Return the arguments of a command that the page has, with the addresses of the clusters."""
    assert f"nsqext {command}" in _PAGE, f"the page lacks: {command}"
    return tuple(command.replace("old:4161", old.lookupd[0]).replace("new:4161", new.lookupd[0]).split())


class Worker:
    """A consumer of a service, which records what it handles."""

    def __init__(self, cluster: Cluster, handled: dict[str, list[int]]) -> None:
        self._stopped = False
        self._thread = Thread(target=self._run, args=(cluster.lookupd, handled))
        self._thread.start()

    def _run(self, lookupd: list[str], handled: dict[str, list[int]]) -> None:
        with sync.Consumer("orders", "billing", lookupd) as consumer:
            while not self._stopped:
                batch = consumer.fetch(100, timeout=0.05)
                for message in batch:
                    content = json.loads(message.body)
                    handled.setdefault(content["customer"]["id"], []).append(content["number"])
                batch.finish()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


def count(handled: dict[str, list[int]]) -> int:
    """Return how many numbers of the slowest key were handled."""
    return min((len({*numbers}) for numbers in handled.values()), default=0) if len(handled) == KEYS else 0


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_a_service_moves_without_loss_and_keeps_the_order_of_keys(generation: str) -> None:
    handled: dict[str, list[int]] = {}
    redesigned = generation == "redesigned"
    with Cluster(nodes=1, generation=generation) as old, Cluster(nodes=2) as new:
        old.create_topic("orders", 2 if redesigned else 1, extend=redesigned, channels=["billing"])
        mirror = "relay orders --to orders --lookupd old:4161 --to-lookupd new:4161"
        if not redesigned:
            lines(*words("topic create orders --partitions 2 --extend --channel billing --lookupd new:4161", old, new))
            mirror += " --key-member customer.id"
        first, publisher = Worker(old, handled), Publisher(old, "orders", keyed=redesigned, pause=_PAUSE)
        second = None
        try:
            with started(*words(mirror, old, new)) as relay:
                eventually(lambda: "relay" in old.topics["orders"] and new.topics.get("orders"), seconds=30.0)
                before = count(handled)
                eventually(lambda: count(handled) > before + _MORE, seconds=30.0)
                since = time.time() - 1.0
                first.stop()
                seek = words("channel seek orders billing timestamp:SECONDS --yes --lookupd new:4161", old, new)
                lines(*(word.replace("SECONDS", f"{since:.0f}") for word in seek))
                second = Worker(new, handled)
                before = count(handled)
                eventually(lambda: count(handled) > before + _MORE, seconds=30.0)
                publisher.stop()
                lag = words("lag orders relay --max 0 --lookupd old:4161", old, new)
                eventually(lambda: run(*lag).returncode == 0, seconds=30.0)
                publisher = Publisher(new, "orders", keyed=True, first=publisher.published, pause=_PAUSE)
                relay.send_signal(signal.SIGTERM)
                assert relay.wait(20.0) == 0
                before = count(handled)
                eventually(lambda: count(handled) > before + _MORE, seconds=30.0)
                publisher.stop()
                eventually(lambda: count(handled) >= publisher.published, seconds=20.0)
        finally:
            publisher.stop()
            for worker in (first, second):
                if worker is not None:
                    worker.stop()
    assert (lost(handled, publisher.published), disordered(handled)) == ({}, {})
    repeated = sum(map(len, handled.values())) - KEYS * publisher.published
    assert 0 < repeated < KEYS * publisher.published, "the new consumers begin before the last message of the old ones"
