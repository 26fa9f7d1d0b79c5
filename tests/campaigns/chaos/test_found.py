"""Bugs that schedules have found, each as a test of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define

from nsqext.broker.fault_injection import NodeFaults
from nsqext.broker.nsqd.publish_commands import commit
from nsqext.protocol.server.request_error import RequestError

pytestmark = pytest.mark.anyio


@define
class Record:
    """Stands for a stored record."""

    size: int = 10
    parts: tuple[object, ...] = ()


async def test_a_publish_is_not_acknowledged_when_the_leader_changed_before_the_replicas_had_it() -> None:
    """The demoted leader replicated nothing, and acknowledged the publish."""
    node = SimpleNamespace(publish_failed=0, may_write=lambda _: True, faults=NodeFaults())
    committed: list[object] = []
    partition = SimpleNamespace(commit=lambda stored, flushed: committed.append(stored))
    hosted = SimpleNamespace(partition=partition, epoch=2, replicate=None, leader=True, waiting=0, failed=0)

    def answer() -> None:
        committed.append("OK")

    args = cast("tuple[Any, Any, Any]", (node, hosted, Record()))
    with pytest.raises(RequestError) as caught:
        await commit(*args, epoch=1, code="E_PUB_FAILED", answer=answer)
    assert caught.value.code == "E_FAILED_ON_NOT_WRITABLE"
    assert (committed, hosted.waiting, hosted.failed, node.publish_failed) == ([], 0, 1, 1)
    await commit(*args, epoch=2, code="E_PUB_FAILED", answer=answer)
    assert committed == ["OK", Record()], "acknowledged before the delivery, which may go to the same client"
