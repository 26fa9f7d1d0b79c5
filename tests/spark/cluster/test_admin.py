"""Bounds, leaders and anchor channels, on the embedded cluster or a real one."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from attrs import evolve

from nsqext import Producer
from nsqext.broker import Cluster
from nsqext.broker.options import ClusterOptions
from nsqext.errors import (
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    NsqError,
    PartitionUnavailable,
    TopicNotFound,
)
from nsqext.errors.server import ChannelNotRegistered
from nsqext.partitions import PartitionNodes, leaders
from nsqext.spark.cluster import admin as admin_module
from nsqext.spark.cluster.admin import QUERY_MARK, SourceAdmin, ephemeral_name, setup_mark
from nsqext.spark.cluster.client_config import ClientConfig
from tests.support.fake_nsqd import scripted_lookup, until
from tests.support.messages import placed

if TYPE_CHECKING:
    from nsqext.admin import PartitionStats
    from nsqext.partitions import Leader
    from tests.support.spark_cluster import Servers

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]  # a real cluster takes a while to make a topic

KINDS = {"plain": {}, "extend": {"extend": True}, "ordered": {"ordered": True}}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop that Spark's processes ask in."""
    return "asyncio", {"use_uvloop": find_spec("uvloop") is not None}


@pytest.fixture(scope="module")
def topics(servers: Servers) -> dict[str, str]:
    """A topic of each kind, of two partitions."""
    return {kind: servers.make_topic(kind, 2, **options) for kind, options in KINDS.items()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster whose nodes may be killed."""
    with Cluster(nodes=3) as cluster:
        yield cluster


def access(lookupd: object, timeout: float = 10.0) -> ClientConfig:
    """How a job reaches servers."""
    return ClientConfig(tuple(map(str, lookupd)), timeout=timeout)  # type: ignore[call-overload]


async def ends(admin: SourceAdmin, topic: str, partition: int, *patience: float) -> tuple[int, int]:
    """Where a partition begins and ends."""
    bounds = await admin.bounds(topic, partition, *patience)
    return bounds.start, bounds.end


async def publish(lookupd: object, topic: str, count: int, partition: int = 0) -> None:
    """Publish some messages."""
    async with Producer(lookupd) as producer:  # type: ignore[arg-type]
        await producer.publish_many(topic, [b"body %d" % number for number in range(count)], partition=partition)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Return when the condition holds."""
    with anyio.fail_after(10):
        while not await condition():
            await anyio.lowlevel.checkpoint()


# On both clusters


@pytest.mark.parametrize("kind", KINDS)
async def test_a_topic(servers: Servers, topics: dict[str, str], kind: str) -> None:
    async with SourceAdmin(access(servers.lookupd)) as admin:
        leaders = await admin.leaders.partitions(topics[kind])
        _, meta = await admin.leaders.leader(topics[kind], 0)
    assert list(leaders) == [0, 1]
    assert (meta.partition_num, meta.ordered, meta.extend_support) == (2, kind == "ordered", kind == "extend")


@pytest.mark.parametrize("kind", KINDS)
async def test_everything_that_was_acknowledged_can_be_read_at_once(
    servers: Servers, topics: dict[str, str], kind: str
) -> None:
    topic = topics[kind]
    async with SourceAdmin(access(servers.lookupd)) as admin, Producer(servers.lookupd) as producer:
        before = await admin.bounds(topic, 1)
        assert before.start == 0
        for number in range(1, 30):
            await producer.publish(topic, b"body", partition=1)
            assert await ends(admin, topic, 1) == (0, before.end + number)


async def test_the_end_includes_large_messages(servers: Servers, topics: dict[str, str]) -> None:
    """The real server shows them to channels some seconds later, if no message follows."""
    topic = topics["plain"]
    async with SourceAdmin(access(servers.lookupd)) as admin, Producer(servers.lookupd) as producer:
        end = (await admin.bounds(topic, 1)).end
        await producer.publish_many(topic, [b"x" * 300_000] * 3, partition=1)
        assert await ends(admin, topic, 1) == (0, end + 3)


async def test_the_end_of_a_topic_without_channels(servers: Servers, topics: dict[str, str]) -> None:
    """Only a channel shows what is committed: the client creates an ephemeral one, which is deleted afterwards."""
    topic = topics["plain"]
    async with SourceAdmin(access(servers.lookupd)) as admin:
        end = (await admin.bounds(topic, 0)).end
        await publish(servers.lookupd, topic, 7)
        leader, _ = await admin.leaders.leader(topic, 0)
        await admin.delete_anchor(topic, 0, servers.channel)
        assert await ends(admin, topic, 0) == (0, end + 7)

        async def no_channel() -> bool:
            return not (await admin.leaders.nodes.stats(leader, topic, 0)).channels

        await eventually(no_channel)
        assert await ends(admin, topic, 0) == (0, end + 7)
        await admin.leaders.nodes.change_channel(leader, topic, 0, "create", servers.channel)


@pytest.mark.parametrize("kind", KINDS)
async def test_messages_are_found_by_position(servers: Servers, topics: dict[str, str], kind: str) -> None:
    topic = topics[kind]
    async with SourceAdmin(access(servers.lookupd)) as admin, Producer(servers.lookupd) as producer:
        first = (await admin.bounds(topic, 1)).end
        receipts = [await producer.publish(topic, b"x" * size, partition=1, trace_id=1) for size in (10, 3000, 5)]
        bounds = await admin.bounds(topic, 1)
        offsets = [placed(receipt)[1] for receipt in receipts]
        assert bounds.end_offset == offsets[-1] + placed(receipts[-1])[2]
        for number, offset in enumerate(offsets, first):
            assert (await admin.message(topic, 1, number)).offset == offset
            assert await admin.count_before(topic, 1, offset) == number
        for place in (offsets[0] + 1, offsets[1] - 1):
            assert await admin.count_before(topic, 1, place) == first
        assert await admin.count_before(topic, 1, offsets[2] - 1) == first + 1


async def test_all_partitions_with_one_question_to_each_node(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SourceAdmin(access(servers.lookupd)) as admin:
        keys = [(topic, partition) for topic in topics.values() for partition in (0, 1)]
        wanted = {key: await admin.bounds(*key) for key in keys}
        leaders = {(topic, (await admin.leaders.leader(topic, partition))[0]) for topic, partition in keys}
        asked: list[str | None] = []
        led = admin.leaders.nodes.led

        async def count(leader: Leader, topic: str | None) -> dict[tuple[str, int], PartitionStats]:
            asked.append(topic)
            return await led(leader, topic)

        monkeypatch.setattr(admin.leaders.nodes, "led", count)
        assert await admin.survey(keys) == wanted
        assert len(asked) == len(leaders)
        assert list(await admin.survey(reversed(keys))) == keys[::-1]


async def test_a_survey_of_many_topics_asks_each_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    led = PartitionNodes.led

    async def count(nodes: PartitionNodes, leader: Leader, topic: str | None) -> dict[tuple[str, int], PartitionStats]:
        asked.append(topic)
        return await led(nodes, leader, topic)

    monkeypatch.setattr(PartitionNodes, "led", count)
    with Cluster(2) as cluster:
        names = [f"t{number}" for number in range(8)]
        for number, name in enumerate(names):
            cluster.create_topic(name, 2, channels=["other"])
            async with Producer(cluster.lookupd) as producer:
                await producer.publish_many(name, [b"x"] * (number + 1), partition=1)
        async with SourceAdmin(ClientConfig(tuple(cluster.lookupd))) as admin:
            found = await admin.survey([(name, partition) for name in names for partition in (0, 1)])
            assert [found[name, 1].end for name in names] == list(range(1, 9))
            assert {found[name, 0].end for name in names} == {0}
            assert asked == [None, None], "all topics of a node with one request"
            asked.clear()
            assert (await admin.survey([("t7", 1)]))["t7", 1].end == 8
            assert asked == ["t7"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_survey_contains_the_acknowledged_messages(servers: Servers, topics: dict[str, str], kind: str) -> None:
    topic = topics[kind]
    async with SourceAdmin(access(servers.lookupd)) as admin, Producer(servers.lookupd) as producer:
        keys = [(topic, 0), (topic, 1)]
        before = await admin.survey(keys)
        for number in range(1, 20):
            await producer.publish(topic, b"body", partition=1)
            found = await admin.survey(keys)
            assert found[topic, 0] == before[topic, 0]
            assert found[topic, 1].end == before[topic, 1].end + number


@pytest.mark.parametrize("kind", KINDS)
async def test_messages_are_found_by_time(servers: Servers, topics: dict[str, str], kind: str) -> None:
    topic = topics[kind]
    async with SourceAdmin(access(servers.lookupd)) as admin:
        first = (await admin.bounds(topic, 0)).end
        await publish(servers.lookupd, topic, 5)
        await anyio.sleep(0.05)
        between = int(time.time() * 1000)
        await anyio.sleep(0.05)
        await publish(servers.lookupd, topic, 5)
        assert await admin.count_at(topic, 0, 0) == 0
        assert await admin.count_at(topic, 0, between) == first + 5
        assert await admin.count_at(topic, 0, between + 60_000) == first + 10
        leader, _ = await admin.leaders.leader(topic, 0)
        for count in (first, first + 5, first + 9):
            found = await admin.leaders.nodes.message(leader, topic, 0, "count", count + 1)
            assert found.count == count
            assert await admin.count_since(topic, 0, found.timestamp) <= count
            assert await admin.count_at(topic, 0, found.timestamp // 1_000_000) <= count
            assert await admin.count_at(topic, 0, found.timestamp // 1_000_000 + 1) > count


@pytest.mark.parametrize("kind", KINDS)
async def test_the_life_of_an_anchor(servers: Servers, topics: dict[str, str], kind: str) -> None:
    topic, channel = topics[kind], f"anchor_{token_hex(4)}"
    await publish(servers.lookupd, topic, 10)
    async with SourceAdmin(access(servers.lookupd)) as admin:
        end = (await admin.bounds(topic, 0)).end
        assert await admin.anchor_count(topic, 0, channel) is None
        for count in (3, 5):
            await admin.create_anchor(topic, 0, channel, count)
            assert await admin.anchor_count(topic, 0, channel) == 3, "one that is there stays"
        for count, backwards, expected in (
            (7, False, 7),
            (2, False, 7),
            (2, True, 2),
            (0, True, 0),
            (end, False, end),
            (end, True, end),
        ):
            await admin.move_anchor(topic, 0, channel, count, backwards=backwards)
            assert await admin.anchor_count(topic, 0, channel) == expected
        async with SourceAdmin(access(servers.lookupd)) as other:
            assert await other.anchor_count(topic, 0, channel) == end
        await admin.delete_anchor(topic, 0, channel)
        await admin.delete_anchor(topic, 0, channel)
        assert await admin.anchor_count(topic, 0, channel) is None
        with pytest.raises(InvalidState, match=f"channel {channel} does not exist"):
            await admin.move_anchor(topic, 0, channel, 3)


async def test_an_anchor_whose_position_is_known_is_moved_by_one_request(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, channel = topics["plain"], f"anchor_{token_hex(4)}"
    await publish(servers.lookupd, topic, 10)
    async with SourceAdmin(access(servers.lookupd)) as admin:
        await admin.create_anchor(topic, 0, channel, 3)
        with monkeypatch.context() as patch:
            patch.setattr(admin, "position", None)
            await admin.push_anchor(topic, 0, channel, 5)
        leader, _ = await admin.leaders.leader(topic, 0)
        await admin.wait_for_move(leader, topic, 0, channel, 5)
        await admin.delete_anchor(topic, 0, channel)
        with pytest.raises(InvalidState, match=f"channel {channel} does not exist"):
            await admin.push_anchor(topic, 0, channel, 6)


async def test_the_first_retained_messages_of_a_node_are_requested_once(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, asked = topics["plain"], Counter["Leader"]()
    async with SourceAdmin(access(servers.lookupd)) as admin:
        led = admin.leaders.nodes.led

        async def count(leader: Leader, name: str | None, partition: int | None = None) -> Any:
            asked[leader] += partition is None
            return await led(leader, name, partition)

        monkeypatch.setattr(admin.leaders.nodes, "led", count)
        leader, _ = await admin.leaders.leader(topic, 1)

        async def check(partition: int) -> None:
            leader, _ = await admin.leaders.leader(topic, partition)
            bounds = await admin.bounds(topic, partition)
            assert await admin.first_retained(leader, topic, partition) == bounds.start

        for _ in range(2):  # readers ask at the same time
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(check, 0)
                tasks.start_soon(check, 1)
        assert set(asked.values()) == {1}
        monkeypatch.setattr(admin_module, "LED", -1.0)
        await admin.first_retained(leader, topic, 1)
        assert asked[leader] == 2


async def test_anchors_at_the_ends(servers: Servers, topics: dict[str, str]) -> None:
    topic = topics["plain"]
    async with SourceAdmin(access(servers.lookupd)) as admin:
        end = (await admin.bounds(topic, 1)).end
        for count in (0, end):
            channel = f"anchor_{token_hex(4)}"
            await admin.create_anchor(topic, 1, channel, count)
            assert await admin.anchor_count(topic, 1, channel) == count
            await admin.delete_anchor(topic, 1, channel)


async def test_an_anchor_behind_the_end_is_refused(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers take a place behind the end for the end, and say nothing."""
    monkeypatch.setattr(admin_module, "MOVE", 0.2)
    topic, channel = topics["plain"], f"anchor_{token_hex(4)}"
    async with SourceAdmin(access(servers.lookupd, timeout=0.5)) as admin:
        end = (await admin.bounds(topic, 0)).end
        await admin.create_anchor(topic, 0, channel, end)
        with pytest.raises(PartitionUnavailable, match=f"moved to {end + 1}, but is at {end}"):
            await admin.move_anchor(topic, 0, channel, end + 1)
        await admin.delete_anchor(topic, 0, channel)


@pytest.mark.parametrize("requests", [1, 2])
async def test_an_anchor_whose_creation_was_interrupted(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """A channel that was not moved is at the end: its position is not used as a start."""
    topic, channel = topics["extend"], f"anchor_{token_hex(4)}"
    await publish(servers.lookupd, topic, 10)
    async with SourceAdmin(access(servers.lookupd)) as admin:
        left, change = iter(range(requests)), admin.leaders.nodes.change_channel

        async def interrupted(*arguments: Any) -> None:
            if next(left, None) is None:
                raise InvalidState("killed")
            await change(*arguments)

        monkeypatch.setattr(admin.leaders.nodes, "change_channel", interrupted)
        with pytest.raises(InvalidState, match="killed"):
            await admin.create_anchor(topic, 0, channel, 4)
        monkeypatch.undo()
        assert await admin.anchor_count(topic, 0, channel) is None
        await admin.create_anchor(topic, 0, channel, 4)
        assert await admin.anchor_count(topic, 0, channel) == 4
        assert await admin.position(topic, 0, f"{channel}.setup") is None
        await admin.delete_anchor(topic, 0, channel)


async def test_the_anchors_of_a_new_query(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests for each, and statistics of the nodes; anchors at the end need no move."""
    topic, channel, asked = topics["plain"], f"anchor_{token_hex(4)}", Counter[str]()
    await publish(servers.lookupd, topic, 10, 1)
    async with SourceAdmin(access(servers.lookupd)) as admin:
        bounds = await admin.survey([(topic, 0), (topic, 1)])
        counts = {(topic, 0): bounds[topic, 0].end, (topic, 1): bounds[topic, 1].end - 4}
        ask = PartitionNodes._ask

        async def count(
            nodes: PartitionNodes, method: str, leader: Leader, path: str, *given: Any, **named: Any
        ) -> Any:
            asked[path] += 1
            return await ask(nodes, method, leader, path, *given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(PartitionNodes, "_ask", count)
            await admin.create_anchors(counts, channel)
        assert asked == {"/channel/create": 3, "/channel/delete": 1}, "no request for a position"
        found = await admin.survey(counts)
        assert not admin.is_incomplete(found, channel)
        for key, expected in counts.items():
            assert await admin.anchor_count(*key, channel) == expected == found[key].channels[channel]
            await admin.delete_anchor(*key, channel)


async def test_anchors_of_a_new_query_that_were_not_all_created(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt moves all of them, whatever the first one did, and to another start."""
    topic, channel = topics["extend"], f"anchor_{token_hex(4)}"
    for partition in range(2):
        await publish(servers.lookupd, topic, 10, partition)
    keys = [(topic, 0), (topic, 1)]
    for interrupted in ("create", "_place", "delete"):
        async with SourceAdmin(access(servers.lookupd)) as admin:
            change = admin.leaders.nodes.change_channel

            async def refuse(
                leader: Leader,
                topic: str,
                partition: int,
                action: str,
                name: str,
                *,
                at: str = interrupted,
                change: Any = change,
            ) -> None:
                if action == at and (action == "delete" or (name == channel and partition)):
                    raise InvalidState("the process ended")
                await change(leader, topic, partition, action, name)

            async def end(*_: object) -> None:
                raise InvalidState("the process ended")

            with monkeypatch.context() as patch:
                patch.setattr(admin.leaders.nodes, "change_channel", refuse)
                if interrupted == "_place":
                    patch.setattr(admin, "_place", end)
                first = keys[1:] if interrupted == "delete" else keys  # partitions may be added meanwhile
                with pytest.raises(InvalidState, match="the process ended"):
                    await admin.create_anchors(dict.fromkeys(first, 2), channel)
        async with SourceAdmin(access(servers.lookupd)) as admin:
            assert admin.is_incomplete(await admin.survey(keys), channel), interrupted
            await admin.create_anchors(dict.fromkeys(keys, 3), channel)
            assert not admin.is_incomplete(await admin.survey(keys), channel)
            for key in keys:
                assert await admin.anchor_count(*key, channel) == 3
                await admin.delete_anchor(*key, channel)


async def test_marks_of_two_interrupted_creations_are_deleted(servers: Servers, topics: dict[str, str]) -> None:
    channel, keys = f"anchor_{token_hex(4)}", [(topics["plain"], partition) for partition in range(2)]
    async with SourceAdmin(access(servers.lookupd)) as admin:
        for key in keys:
            change = admin.leaders.nodes.change_channel
            await admin.leaders.ask(*key, change, "create", setup_mark(channel, QUERY_MARK))
        await admin.create_anchors(dict.fromkeys(keys, 0), channel)
        assert not admin.is_incomplete(await admin.survey(keys), channel)
        for key in keys:
            await admin.delete_anchor(*key, channel)


async def test_new_anchors_whose_move_was_lost_are_moved_again(
    servers: Servers, topics: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "MOVE", 0.5)
    topic, channel = topics["plain"], f"anchor_{token_hex(4)}"
    await publish(servers.lookupd, topic, 3)
    async with SourceAdmin(access(servers.lookupd)) as admin:
        move, lost = admin.leaders.nodes.move, list[Any]()

        async def lose(*given: Any) -> None:
            if lost:
                await move(*given)
            lost.append(given)

        monkeypatch.setattr(admin.leaders.nodes, "move", lose)
        await admin.create_anchors({(topic, 0): 1}, channel)
        assert await admin.anchor_count(topic, 0, channel) == 1
        await admin.delete_anchor(topic, 0, channel)


async def test_unknown_topics_and_partitions(servers: Servers, topics: dict[str, str]) -> None:
    async with SourceAdmin(access(servers.lookupd)) as admin:
        with pytest.raises(TopicNotFound, match="no_such_topic"):
            await admin.leaders.partitions("no_such_topic")
        with pytest.raises(TopicNotFound, match="no_such_topic"):
            await admin.bounds("no_such_topic", 0)
        with pytest.raises(InvalidPartition, match=r"the last is 1.*partition 2"):
            await admin.bounds(topics["plain"], 2)


# On the embedded one


async def test_the_end_excludes_messages_that_are_not_committed() -> None:
    """A replica that is silent keeps a message from being acknowledged; its leader has written it all the same."""
    topic = f"t_{token_hex(4)}"
    with Cluster(nodes=3, options=ClusterOptions(lease=30.0)) as cluster:
        cluster.create_topic(topic, replicas=3, channels=["other"])
        await publish(cluster.lookupd, topic, 5)
        follower = next(name for name in cluster.in_sync(topic) if name != cluster.leader(topic))
        async with SourceAdmin(access(cluster.lookupd)) as admin, Producer(cluster.lookupd) as producer:
            leader, _ = await admin.leaders.leader(topic, 0)

            async def written() -> bool:
                return (await admin.leaders.nodes.stats(leader, topic, 0)).messages == 6

            cluster.faults.freeze(follower)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_publish_in_vain, producer, topic)
                await eventually(written)
                assert await ends(admin, topic, 0, 0.2) == (0, 5)
                assert (await admin.survey([(topic, 0)], 0.2))[topic, 0].end == 5
                found = list[int]()

                async def note_bounds() -> None:
                    found.append((await admin.bounds(topic, 0)).end)

                async def note_survey() -> None:
                    found.append((await admin.survey([(topic, 0)]))[topic, 0].end)

                tasks.start_soon(note_bounds)
                tasks.start_soon(note_survey)
                await anyio.wait_all_tasks_blocked()
                cluster.faults.heal()
            assert found == [6, 6], "both wait for what is written"


async def _publish_in_vain(producer: Producer, topic: str) -> None:
    try:
        await producer.publish(topic, b"not everywhere", partition=0)
    except NsqError:
        return


async def test_leaders_that_are_killed(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, replicas=3, channels=["other"])
    await publish(cluster.lookupd, topic, 5)
    async with SourceAdmin(access(cluster.lookupd)) as admin:
        await admin.create_anchor(topic, 0, "anchor", 2)
        for count in (3, 4):
            leader = cluster.leader(topic)
            cluster.kill(leader)
            assert (await admin.survey([(topic, 0)]))[topic, 0].end == 5
            assert await ends(admin, topic, 0) == (0, 5)
            assert await admin.anchor_count(topic, 0, "anchor") == count - 1
            await admin.move_anchor(topic, 0, "anchor", count)
            assert cluster.leader(topic) != leader
            cluster.restart(leader)
            await until(lambda: len(cluster.in_sync(topic)) == 3)


async def test_requests_to_a_former_leader(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, replicas=2, channels=["other"])
    await publish(cluster.lookupd, topic, 5)
    async with SourceAdmin(access(cluster.lookupd)) as admin:
        old, _ = await admin.leaders.leader(topic, 0)
        cluster.move_leader(topic, 0, next(name for name in cluster.in_sync(topic) if name != cluster.leader(topic)))
        for asked in (
            lambda: admin.leaders.nodes.stats(old, topic, 0),
            lambda: admin.leaders.nodes.move(old, topic, 0, "other", 2),
            lambda: admin.leaders.nodes.change_channel(old, topic, 0, "create", "new"),
        ):
            with pytest.raises(PartitionUnavailable):
                await asked()
        assert await admin.leaders.nodes.led(old, topic) == {}
        assert (await admin.survey([(topic, 0)]))[topic, 0].end == 5
        assert (await admin.leaders.leader(topic, 0))[0] != old


async def test_no_partition_is_skipped(cluster: Cluster) -> None:
    """A partition without a leader must not be omitted silently."""
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, 3, channels=["other"])
    leader = cluster.leader(topic, 1)
    cluster.kill(leader)
    try:
        async with SourceAdmin(access(cluster.lookupd, timeout=1.0)) as admin:
            try:
                assert list(await admin.leaders.partitions(topic)) == [0, 1, 2]
            except PartitionUnavailable as error:
                assert error.partition == 1
    finally:
        cluster.restart(leader)


async def test_a_partition_whose_first_messages_were_removed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["other"])
    await publish(cluster.lookupd, topic, 5)
    async with SourceAdmin(access(cluster.lookupd)) as admin:
        led, message, asked = admin.leaders.nodes.led, admin.leaders.nodes.message, list[Any]()
        third, end = (await admin.message(topic, 0, 3)).offset, (await admin.bounds(topic, 0)).end_offset

        async def cut(*given: Any) -> Any:
            return {key: evolve(stats, start=start) for key, stats in (await led(*given)).items()}

        async def find(*given: Any) -> Any:
            asked.append(given)
            if len(asked) == 1:
                raise PartitionUnavailable("the partition has just moved")
            return await message(*given)

        monkeypatch.setattr(admin.leaders.nodes, "led", cut)
        monkeypatch.setattr(admin.leaders.nodes, "message", find)
        for start, first in ((third, 3), (third, 3), (end, 5)):
            found = (await admin.survey([(topic, 0)]))[topic, 0]
            assert (found.start, found.end, found.start_offset) == (first, 5, start)
        assert len(asked) == 2, "one more after the failure"


async def test_topics_that_take_registered_channels_only(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["known"], register_channels=True)
    await publish(cluster.lookupd, topic, 5)
    async with SourceAdmin(access(cluster.lookupd)) as admin:
        assert await ends(admin, topic, 0) == (0, 5)
        await admin.move_anchor(topic, 0, "known", 2, backwards=True)
        assert await admin.anchor_count(topic, 0, "known") == 2
        with pytest.raises(ChannelNotRegistered):
            await admin.create_anchor(topic, 0, "unknown", 2)
        leader, meta = await admin.leaders.leader(topic, 0)
        with pytest.raises(ChannelNotRegistered, match="use readMode=channel"):
            await admin_module.open_ephemeral(admin.connection, leader, topic, 0, meta, ephemeral_name())


async def test_the_original_nsq_has_no_ranges() -> None:
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("t", channels=["c"])
        async with SourceAdmin(access(original.lookupd)) as admin:
            with pytest.raises(InvalidSetting, match="readMode=channel"):
                await admin.leaders.partitions("t")


async def test_lookup_that_loses_topics_or_does_not_respond(cluster: Cluster) -> None:
    """Known leaders stay known; without any, the call raises in time."""
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["other"])
    async with SourceAdmin(access(cluster.lookupd)) as admin:
        before = await admin.leaders.partitions(topic)
        cluster.faults.empty_lookup()
        assert await admin.leaders.partitions(topic) == before
        cluster.faults.heal_lookup()
    async with scripted_lookup() as node:
        silent = str(node)
    async with SourceAdmin(access([silent], timeout=0.3)) as admin:
        with pytest.raises(LookupFailed):
            await admin.leaders.partitions(topic)


async def test_a_leader_without_http_address() -> None:
    async with scripted_lookup() as node, SourceAdmin(access([node], timeout=0.3)) as admin:
        node.set_leaders({0: node.address}, num=2)
        with pytest.raises(PartitionUnavailable, match=r"returned no leader .*partition 1"):
            await admin.leaders.partitions("t")


def test_each_channel_has_its_own_mark() -> None:
    long = "x" * 60
    marks = [setup_mark(name) for name in ("c", "x" * 58, f"{long}1", f"{long}2")]
    assert marks[:2] == ["c.setup", f"{'x' * 58}.setup"]
    assert setup_mark("c", QUERY_MARK) == "c.begin"
    assert len(set(marks)) == len(marks)
    assert all(len(name) <= 64 and name.endswith(".setup") for name in marks)


def test_names_of_ephemeral_channels() -> None:
    names = {ephemeral_name(prefix) for prefix in (None, "mine", "x" * 64) for _ in range(5)}
    assert len(names) == 15
    assert all(len(name) <= 64 and name.endswith("#ephemeral") for name in names)
    assert ephemeral_name("mine").startswith("mine_")
    assert ephemeral_name().startswith("nsqext_spark_")


async def test_lookup_that_has_never_answered_fails_soon() -> None:
    """The timeout is for servers that are down for a while; addresses that never answered are probably wrong."""
    async with SourceAdmin(access(["127.0.0.1:1"], timeout=60.0), first_contact=0.3) as admin:
        with anyio.fail_after(20), pytest.raises(LookupFailed, match="check the option lookupd"):
            await admin.leaders.partitions("orders")


async def test_lookup_that_has_answered_before_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A record says so, one for all requests."""
    monkeypatch.setattr(leaders, "QUIET", 0.0)
    async with scripted_lookup() as node, SourceAdmin(access([node], timeout=0.8), first_contact=0.1) as admin:
        node.set_leaders({0: node.address}, num=2)  # the second partition has no leader
        began = anyio.current_time()
        with pytest.raises(PartitionUnavailable):
            await admin.leaders.partitions("t")
        assert anyio.current_time() - began >= 0.7
    (record,) = [found for found in caplog.records if found.name == "nsqext.partitions"]
    assert re.fullmatch(
        r"no success for \d s, trying again until 1 s are over: lookup returned no leader .*", record.message
    )
