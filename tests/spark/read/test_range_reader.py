"""Ranges are read completely, through faults of the servers."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex

import anyio
import pytest

from nsqext import Producer
from nsqext.broker import Cluster
from nsqext.broker.options import ClusterOptions
from nsqext.errors import (
    DataLoss,
    InvalidPartition,
    NegotiationFailed,
    NsqError,
    RangeIncomplete,
    TopicNotFound,
)
from nsqext.errors.server import ChannelNotRegistered
from nsqext.partitions import leaders
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.read import range_reader as ranges
from nsqext.spark.read.offsets import Range
from tests.support.fake_nsqd import until
from tests.support.spark_readers import SingleReader, bodies, ephemeral_channels, split

pytestmark = pytest.mark.anyio

COUNT = 500


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop that tasks of Spark run readers in."""
    return "asyncio", {"use_uvloop": find_spec("uvloop") is not None}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes, which tests may kill when they start them again."""
    with Cluster(nodes=3) as cluster:
        yield cluster


def access(cluster: Cluster, **settings: str) -> ClientConfig:
    """How a job reaches a cluster."""
    return ClientConfig(tuple(cluster.lookupd), settings, 10.0)


def body(number: int) -> bytes:
    """What the message with a number says."""
    return b"message %d %s" % (number, b"." * 100)


async def publish(cluster: Cluster, topic: str, first: int = 0, count: int = COUNT, partition: int = 0) -> None:
    """Publish messages that tell their numbers."""
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(
            topic, [body(number) for number in range(first, first + count)], partition=partition
        )


async def made(
    cluster: Cluster, *, partitions: int = 1, replicas: int = 1, extend: bool = False, ordered: bool = False
) -> str:
    """Make a topic with messages in its first partition."""
    topic = f"t_{token_hex(4)}"
    await anyio.to_thread.run_sync(
        lambda: cluster.create_topic(
            topic, partitions, replicas=replicas, extend=extend, ordered=ordered, channels=["other"]
        )
    )
    await publish(cluster, topic)
    return topic


async def read(reader: SingleReader) -> list[int]:
    """Read a range, and check that the messages say the numbers that they are given with."""
    numbers: list[int] = []
    async with reader:
        async for block in reader:
            for number, found in enumerate(bodies(block), block.first):
                assert found == body(number)
                numbers.append(number)
    return numbers


async def gone(cluster: Cluster, topic: str) -> None:
    """Return when no reader's channel is left."""
    await until(lambda: not ephemeral_channels(cluster, topic))


@pytest.mark.parametrize("kind", ["plain", "extend", "ordered", "ordered and extend"])
async def test_every_message_of_a_range(cluster: Cluster, kind: str) -> None:
    topic = await made(cluster, partitions=2, extend="extend" in kind, ordered="ordered" in kind)
    for start, end in ((0, COUNT), (3, 4), (123, 456), (COUNT - 1, COUNT)):
        reader = SingleReader(access(cluster), Range(topic, 0, start, end), block_rows=100)
        assert await read(reader) == list(range(start, end))
    await gone(cluster, topic)


async def test_blocks_are_bounded_by_rows_and_bytes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await made(cluster)
    async with SingleReader(access(cluster), Range(topic, 0, 10, 110), block_rows=30) as reader:
        assert [len(block) async for block in reader] == [30, 30, 30, 10]
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 1500)
    async with SingleReader(access(cluster), Range(topic, 0, 10, 110)) as reader:
        sizes = [int(block.columns.heads["size"].sum()) async for block in reader]
    assert len(sizes) > 5
    assert all(1500 <= size < 1700 for size in sizes[:-1])


async def test_nothing_to_read(cluster: Cluster) -> None:
    """An empty range sends no request, so that its topic need not exist."""
    reader = SingleReader(access(cluster), Range("no_such_topic", 9, 77, 77))
    assert await read(reader) == []


async def test_two_readers_of_one_range_at_the_same_time(cluster: Cluster) -> None:
    topic = await made(cluster)
    found: list[list[int]] = []

    async def one() -> None:
        found.append(await read(SingleReader(access(cluster), Range(topic, 0, 50, 450), rdy=20, block_rows=40)))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    assert found == [list(range(50, 450))] * 3


async def test_an_ordered_partition_in_pieces(cluster: Cluster) -> None:
    """Each scratch channel has a place of its own, so that pieces of one ordered partition are read side by side."""
    topic = await made(cluster, ordered=True)
    pieces = split(Range(topic, 0, 0, COUNT), 4)
    found: dict[int, list[int]] = {}

    async def one(piece: Range) -> None:
        found[piece.start] = await read(SingleReader(access(cluster), piece))

    async with anyio.create_task_group() as tasks:
        for piece in pieces:
            tasks.start_soon(one, piece)
    assert [number for start in sorted(found) for number in found[start]] == list(range(COUNT))


async def test_publishing_during_a_read(cluster: Cluster) -> None:
    topic = await made(cluster)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish, cluster, topic, COUNT)
        for _ in range(5):
            reader = SingleReader(access(cluster), Range(topic, 0, 100, COUNT), rdy=10, block_rows=50)
            assert await read(reader) == list(range(100, COUNT))


# Things that go wrong


@asynccontextmanager
async def halfway(reader: SingleReader) -> AsyncIterator[list[int]]:
    """Read two blocks, let something happen, and read on."""
    numbers: list[int] = []
    async with reader:
        for _ in range(2):
            block = await reader.next_block()
            assert block is not None
            numbers += range(block.first, block.first + len(block))
        yield numbers
        async for block in reader:
            assert bodies(block) == [body(number) for number in range(block.first, block.first + len(block))]
            numbers += range(block.first, block.first + len(block))


@pytest.mark.parametrize("ordered", [False, True])
async def test_the_leader_is_killed(cluster: Cluster, ordered: bool) -> None:
    topic = await made(cluster, replicas=3, ordered=ordered)
    leader = cluster.leader(topic)
    async with halfway(SingleReader(access(cluster), Range(topic, 0, 7, COUNT), rdy=20, block_rows=25)) as numbers:
        await anyio.to_thread.run_sync(cluster.kill, leader)
    assert numbers == list(range(7, COUNT))
    assert cluster.leader(topic) != leader
    cluster.restart(leader)


async def test_the_leader_moves(cluster: Cluster) -> None:
    topic = await made(cluster, replicas=2)
    other = next(name for name in cluster.in_sync(topic) if name != cluster.leader(topic))
    async with halfway(SingleReader(access(cluster), Range(topic, 0, 0, COUNT), rdy=20, block_rows=25)) as numbers:
        await anyio.to_thread.run_sync(cluster.move_leader, topic, 0, other)
    assert numbers == list(range(COUNT))


async def test_the_leader_falls_silent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open without messages: the reader does not wait for missed heartbeats."""
    monkeypatch.setattr(ranges, "STALL", 0.5)
    topic = await made(cluster, replicas=3)
    leader = cluster.leader(topic)
    async with halfway(SingleReader(access(cluster), Range(topic, 0, 0, COUNT), rdy=20, block_rows=25)) as numbers:
        await anyio.to_thread.run_sync(cluster.faults.freeze, leader)
    assert numbers == list(range(COUNT))
    cluster.faults.heal()


async def test_a_connection_that_breaks_in_the_middle_of_a_message(cluster: Cluster) -> None:
    topic = await made(cluster)
    async with halfway(SingleReader(access(cluster), Range(topic, 0, 0, COUNT), rdy=20, block_rows=25)) as numbers:
        await anyio.to_thread.run_sync(lambda: cluster.faults.cut(cluster.leader(topic)))
    assert numbers == list(range(COUNT))


async def test_bytes_that_are_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte stream is corrupt after that; no wrong message is returned."""
    monkeypatch.setattr(ranges, "STALL", 0.5)
    topic = await made(cluster)
    async with halfway(SingleReader(access(cluster), Range(topic, 0, 0, COUNT), rdy=20, block_rows=25)) as numbers:
        await anyio.to_thread.run_sync(lambda: cluster.faults.drop(cluster.leader(topic), "out", size=1000))
    assert numbers == list(range(COUNT))


async def test_a_topic_that_is_upgraded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that did not expect extend headers get nothing more, and no word of it (captured: upgrade_ext)."""
    monkeypatch.setattr(ranges, "STALL", 0.5)
    topic = await made(cluster)
    async with halfway(SingleReader(access(cluster), Range(topic, 0, 0, 2 * COUNT), rdy=20, block_rows=25)) as numbers:
        await anyio.to_thread.run_sync(cluster.upgrade_topic, topic)
        await publish(cluster, topic, COUNT)
    assert numbers == list(range(2 * COUNT))
    assert await read(SingleReader(access(cluster), Range(topic, 0, 5, COUNT + 5))) == list(range(5, COUNT + 5))


async def test_a_range_of_later_messages(cluster: Cluster) -> None:
    topic = await made(cluster)
    async with anyio.create_task_group() as tasks:
        reader = SingleReader(access(cluster), Range(topic, 0, COUNT + 1, COUNT + 3))
        async with reader:
            tasks.start_soon(publish, cluster, topic, COUNT)
            block = await reader.next_block()
    assert block is not None
    assert bodies(block) == [body(COUNT + 1), body(COUNT + 2)]


@pytest.mark.parametrize(("start", "end"), [(COUNT - 10, COUNT + 1), (COUNT, COUNT + 1), (COUNT + 5, COUNT + 9)])
async def test_a_range_behind_the_end_is_an_error_and_never_short(cluster: Cluster, start: int, end: int) -> None:
    topic = await made(cluster)
    reader = SingleReader(access(cluster), Range(topic, 0, start, end), timeout=1.0)
    found = await _until_error(reader, RangeIncomplete)
    message = str(found)
    assert f"message {max(start, COUNT)} of the range {start}..{end} was not received within 1 s" in message
    assert (found.topic, found.partition) == (topic, 0)
    assert found.node is not None
    assert found.__cause__ is not None


async def _until_error(reader: SingleReader, kind: type[NsqError]) -> NsqError:
    async with reader:
        with pytest.raises(kind) as caught:
            async for block in reader:
                assert block.first + len(block) < reader.range.end
        with pytest.raises(kind):
            await reader.next_block()
    return caught.value


async def test_a_partition_without_a_leader(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await made(cluster)
    leader = cluster.leader(topic)
    await anyio.to_thread.run_sync(cluster.kill, leader)
    try:
        reader = SingleReader(access(cluster), Range(topic, 0, 0, COUNT), timeout=1.0)
        await _until_error(reader, RangeIncomplete)
        logged = anyio.Event()
        monkeypatch.setattr(leaders, "QUIET", 0.0)
        monkeypatch.setattr(leaders.logger, "warning", lambda *_: logged.set())
        async with SingleReader(access(cluster), Range(topic, 0, 0, COUNT), timeout=60.0):
            await logged.wait()
    finally:
        cluster.restart(leader)


async def test_an_unknown_topic_or_partition(cluster: Cluster) -> None:
    async with SingleReader(access(cluster), Range("no_such_topic", 0, 0, 1)) as reader:
        with pytest.raises(TopicNotFound, match="no_such_topic"):
            await reader.next_block()
    topic = await made(cluster, partitions=2)
    async with SingleReader(access(cluster), Range(topic, 2, 0, 1)) as reader:
        with pytest.raises(InvalidPartition, match=r"the last is 1 .*partition 2"):
            await reader.next_block()


async def test_a_topic_that_accepts_registered_channels_only(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["known"], register_channels=True)
    await publish(cluster, topic)
    async with SingleReader(access(cluster), Range(topic, 0, 0, COUNT)) as reader:
        with pytest.raises(ChannelNotRegistered, match="readMode=channel"):
            await reader.next_block()


async def test_messages_that_are_not_retained() -> None:
    with Cluster(nodes=1, options=ClusterOptions(memory_bound=400_000)) as small:
        topic = await made(small)
        async with SourceAdmin(access(small)) as admin:
            for number in range(1, 8):
                await admin.move_anchor(topic, 0, "other", number * COUNT)
                await publish(small, topic, number * COUNT)
            start = (await admin.bounds(topic, 0)).start
        assert start > 0
        found = await _until_error(SingleReader(access(small), Range(topic, 0, start - 1, 8 * COUNT)), DataLoss)
        assert f"message {start - 1} is not retained any more; the first retained message is {start}" in str(found)
        reader = SingleReader(access(small), Range(topic, 0, start, 8 * COUNT))
        assert await read(reader) == list(range(start, 8 * COUNT))


async def test_a_log_that_was_rewritten(cluster: Cluster) -> None:
    """Counts continue and byte offsets do not: it is another log, whose messages are not those of the range."""
    topic = await made(cluster)
    async with SingleReader(access(cluster), Range(topic, 0, 0, COUNT), rdy=20, block_rows=25) as reader:
        assert await reader.next_block() is not None
        await anyio.to_thread.run_sync(cluster.delete_topic, topic)
        await anyio.to_thread.run_sync(lambda: cluster.create_topic(topic, channels=["other"]))
        async with Producer(cluster.lookupd) as producer:
            await producer.publish_many(topic, [b"x"] * COUNT, partition=0)
        with pytest.raises(DataLoss, match="log was rewritten"):
            while await reader.next_block() is not None:
                pass


# How it behaves


async def test_memory_is_bounded_if_the_caller_is_slow(cluster: Cluster) -> None:
    topic = await made(cluster)
    async with SingleReader(access(cluster), Range(topic, 0, 0, COUNT), rdy=20, block_rows=25) as reader:
        first = await reader.next_block()
        await until(lambda: reader._paused)
        await anyio.sleep(0.3)  # time for messages that should not be received
        assert reader._reassembler.count <= 3 * 25 + 20, (
            "a block that is processed, one that waits, and messages in flight"
        )
        assert first is not None
        numbers = [number async for block in reader for number in range(block.first, block.first + len(block))]
    assert numbers == list(range(25, COUNT))


async def test_a_pause_that_is_longer_than_the_timeout(cluster: Cluster) -> None:
    """Only the servers' time counts, not the user's."""
    topic = await made(cluster)
    reader = SingleReader(access(cluster), Range(topic, 0, 0, COUNT), timeout=0.5, rdy=20, block_rows=25)
    async with halfway(reader) as numbers:
        await anyio.sleep(1.2)
    assert numbers == list(range(COUNT))


async def test_ending_early_leaves_no_channel(cluster: Cluster) -> None:
    topic = await made(cluster)
    # the range does not end, so that the reader needs its channel
    reader = SingleReader(access(cluster), Range(topic, 0, 0, COUNT + 1), block_rows=10, channel="mine")
    async with reader:
        await reader.next_block()
        names = ephemeral_channels(cluster, topic)
        assert [name.startswith("mine_") for name in names] == [True]
    await gone(cluster, topic)


async def test_cancelling_at_any_time_leaves_no_channel(cluster: Cluster) -> None:
    topic = await made(cluster)
    for pause in (0, 0.001, 0.003, 0.006, 0.01, 0.02):
        with anyio.move_on_after(pause):
            await read(SingleReader(access(cluster), Range(topic, 0, 0, COUNT + 1), rdy=10))
    await gone(cluster, topic)


@pytest.mark.parametrize("settings", [{"deflate_level": "3"}, {"snappy": "true"}])
async def test_compressed_connections(cluster: Cluster, settings: dict[str, str]) -> None:
    topic = await made(cluster, extend=True)
    assert await read(SingleReader(access(cluster, **settings), Range(topic, 0, 5, COUNT))) == list(range(5, COUNT))


async def test_servers_that_allow_less_in_flight() -> None:
    with Cluster(nodes=1, options=ClusterOptions(limits=ServerLimits(max_rdy_count=50))) as strict:
        topic = await made(strict)
        assert await read(SingleReader(access(strict), Range(topic, 0, 0, COUNT), rdy=1000)) == list(range(COUNT))


async def test_encrypted_connections(tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    with Cluster(nodes=1, options=ClusterOptions(tls=context, limits=ServerLimits(tls=True))) as safe:
        topic = await made(safe)
        trusting = access(safe, tls=str(file))
        assert await read(SingleReader(trusting, Range(topic, 0, 0, COUNT))) == list(range(COUNT))
        async with SingleReader(access(safe, tls="true"), Range(topic, 0, 0, COUNT)) as reader:
            with pytest.raises(NegotiationFailed):
                await reader.next_block()
