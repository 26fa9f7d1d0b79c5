"""`nsqext record` and `nsqext replay` are killed in the middle: no flight is lost, and few are repeated.

``NSQEXT_TEST_FLIGHTS`` sets the number of flights: 336776 for those of a year, as in the data set of which the project
has one day.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from attrs import field, frozen

from nsqext import Admin, OutgoingMessage
from nsqext.broker import Cluster
from nsqext.cli.demo.demo import Flight, read_flights
from nsqext.cli.message_files import files_in, read_entries
from nsqext.sync import Producer
from tests.support.cluster import REAL
from tests.support.command_line import lines, started
from tests.support.topic_plan import TopicPlan, fresh_name

logger: logging.Logger = logging.getLogger(__name__)

COUNT = int(os.environ.get("NSQEXT_TEST_FLIGHTS", "2500"))
BATCH = max(COUNT // 100, 20)
"""Messages that are written or published together, and may be repeated after a kill."""

TIMEOUT = f"msg_timeout={1 if COUNT < 10_000 else 10}"
_LIMIT = 60.0 + COUNT / 500  # seconds for one command
_REAL_ORIGINAL = os.environ.get("NSQEXT_TEST_NSQ_LOOKUPD", "")


@frozen
class Servers:
    """A cluster.

    Attributes:
        lookupd: lookup addresses.
        extend: whether topics have headers and keys.
    """

    lookupd: str
    extend: bool


@pytest.fixture(scope="module", params=["redesigned", "original"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """An embedded cluster of each generation, or the real ones of the environment variables."""
    extend = request.param == "redesigned"
    real = REAL if extend else _REAL_ORIGINAL
    if real:
        yield Servers(real, extend)
        return
    # on disk: the flights of a year exceed the memory that a node keeps for messages
    folder = tmp_path_factory.mktemp("data")
    with Cluster(nodes=1, generation="redesigned" if extend else "original", data_path=folder) as cluster:
        yield Servers(cluster.lookupd[0], extend)


@pytest.fixture
def topics(servers: Servers) -> Iterator[tuple[str, str]]:
    """Two topics of two partitions with the channel ``record``."""
    plans = [TopicPlan(fresh_name("flights"), 2, extend=servers.extend, channels=("record",)) for _ in range(2)]

    async def each(act: Callable[[Admin, TopicPlan], Any]) -> None:
        async with Admin(servers.lookupd) as admin, anyio.create_task_group() as tasks:
            for plan in plans:
                tasks.start_soon(act, admin, plan)

    anyio.run(each, lambda admin, plan: plan.create(admin))
    yield plans[0].name, plans[1].name
    anyio.run(each, lambda admin, plan: admin.delete_topic(plan.name))


def publish(servers: Servers, topic: str, rows: range) -> None:
    """Publish flights with their numbers in the bodies; on extend topics with headers and keys."""

    def message(number: int, flight: Flight) -> OutgoingMessage:
        body = b'{"row":%d,' % number + flight.body[1:]
        return OutgoingMessage(body, flight.headers, key=flight.key) if servers.extend else OutgoingMessage(body)

    numbered = islice(enumerate(cycle(read_flights())), rows.start, rows.stop)
    with Producer(servers.lookupd) as producer:
        while some := [message(number, flight) for number, flight in islice(numbered, 1000)]:
            producer.publish_many(topic, some)


@frozen
class Recorded:
    """The flights in the files of a folder.

    Attributes:
        counts: number of recordings by flight.
        contents: hash of body, key and headers by flight.
    """

    counts: Counter[int] = field(factory=Counter)
    contents: dict[int, int] = field(factory=dict)


def replayed(progress: Path) -> int:
    """Return the number of replayed messages in a progress file."""
    return sum(number for number in orjson.loads(progress.read_bytes()).values() if isinstance(number, int))


def recorded(folder: Path) -> Recorded:
    """Read the files of a folder."""
    found = Recorded()
    for path in files_in([folder]):
        for entry in read_entries(path):
            record = entry.record
            row = orjson.loads(record["body"])["row"]
            found.counts[row] += 1
            found.contents[row] = hash((record["body"], record["key"], *sorted(record["headers"].items())))
    return found


def kill_once(words: tuple[str, ...], enough: Callable[[], bool]) -> None:
    """Run a command, and kill it when it has done enough; on a busy machine it may have ended before."""
    with started(*words) as process:
        deadline = time.monotonic() + _LIMIT
        while not enough():
            assert process.poll() in (None, 0)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextmanager
def hidden(file: Path, folder: Path) -> Iterator[None]:
    """Move a file away for a while."""
    file.rename(folder / file.name)
    yield
    (folder / file.name).rename(file)


@pytest.mark.timeout(240 + COUNT / 200)
def test_kills_lose_no_flight(servers: Servers, topics: tuple[str, str], tmp_path: Path) -> None:
    topic, copy = topics
    where = ("--lookupd", servers.lookupd)
    publish(servers, topic, range(COUNT * 3 // 4))
    first, second = tmp_path / "first", tmp_path / "second"
    # on the original NSQ the messages of a killed consumer stay in flight until they time out
    record = ("record", topic, "--to", str(first), "--batch", str(BATCH), "--url", f"nsq://{servers.lookupd}?{TIMEOUT}")
    # a row has about 50 bytes in a file
    kill_once(record, lambda: sum(path.stat().st_size for path in first.glob("*.gz")) > 20 * COUNT)
    before = recorded(first).counts.total()
    publish(servers, topic, range(COUNT * 3 // 4, COUNT))
    (done,) = lines(*record, "--until-end", limit=_LIMIT)
    found = recorded(first)
    total = found.counts.total()
    assert 0 < before < COUNT
    assert done["recorded"] == total - before
    assert found.counts.keys() == set(range(COUNT))
    assert total - COUNT <= 2 * BATCH, "also a batch that is written, whose acknowledgements are sent with the next"

    progress = tmp_path / "progress"
    replay = (
        *("replay", str(first), "--topic", copy, "--speed", "0", "--batch", str(BATCH)),
        *("--progress", str(progress), *where),
    )
    with hidden(files_in([first])[-1], tmp_path):
        kill_once(replay, lambda: progress.exists() and replayed(progress) > before // 2)
    stored = replayed(progress)
    (rest,) = lines(*replay, limit=_LIMIT)
    assert 0 < stored < total
    assert (rest["replayed"], rest["skipped"]) == (total - stored, stored)
    assert lines(*replay)[0]["replayed"] == 0
    (copied,) = lines("record", copy, "--to", str(second), "--until-end", *where, limit=_LIMIT)
    again = recorded(second)
    assert copied["recorded"] == again.counts.total()
    assert again.contents == found.contents
    assert again.counts.total() - total <= BATCH
    repeated = total - COUNT, again.counts.total() - total
    logger.info(
        "%d flights in %d files: %d recorded twice, %d replayed twice", COUNT, len(files_in([first])), *repeated
    )
