"""Range readers for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self

import anyio

from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.offsets import plan_tasks
from nsqext.spark.read.range_reader import RangeReader
from tests.support import plain_http

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.spark.cluster.client_config import ClientConfig
    from nsqext.spark.read.frames import Block
    from nsqext.spark.read.offsets import Range

__all__ = ("SingleReader", "bodies", "ephemeral_channels", "split")


class SingleReader(RangeReader):
    """A range reader with a task group and an `SourceAdmin` of its own: an asynchronous context manager."""

    def __init__(
        self,
        config: ClientConfig,
        found: Range,
        *,
        timeout: float | None = None,
        block_rows: int = 2000,
        **given: Any,
    ) -> None:
        options = SourceOptions(
            config,
            {found.topic: None},
            read_timeout=config.timeout if timeout is None else timeout,
            arrow_batch_rows=block_rows,
            **given,
        )
        super().__init__(SourceAdmin(config), found, options)

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self.run)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await self._admin.aclose()

    async def __aiter__(self) -> AsyncIterator[Block]:
        while (block := await self.next_block()) is not None:
            yield block


def split(found: Range, parts: int) -> list[Range]:
    """Return a range in parts of equal size."""
    return [piece for task in plan_tasks([found], min_tasks=parts, max_tasks=parts) for piece in task]


def bodies(block: Block) -> list[bytes]:
    """Return the bodies of the messages of a block."""
    assert block.columns.bodies is not None
    return block.columns.bodies


def ephemeral_channels(cluster: Cluster, topic: str) -> set[str]:
    """Return the channels that readers of a topic have at running nodes."""
    found: set[str] = set()
    for node in cluster.nodes.values():
        stats = plain_http.get(f"http://{node.http}/stats?format=json&topic={topic}").json()
        for listed in stats.get("data", stats)["topics"]:
            found |= {one["channel_name"] for one in listed["channels"] if "#ephemeral" in one["channel_name"]}
    return found
