"""Ranges of the embedded cluster or of a real one: the same messages, on every kind of topic."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext.errors import RangeIncomplete
from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupOptions
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.read import range_reader as ranges
from nsqext.spark.read.offsets import Range
from tests.support.spark_readers import SingleReader, split
from tests.support.spark_readers import bodies as bodies_of

if TYPE_CHECKING:
    from tests.support.spark_cluster import Servers

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]  # a real cluster takes a while to make a topic

COUNT = 3000
KINDS = {"plain": {}, "extend": {"extend": True}, "ordered": {"ordered": True}}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop that tasks of Spark run readers in."""
    return "asyncio", {"use_uvloop": find_spec("uvloop") is not None}


@pytest.fixture(scope="module")
def topics(servers: Servers) -> dict[str, str]:
    """A topic of each kind, of two partitions with messages."""
    found = {kind: servers.make_topic(kind, 2, **options) for kind, options in KINDS.items()}
    for topic in found.values():
        for partition in range(2):
            servers.publish(topic, [body(partition, number) for number in range(COUNT)], partition)
    return found


def body(partition: int, number: int) -> bytes:
    """What a message says, whose number is counted from the first one of the test."""
    return b"message %d of partition %d" % (number, partition)


def access(servers: Servers, timeout: float = 20.0) -> ClientConfig:
    """How a job reaches the servers."""
    return ClientConfig(tuple(servers.lookupd), timeout=timeout)


async def read(servers: Servers, found: Range, block_rows: int = 500) -> list[int]:
    """Read a range, and check that the messages say the numbers that they are given with."""
    numbers: list[int] = []
    async with SingleReader(access(servers), found, block_rows=block_rows) as reader:
        async for block in reader:
            for number, found_body in enumerate(bodies_of(block), block.first):
                assert found_body == body(found.partition, number - servers.first)
                numbers.append(number)
    return numbers


@pytest.mark.parametrize("kind", KINDS)
async def test_every_message_of_a_range(servers: Servers, topics: dict[str, str], kind: str) -> None:
    first = servers.first
    for partition in range(2):
        for start, end in ((first, first + COUNT), (first + 17, first + 18), (first + 1234, first + 2345)):
            assert await read(servers, Range(topics[kind], partition, start, end)) == list(range(start, end))


@pytest.mark.parametrize("kind", KINDS)
async def test_pieces_and_readers_at_the_same_time(servers: Servers, topics: dict[str, str], kind: str) -> None:
    whole = Range(topics[kind], 1, servers.first, servers.first + COUNT)
    found: list[tuple[int, list[int]]] = []

    async def one(piece: Range) -> None:
        found.append((piece.start, await read(servers, piece)))

    async with anyio.create_task_group() as tasks:
        for piece in (*split(whole, 4), *split(whole, 4)):
            tasks.start_soon(one, piece)
    numbers = [number for _, piece in sorted(found)[::2] for number in piece]
    assert numbers == list(range(whole.start, whole.end))
    assert [piece for _, piece in sorted(found)[::2]] == [piece for _, piece in sorted(found)[1::2]]


@pytest.mark.parametrize("kind", KINDS)
async def test_readers_leave_no_channel_behind(servers: Servers, topics: dict[str, str], kind: str) -> None:
    await read(servers, Range(topics[kind], 0, servers.first, servers.first + 10))
    async with SourceAdmin(access(servers)) as admin:
        leader, _ = await admin.leaders.leader(topics[kind], 0)
        with anyio.fail_after(10):
            while any(  # noqa: ASYNC110 (only the server knows)
                "#ephemeral" in name for name in (await admin.leaders.nodes.stats(leader, topics[kind], 0)).channels
            ):
                await anyio.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_range_behind_the_end(servers: Servers, topics: dict[str, str], kind: str) -> None:
    end = servers.first + COUNT
    found = Range(topics[kind], 0, end - 5, end + 1)
    async with SingleReader(access(servers), found, timeout=1.0) as reader:
        with pytest.raises(RangeIncomplete, match=f"message {end} of the range {end - 5}..{end + 1}"):
            while await reader.next_block() is not None:
                pass


async def test_a_topic_that_is_upgraded(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a read; older messages are read as before (captured: upgrade_ext, upgrade_old_records)."""
    monkeypatch.setattr(ranges, "STALL", 1.0)
    topic = await anyio.to_thread.run_sync(servers.make_topic, "upgraded")
    bodies = [body(0, number) for number in range(2 * COUNT)]
    await anyio.to_thread.run_sync(servers.publish, topic, bodies[:COUNT], 0)
    first, numbers = servers.first, list[int]()
    found = Range(topic, 0, first, first + 2 * COUNT)
    async with SingleReader(access(servers), found, rdy=50, block_rows=100) as reader:
        while (block := await reader.next_block()) is not None:
            assert bodies_of(block) == bodies[block.first - first : block.first - first + len(block)]
            numbers += range(block.first, block.first + len(block))
            if len(numbers) == 300:
                await _upgrade(servers, topic)
                await anyio.to_thread.run_sync(servers.publish, topic, bodies[COUNT:], 0)
    assert numbers == list(range(first, first + 2 * COUNT))


async def _upgrade(servers: Servers, topic: str) -> None:
    async with LookupClient(servers.lookupd, LookupOptions(request_timeout=15.0)) as client:
        leader = next(node for node in await client.lookup_nodes() if node.leader)
        params = {"topic": topic, "upgradeext": "true"}
        await client.http.ask(leader.address, "/topic/meta/update", params, method="POST")
