"""``nsqext key-ranges`` on a cluster, and its table."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import anyio
import pytest
from rich.console import Console

from nsqext import Admin, Consumer, OutgoingMessage, Producer
from nsqext.admin import KeyRange
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.admin.key_ranges import PartitionRanges, look, make_table
from nsqext.errors import InvalidSetting, LookupFailed, OperationNotSupported
from nsqext.errors.server import BadChannel
from tests.support import plain_http

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.admin import TopicInfo

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The event loop of the tests: commands run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes."""
    with Cluster(nodes=2) as cluster:
        for topic in ("plain", "once"):
            cluster.create_topic(topic, channels=["ch"])
        yield cluster


async def test_ranges_reported_by_the_leaders(cluster: Cluster) -> None:
    topic = "seen"
    cluster.create_topic(topic, partitions=2, extend=True, channels=["ch"])

    def make(most: int) -> Consumer:
        return Consumer(
            topic, "ch", lookupd=cluster.lookupd, dispatch="key_failover", max_in_flight=most, initial_ready=most
        )

    async with Admin(cluster.lookupd) as admin:
        assert {one.error for one in await look(admin, topic, "ch")} == {"no consumer, so the channel has no type yet"}
        async with make(2), make(200), Producer(cluster.lookupd) as producer:
            await producer.publish_many(
                topic, [OutgoingMessage(b"x", key=f"k{number}") for number in range(50)], partition=0
            )
            with anyio.fail_after(25):
                while not (found := await look(admin, topic, "ch"))[0].replay:  # noqa: ASYNC110 - there is no event
                    await anyio.sleep(0.01)
    assert [(line.low, line.high) for line in found[1].ranges] == [(0.0, 0.5), (0.5, 1.0)]
    assert found[0].depth == 50
    assert found[0].held_keys > 1
    assert sum(line.waiting for line in found[0].ranges) == found[0].replay


async def test_other_channels_are_refused(cluster: Cluster) -> None:
    async with Admin(cluster.lookupd) as admin:
        with pytest.raises(BadChannel, match="no partition has the channel nothing"):
            await look(admin, "plain", "nothing")
        async with Consumer("plain", "ch", lookupd=cluster.lookupd):
            with pytest.raises(InvalidSetting, match="is not of type key_failover"):
                await look(admin, "plain", "ch")


async def test_the_original_nsq_has_no_key_ranges() -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        cluster.create_topic("orders", channels=["ch"])
        async with Admin(cluster.lookupd) as admin:
            with pytest.raises(OperationNotSupported, match="the original NSQ has no key ranges"):
                await look(admin, "orders", "ch")


async def test_a_partition_without_leader_is_shown() -> None:
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=2, replicas=1, channels=["ch"])
        async with Admin(cluster.lookupd) as admin:
            node = cluster.nodes[cluster.leader("orders", 1)]
            cluster.kill(node.name)
            with anyio.fail_after(25):
                while not (found := await look(admin, "orders", "ch"))[1].error:  # noqa: ASYNC110 - there is no event
                    await anyio.sleep(0.01)
            (absent, _) = await look(admin, "orders", "absent")
    assert absent.error == "no such channel", "the other partition may have it"
    assert (found[0].error, found[1].error in ("no leader", "no response")) == (
        "no consumer, so the channel has no type yet",
        True,
    )


async def test_partitions_whose_leaders_do_not_respond_are_shown() -> None:
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=2, replicas=1, channels=["ch"])
        cluster.faults.stale_lookup()
        async with Admin(cluster.lookupd) as admin:
            cluster.kill(cluster.leader("orders", 1))
            found = await look(admin, "orders", "ch")
            assert [one.error for one in found] == ["no consumer, so the channel has no type yet", "no response"]
            cluster.kill(cluster.leader("orders", 0))
            found = await look(admin, "orders", "ch")
    assert [(one.partition, one.error[:22]) for one in found] == [
        (0, "no response to /stats:"),
        (1, "no response to /stats:"),
    ]


def test_the_command_looks_once(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    node = cluster.nodes[cluster.leader("once")]
    created = plain_http.post(f"http://{node.http}/channel/create?topic=once&channel=ch&dispatch=key_failover")
    assert created.status_code == 200
    with pytest.raises(SystemExit) as end:
        main(["key-ranges", "once", "ch", "--lookupd", cluster.lookupd[0], "--once"])
    assert not end.value.code
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["topic"], found["channel"], found["partition"]) == ("once", "ch", 0)
    assert (found["ranges"], found["error"]) == ([], "")
    with pytest.raises(SystemExit) as end:
        main(["key-ranges", "missing", "ch", "--lookupd", cluster.lookupd[0], "--once"])
    assert end.value.code
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["key-ranges", "once", "ch", "--lookupd", cluster.lookupd[0], "--once", "--interval", "2"])
    assert end.value.code
    assert "--interval with --once would be ignored" in capsys.readouterr().err


def test_the_command_goes_on_while_lookup_does_not_respond(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, looks = Admin.topic, iter((None, LookupFailed("lookup is down"), KeyboardInterrupt()))

    async def topic(admin: Admin, name: str) -> TopicInfo:
        if (error := next(looks)) is not None:
            raise error
        return await known(admin, name)

    monkeypatch.setattr(Admin, "topic", topic)
    with pytest.raises(SystemExit, match="130"):
        main(["key-ranges", "once", "ch", "--lookupd", cluster.lookupd[0], "--interval", "0.05"])
    assert [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()][1:] == ["lookup is down"]


def test_the_table() -> None:
    ranges = (
        KeyRange(0.0, 0.5, "127.0.0.1:1", None, 12.34, 0),
        KeyRange(0.5, 1.0, "127.0.0.1:2", "canary", 1.0, 7),
    )
    others = [KeyRange(0.1 * number, 0.1 * number + 0.1, f"127.0.0.1:{number}", None, 0.0, 0) for number in range(10)]
    found = [
        PartitionRanges(0, ranges=ranges, replay=7),
        PartitionRanges(1, error="no leader", replay=5),
        PartitionRanges(2, ranges=(*others,)),
    ]
    out = io.StringIO()
    console = Console(file=out, width=140)
    console.print(make_table("t / ch", found, 106))
    text = out.getvalue()
    for piece in ("t / ch", "█" * 20 + "·" * 20, "·" * 20 + "█" * 20, "12.3", "127.0.0.1:2 (tag canary)", "no leader"):
        assert piece in text
    (footer,) = (line.split() for line in text.splitlines() if "in all" in line)
    assert footer == ["10", "in", "all", "13.3", "12"]
