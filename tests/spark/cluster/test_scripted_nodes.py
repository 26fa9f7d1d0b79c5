"""Requests of a query to scripted nodes: what a leader change removes, channels that are made and moved meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from nsqext.errors import LookupFailed, PartitionUnavailable
from nsqext.partitions import ChannelPosition, Leader, MessagePosition
from nsqext.spark.cluster import admin as admin_module
from nsqext.spark.cluster.admin import Bounds, SourceAdmin, setup_mark
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.types import TopicMeta
from tests.support.range_scene import LEADER

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


class Nodes:
    """The leaders and nodes of a `SourceAdmin`.

    Attributes:
        channels: positions of the channels.
        logs: written and committed messages, as the node reports them in turn; the last of these stays.
    """

    def __init__(self, *logs: tuple[int, int], **channels: int) -> None:
        self.logs = list(logs)
        self.channels = channels

    @property
    def nodes(self) -> Nodes:
        return self

    async def ask(self, topic: str, partition: int, request: Callable[..., Awaitable[Any]], *args: object) -> Any:
        return await request(LEADER, topic, partition, *args)

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        return LEADER, TopicMeta()

    async def stats(self, *_: object) -> SimpleNamespace:
        messages, committed = self.logs.pop(0) if len(self.logs) > 1 else self.logs[0]
        return SimpleNamespace(messages=messages, committed=committed, start=0, end=10 * messages, channels={})

    async def position(self, leader: object, topic: str, partition: int, channel: str) -> ChannelPosition | None:
        count = self.channels.get(channel)
        return None if count is None else ChannelPosition(100, count, 10 * count)

    async def change_channel(self, leader: object, topic: str, partition: int, action: str, channel: str) -> None:
        if action == "delete":
            del self.channels[channel]
        else:
            self.channels.setdefault(channel, 100)

    async def move(self, leader: object, topic: str, partition: int, channel: str, count: int) -> None:
        self.channels[channel] = count


def admin_of(nodes: Nodes) -> SourceAdmin:
    admin = SourceAdmin(ClientConfig(("127.0.0.1:1",)))
    admin.leaders = nodes  # type: ignore[assignment]
    return admin


async def test_messages_that_a_leader_change_removed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new leader has three of five messages, and will never have the others."""
    ended: list[bool] = []

    async def opened(*_: object) -> SimpleNamespace:
        return SimpleNamespace(end=lambda: ended.append(True))

    monkeypatch.setattr(admin_module, "open_ephemeral", opened)
    monkeypatch.setattr(admin_module, "_SOON", 0.0)  # the first wait asks once
    with anyio.fail_after(25):
        bounds = await admin_of(Nodes((5, 3), (5, 3), (3, 3))).bounds("t", 0, patience=3600.0)
    assert (bounds, ended) == (Bounds(0, 3, 30), [True])


async def test_a_channel_that_is_ahead_is_not_where_it_was_moved_to() -> None:
    """Messages before it would be left out."""
    admin = admin_of(Nodes(spark=7))
    assert (await admin.wait_for_move(LEADER, "t", 0, "spark", 7)).count == 7
    with pytest.raises(PartitionUnavailable, match="was moved to 5, but is at 7"):
        await admin.wait_for_move(LEADER, "t", 0, "spark", 5, timeout=0.01)


async def test_the_mark_of_an_incomplete_anchor_is_deleted_with_it() -> None:
    nodes = Nodes(spark=7, other=3)
    nodes.channels[setup_mark("spark")] = 7
    await admin_of(nodes).delete_anchor("t", 0, "spark")
    assert nodes.channels == {"other": 3}


async def test_an_anchor_that_another_process_made_meanwhile_keeps_its_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a channel does not exist is believed for some seconds only."""
    nodes = Nodes()
    admin = admin_of(nodes)
    assert await admin.anchor_count("t", 0, "spark") is None
    nodes.channels["spark"] = 7
    monkeypatch.setattr(admin_module, "_MISSING", -1.0)
    await admin.create_anchor("t", 0, "spark", 50)
    assert nodes.channels == {"spark": 7}


async def test_an_anchor_that_was_just_missing_is_made_without_another_look() -> None:
    nodes = Nodes()
    admin = admin_of(nodes)
    assert await admin.anchor_count("t", 0, "spark") is None
    with anyio.fail_after(5):
        await admin.create_anchor("t", 0, "spark", 50)
    assert nodes.channels == {"spark": 50}


async def test_an_anchor_that_is_made_again_has_a_mark_again() -> None:
    """It was deleted, and another process creates it: before it is moved, it is at the end."""
    nodes = Nodes(spark=7)
    admin = admin_of(nodes)
    assert await admin.anchor_count("t", 0, "spark") == 7
    nodes.channels.clear()
    assert await admin.anchor_count("t", 0, "spark") is None
    nodes.channels.update({"spark": 100, setup_mark("spark"): 100})
    assert await admin.anchor_count("t", 0, "spark") is None


async def test_an_anchor_whose_leader_lookup_does_not_tell_is_moved_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unknown(*_: object) -> None:
        raise LookupFailed("it does not respond")

    nodes = Nodes(spark=7)
    monkeypatch.setattr(nodes, "leader", unknown)
    await admin_of(nodes).push_anchor("t", 0, "spark", 9)
    assert nodes.channels == {"spark": 9}


async def test_a_partition_does_not_begin_behind_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages were removed, and others published, after its statistics were read."""

    async def message(*_: object) -> MessagePosition:
        return MessagePosition(5, 5, 50, 1)

    async def stats(*_: object) -> SimpleNamespace:
        return SimpleNamespace(messages=3, committed=3, start=20, end=30, channels={})

    nodes = Nodes()
    monkeypatch.setattr(nodes, "stats", stats)
    monkeypatch.setattr(nodes, "message", message, raising=False)
    bounds = await admin_of(nodes).bounds("t", 0)
    assert (bounds.start, bounds.end) == (3, 3)
