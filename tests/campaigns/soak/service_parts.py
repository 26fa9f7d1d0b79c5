"""The parts of the long soak: each publishes numbers of some keys, and has programs that are killed.

``python -m tests.campaigns.soak.service_parts LOOKUPD TOPIC FILE`` is a consumer of keys over tags.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import celery
import orjson
from attrs import define, field

import nsqext.integrations.celery  # noqa: F401 - registers nsq://
from nsqext import Consumer, Message, NsqError, sync
from nsqext.delays import DelayRelay, DelayStore
from nsqext.transactions import Outbox, OutboxStore
from tests.campaigns.soak import recorded_relay
from tests.campaigns.soak.client_process import _WAIT_FOR_ORDER
from tests.campaigns.soak.recorded_relay import RelayNotes, explain, numbers_in_log
from tests.support.child_processes import kill_children
from tests.support.command_line import Process
from tests.support.numbered_keys import KEYS, body
from tests.support.programs import ROOT

__all__ = ("PARTS", "KeyRecord", "Ledger", "Part", "Program", "Site")

_TAGS = 8
_LONGEST_DELAY = 5.0


@define
class KeyRecord:
    """What was handled of a key, in as much memory as numbers are out of order.

    Attributes:
        low: every smaller number was handled.
        ahead: larger numbers that were handled.
        late: numbers that were first handled after a larger one.
        repeated: deliveries of numbers that were handled before.
    """

    low: int = 0
    ahead: set[int] = field(factory=set)
    late: int = 0
    repeated: int = 0
    _highest: int = -1

    def add(self, number: int) -> None:
        """Note that a number was handled."""
        if number < self.low or number in self.ahead:
            self.repeated += 1
            return
        self.late += number < self._highest
        self._highest = max(self._highest, number)
        self.ahead.add(number)
        while self.low in self.ahead:
            self.ahead.remove(self.low)
            self.low += 1


@define(eq=False)
class Ledger:
    """What was published and handled of each key."""

    published: dict[str, int] = field(factory=lambda: {f"c{key}": 0 for key in range(KEYS)})
    handled: dict[str, KeyRecord] = field(factory=lambda: {f"c{key}": KeyRecord() for key in range(KEYS)})
    _lock: threading.Lock = field(factory=threading.Lock)

    def add(self, key: str, number: int) -> None:
        """Note that a number of a key was handled."""
        with self._lock:
            self.handled[key].add(number)

    def missing(self) -> int:
        """Return how many published numbers were not handled."""
        with self._lock:
            return sum(
                count - self.handled[key].low - len(self.handled[key].ahead) for key, count in self.published.items()
            )

    def missing_numbers(self) -> set[tuple[str, int]]:
        """Return the keys and numbers that were published and not handled."""
        with self._lock:
            return {
                (key, number)
                for key, count in self.published.items()
                for number in range(self.handled[key].low, count)
                if number not in self.handled[key].ahead
            }

    def total(self, name: str) -> int:
        """Return the sum of ``late`` or ``repeated`` of all keys."""
        return sum(getattr(record, name) for record in self.handled.values())


@define
class Site:
    """A cluster that parts use.

    Attributes:
        lookupd: lookup addresses.
        redesigned: whether it has partitions, keys and tags.
        replicas: copies of each partition.
        token: end of the names of its topics.
        created: topics that were created.
    """

    lookupd: list[str]
    redesigned: bool
    replicas: int
    token: str
    created: list[str] = field(factory=list)

    def create(self, name: str, channels: Sequence[str], *, extend: bool = True, partitions: int = 2) -> str:
        """Create a topic, and return its name."""
        topic = f"{name}_{self.token}"
        options: dict[str, Any] = {}
        if self.redesigned:
            options = {"partitions": partitions, "replicas": self.replicas, "extend": extend, "multipart": True}
            options["wait"] = 180.0
        with sync.Admin(self.lookupd) as admin:
            admin.create_topic(topic, channels=list(channels), **options)
        self.created.append(topic)
        return topic


@define(eq=False)
class Program:
    """A program that is killed by kill -9 and started again: a command of ``nsqext``, or a file of Python."""

    words: list[str]
    log: Path
    variables: dict[str, str] = field(factory=dict)
    process: Process | None = None

    def start(self) -> None:
        """Start it."""
        program, *arguments = self.words
        words = arguments if program == "nsqext" else self.words
        with self.log.open("ab") as log:
            output = log.fileno(), log.fileno()
            self.process = Process(tuple(words), {**os.environ, **self.variables}, ROOT, output=output)

    def kill(self) -> None:
        """Kill it with the processes that it has started, and start it again."""
        assert self.process is not None
        kill_children(self.process.pid)
        self.process.kill()
        self.process.wait()
        self.start()

    def check(self) -> str | None:
        """Return what it printed last if it has ended by itself."""
        if self.process is None or self.process.poll() is None:
            return None
        return f"{' '.join(self.words[:4])} ended with {self.process.returncode}: {self.log.read_text()[-500:]}"

    def stop(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Part(ABC):
    """A part of a service: publishes numbers, and records what is handled.

    Attributes:
        name: its name.
        ordered: whether it keeps the order of keys.
        ledger: what was published and handled.
        programs: its programs by name; those whose name ends in ``2`` are never killed.
        errors: what is wrong besides.
    """

    name: str = ""

    def __init__(self, site: Site, other: Site, folder: Path) -> None:
        self.site = site
        self.other = other
        self.folder = folder
        self.ordered: bool = site.redesigned
        self.ledger: Ledger = Ledger()
        self.programs: dict[str, Program] = {}
        self.errors: list[str] = []
        self._ending = threading.Event()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._publisher: threading.Thread | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Create topics and stores, and add the programs."""

    @abstractmethod
    def publish_all(self, pause: float) -> None:
        """Publish until `ending`; runs in a thread."""

    @abstractmethod
    def consume(self) -> None:
        """Consume until `closing`; runs in a thread."""

    def rows(self) -> dict[str, int]:
        """Return how many rows tables have."""
        return {}

    def explain(self) -> list[str]:
        """Return what is wrong by the records of programs; the cluster still runs, the programs have ended."""
        return []

    def begin(self, pause: float) -> None:
        """Start programs, consumer and publisher, which rests between two numbers of all keys."""
        self.prepare()
        for program in self.programs.values():
            program.start()
        self._threads.append(threading.Thread(target=self._guarded, args=(self.consume,)))
        self._publisher = threading.Thread(target=self._guarded, args=(self.publish_all, pause))
        for thread in (*self._threads, self._publisher):
            thread.start()

    def _guarded(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self.errors.append(f"{self.name}: {error!r}")
            raise

    def kill(self, chance: random.Random) -> str:
        """Kill one of the programs; return its name."""
        name = chance.choice([name for name in self.programs if not name.endswith("2")])
        self.programs[name].kill()
        return name

    def end_publishing(self) -> None:
        """Publish nothing more."""
        self._ending.set()
        if self._publisher is not None:
            self._publisher.join()

    def close(self) -> None:
        """End everything."""
        self.end_publishing()
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for program in self.programs.values():
            self.errors += [text] if (text := program.check()) else []
            program.stop()

    # What parts share

    def publish(self, topic: str, pause: float, *, delayed: bool = False, **settings: Any) -> None:
        """Publish to a topic, each number until it is stored."""
        with sync.Producer(self.site.lookupd, **settings) as producer:
            while not self._ending.is_set():
                for key, number in self.ledger.published.items():
                    delay = random.uniform(0.2, _LONGEST_DELAY) if delayed else 0.0
                    own = key if self.site.redesigned and not delayed else None
                    while True:
                        try:
                            producer.publish(topic, self.body(key, number, delay), key=own, delay=delay or None)
                            break
                        except NsqError:
                            time.sleep(0.2)
                    self.ledger.published[key] = number + 1
                self._ending.wait(pause)

    def body(self, key: str, number: int, delay: float) -> bytes:
        """Return the body of a message."""
        return body(int(key[1:]), number)

    def handle(self, content: Any) -> None:
        """Note a handled message."""
        self.ledger.add(content["customer"]["id"], content["number"])

    def receive(self, topic: str, channel: str, site: Site) -> None:
        """Consume a topic, in lanes where it has keys."""

        async def run() -> None:
            lanes: dict[str, Any] = {"key": "##key", **_WAIT_FOR_ORDER} if site.redesigned else {}
            consumer = Consumer(topic, channel, site.lookupd, concurrency=4, max_in_flight=200, **lanes)

            @consumer.handler
            async def handle(message: Message) -> None:
                self.handle(orjson.loads(message.body))

            async with consumer:
                while not self._closing.is_set():  # noqa: ASYNC110 - another thread sets it
                    await anyio.sleep(0.1)

        anyio.run(run)

    def follow(self, file: Path) -> None:
        """Read the lines ``KEY NUMBER`` that processes append to a file."""
        with file.open("rb") as lines:
            rest = b""
            while not self._closing.is_set():
                *whole, rest = (rest + lines.read()).split(b"\n")
                for line in whole:
                    key, number = line.split()
                    self.ledger.add(key.decode(), int(number))
                self._closing.wait(0.1)


class MirrorPart(Part):
    """``nsqext relay`` to another cluster, or to another topic of the only one."""

    name = "mirror"

    def prepare(self) -> None:
        keyed = self.site.redesigned
        self.ordered = keyed and self.other.redesigned
        self.topic = self.site.create("mirrored", ["relay"], extend=keyed)
        self.target = self.other.create("mirror", ["ch"])
        self.notes = self.folder / "notes"
        words = [recorded_relay.__file__, str(self.notes), "relay", self.topic, "--to", self.target]
        words += ["--lookupd", ",".join(self.site.lookupd)]
        words += ["--to-lookupd", ",".join(self.other.lookupd), "--report", "60"]
        if self.other.redesigned and not keyed:
            words += ["--key-member", "customer.id"]
        if keyed and not self.other.redesigned:
            words += ["--without-headers"]
        self.programs["relay"] = Program(words, self.folder / "relay.log")

    def publish_all(self, pause: float) -> None:
        self.publish(self.topic, pause)

    def consume(self) -> None:
        self.receive(self.target, "ch", self.other)

    def explain(self) -> list[str]:
        notes = RelayNotes.read(self.notes)
        found = (
            [f"mirror: {len(notes.early)} numbers were finished before a copy was acknowledged"] if notes.early else []
        )
        missing = self.ledger.missing_numbers()
        if missing:
            log = numbers_in_log(self.other.lookupd, self.target) if self.other.redesigned else None
            found.append(f"mirror: of the {len(missing)} lost numbers were {explain(missing, notes, log)}")
        return found


class OutboxPart(Part):
    """Rows of transactions in SQLite, and two ``nsqext outbox relay``."""

    name = "outbox"

    def prepare(self) -> None:
        self.topic = self.site.create("outbox", ["ch"])
        self._database = f"sqlite:///{self.folder}/outbox.db"
        OutboxStore(self._database, create=True).close()
        words = ["nsqext", "outbox", "relay", "--database", self._database, "--lookupd", ",".join(self.site.lookupd)]
        for name in ("outbox relay 1", "outbox relay 2"):
            self.programs[name] = Program(words, self.folder / f"{name}.log")

    def publish_all(self, pause: float) -> None:
        outbox = Outbox()
        with closing(sqlite3.connect(self.folder / "outbox.db", timeout=60.0)) as connection:
            while not self._ending.is_set():
                for key, number in self.ledger.published.items():
                    with connection:
                        own = key if self.site.redesigned else None
                        outbox.add(connection, self.topic, body(int(key[1:]), number), key=own)
                    self.ledger.published[key] = number + 1
                self._ending.wait(pause)

    def consume(self) -> None:
        self.receive(self.topic, "ch", self.site)

    def rows(self) -> dict[str, int]:
        with OutboxStore(self._database) as store:
            found = store.summary(time.time())
        return {"outbox": found.waiting, "set aside by the outbox": found.refused}


class DelayPart(Part):
    """Messages that are delayed for some seconds, and two ``nsqext delay run`` that share a store."""

    name = "delays"

    def prepare(self) -> None:
        self.ordered = False
        self._store = self.folder / "delayed.sqlite"
        with DelayStore(self._store) as store:
            channels = DelayRelay(store).channels
        self.topic = self.site.create("delayed_orders", ["ch"])
        self.delayed = self.site.create("delayed", channels, extend=False)
        words = ["nsqext", "delay", "run", "--store", str(self._store), "--topic", self.delayed, "--keep", "600"]
        words += ["--lookupd", ",".join(self.site.lookupd)]
        for name in ("delay run 1", "delay run 2"):
            self.programs[name] = Program(words, self.folder / f"{name}.log")

    def publish_all(self, pause: float) -> None:
        self.publish(self.topic, pause, delayed=True, delay_via="relay", delay_topic=self.delayed)

    def body(self, key: str, number: int, delay: float) -> bytes:
        return orjson.dumps({"customer": {"id": key}, "number": number, "due": time.time() + delay})

    def handle(self, content: Any) -> None:
        if time.time() < content["due"] - 0.05:
            self.errors.append(f"{content} was {content['due'] - time.time():.3f} s early")
        super().handle(content)

    def consume(self) -> None:
        self.receive(self.topic, "ch", self.site)

    def rows(self) -> dict[str, int]:
        with DelayStore(self._store) as store:
            return {"delayed": store.summary(time.time()).waiting}


class KeysPart(Part):
    """Two consumers that share keys over tags."""

    name = "keys over tags"

    def prepare(self) -> None:
        self.topic = self.site.create("keys", ["ch"])
        self._notes = self.folder / "keys"
        self._notes.touch()
        words = [__file__, ",".join(self.site.lookupd), self.topic, str(self._notes)]
        for name in ("key consumer 1", "key consumer 2"):
            self.programs[name] = Program(words, self.folder / f"{name}.log")

    def publish_all(self, pause: float) -> None:
        self.publish(self.topic, pause, key_tags=_TAGS)

    def consume(self) -> None:
        self.follow(self._notes)


class CeleryPart(Part):
    """Tasks of Celery, and two workers."""

    name = "Celery"

    def prepare(self) -> None:
        self.ordered = False
        self._notes = self.folder / "notes"
        self._notes.touch()
        options = {"topic_replicas": self.site.replicas, "msg_timeout": 30.0} if self.site.redesigned else {}
        self._queue = f"celery_{self.site.token}"
        self.site.created.append(self._queue)
        self._address = f"nsq://{self.site.lookupd[0]}"
        own = {"NSQ_QUEUE": self._queue, "NSQ_BROKER": self._address, "NSQ_NOTES": str(self._notes)}
        own["NSQ_OPTIONS"] = orjson.dumps(options).decode()
        program = str(ROOT / "tests" / "integrations" / "celery" / "worker.py")
        words = [program, "-A", "tests.integrations.celery.tasks", "worker", "--concurrency", "1"]
        words += ["--loglevel", "WARNING", "--hostname"]
        for name in ("Celery 1", "Celery 2"):
            host = f"{name.replace(' ', '')}{self.site.token}@soak"
            self.programs[name] = Program([*words, host], self.folder / f"{name}.log", own)
        self._options = options

    def publish_all(self, pause: float) -> None:
        app = celery.Celery("soak", broker=self._address)
        app.conf.task_default_queue = self._queue
        app.conf.broker_transport_options = self._options
        number = 0
        while not self._ending.is_set():
            try:
                app.send_task("note", (number,))
            except Exception as error:
                if self._ending.wait(0.2):
                    break
                if not isinstance(error, celery.exceptions.OperationalError | NsqError):
                    raise
                continue
            number += 1
            self.ledger.published["c0"] = number
            self._ending.wait(pause / KEYS)
        app.close()

    def consume(self) -> None:
        with self._notes.open("rb") as lines:
            rest = b""
            while not self._closing.is_set():
                *whole, rest = (rest + lines.read()).split(b"\n")
                for line in whole:
                    self.ledger.add("c0", int(line))
                self._closing.wait(0.1)


PARTS: dict[str, type[Part]] = {one.name: one for one in (MirrorPart, OutboxPart, DelayPart, KeysPart, CeleryPart)}
"""By name; keys over tags need the redesigned NSQ."""


async def _share_keys(words: Sequence[str]) -> None:
    lookupd, topic, file = words
    notes = os.open(file, os.O_WRONLY | os.O_APPEND)
    consumer = Consumer(
        topic, "ch", lookupd.split(","), dispatch="key_failover", key_tags=_TAGS, concurrency=8, max_in_flight=200
    )

    @consumer.handler
    async def handle(message: Message) -> None:
        content = orjson.loads(message.body)
        os.write(notes, f"{content['customer']['id']} {content['number']}\n".encode())

    await consumer.serve()


if __name__ == "__main__":
    anyio.run(_share_keys, sys.argv[1:])
