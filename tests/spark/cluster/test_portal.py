"""From blocking code into an event loop, in every process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext.broker import Cluster
from nsqext.errors import InvalidState, RangeIncomplete
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.read.offsets import Range
from nsqext.sync import Producer
from tests.support.blocking_client import eventually
from tests.support.spark_readers import SingleReader, bodies, ephemeral_channels

if TYPE_CHECKING:
    from nsqext.spark.read.frames import Block


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with a hundred messages."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, channels=["other"])
    with Producer(cluster.lookupd) as producer:
        producer.publish_many(name, [b"%d" % number for number in range(100)])
    return name


async def where() -> str:
    """Name the thread that this runs in."""
    await anyio.lowlevel.checkpoint()
    return threading.current_thread().name


async def fail(error: Exception) -> None:
    """Raise."""
    await anyio.lowlevel.checkpoint()
    raise error


def test_one_thread_serves_all_calls() -> None:
    first = portal.call(where)
    assert first != threading.current_thread().name
    assert portal.call(where) == first


def test_errors_are_returned() -> None:
    with pytest.raises(RangeIncomplete, match="this one"):
        portal.call(fail, RangeIncomplete("this one"))


def test_the_loop_does_not_wait_for_itself() -> None:
    async def again() -> str:
        return portal.call(where)

    with pytest.raises(InvalidState, match="its event loop's thread"):
        portal.call(again)


def blocks_of(reader: SingleReader) -> Iterator[Block]:
    """Read a range from blocking code."""
    return portal.iterate(reader, reader.next_block)


def test_blocks_of_a_range(cluster: Cluster, topic: str) -> None:
    access = ClientConfig(tuple(cluster.lookupd), timeout=0.5)
    found = [
        (block.first, bodies(block)[0])
        for block in blocks_of(SingleReader(access, Range(topic, 0, 5, 100), block_rows=30))
    ]
    assert found == [(5, b"5"), (35, b"35"), (65, b"65"), (95, b"95")]
    with pytest.raises(RangeIncomplete):
        list(blocks_of(SingleReader(access, Range(topic, 0, 5, 101))))


def test_a_generator_that_is_closed_early_closes_the_reader(cluster: Cluster, topic: str) -> None:
    reader = SingleReader(ClientConfig(tuple(cluster.lookupd)), Range(topic, 0, 0, 101), block_rows=10)
    blocks = blocks_of(reader)
    assert next(blocks).first == 0
    assert ephemeral_channels(cluster, topic)
    assert isinstance(blocks, Iterator)
    blocks.close()  # type: ignore[attr-defined]
    eventually(lambda: ephemeral_channels(cluster, topic), lambda found: not found)


_PROGRAM = """
import os, threading
import anyio
import nsqext.spark.read.range_reader
from nsqext.spark.cluster import portal

assert threading.active_count() == 1, "importing starts nothing"

async def number():
    return os.getpid()

assert portal.call(number) == os.getpid()
child = os.fork()
if child == 0:
    assert portal.call(number) == os.getpid()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
assert portal.call(number) == os.getpid()

async def hang():
    await anyio.sleep_forever()

portal.readers_loop.kept().start_task_soon(hang)
print("done")
"""


def test_processes_that_fork_and_end() -> None:
    """The child has a loop of its own, and what runs in the loop does not keep the process alive."""
    expected = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=30
    )
    assert (expected.returncode, expected.stdout.strip()) == (0, "done"), expected.stderr
