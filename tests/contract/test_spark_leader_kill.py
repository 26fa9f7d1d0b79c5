"""A leader is killed while a task of Spark reads a range: every message once, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from anyio.to_thread import run_sync

from nsqext import Producer
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.offsets import Range
from nsqext.spark.read.range_reader import TaskReader
from tests.support.spark_readers import bodies

if TYPE_CHECKING:
    from tests.support.cluster import Killable

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

COUNT = 3000


async def test_the_task_reads_on_at_the_new_leader(killable: Killable) -> None:
    wanted = [b"message %d" % number for number in range(COUNT)]
    async with Producer(killable.lookupd) as producer:
        leader = (await producer.publish_many(killable.topic, wanted))[0].node
    client = ClientConfig(tuple(killable.lookupd), timeout=90.0)
    options = SourceOptions(client, {killable.topic: None}, rdy=10, arrow_batch_rows=100, read_timeout=90.0)
    found: list[bytes] = []
    async with TaskReader(options, [Range(killable.topic, 0, 0, COUNT)]) as reader:
        while (entry := await reader.next_block()) is not None:
            block = entry[1]
            assert block.first == len(found)
            if len(found) == 500:
                await run_sync(killable.kill, leader)
            found += bodies(block)
    assert found == wanted
