"""One planning process of a machine for a channel."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from nsqext.errors import InvalidState
from nsqext.spark import root_cause
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.planner_lock import PlannerLock
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.spark_cluster import Servers


def options(**given: str) -> SourceOptions:
    wanted = {"lookupd": "127.0.0.1:1", "subscribe": "planned", "channel": "lock", **given}
    return SourceOptions.parse(wanted, streaming=True)


def test_a_channel_is_locked_until_it_is_released() -> None:
    first, second = PlannerLock(options()), PlannerLock(options(minPartitions="3"))
    others = [PlannerLock(options(channel="other")), PlannerLock(options(subscribe="other"))]
    first.acquire()
    try:
        with pytest.raises(InvalidState, match="another stream on this machine reads through the channel lock"):
            second.acquire(patience=0)
        for other in others:
            other.acquire(patience=0)
            other.release()
    finally:
        first.release()
    second.acquire(patience=0)
    second.release()


def test_the_order_of_lookup_addresses_does_not_matter() -> None:
    first, second = (
        PlannerLock(options(lookupd=text)) for text in ("127.0.0.1:1,127.0.0.1:2", "127.0.0.1:2,127.0.0.1:1")
    )
    first.acquire()
    try:
        with pytest.raises(InvalidState):
            second.acquire(patience=0)
    finally:
        first.release()


def test_a_refused_lock_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = os.open

    def noted(*given: Any) -> int:
        opened.append(real(*given))
        return opened[-1]

    lock = PlannerLock(options())
    lock.acquire()
    try:
        monkeypatch.setattr(os, "open", noted)
        with pytest.raises(InvalidState):
            PlannerLock(options()).acquire(patience=0)
        assert len(opened) == 1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(opened[0])
    finally:
        lock.release()


def test_a_self_join_names_what_it_needs(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("joined", 1)
    servers.publish(topic, [b"a", b"b"])

    options = servers.options | {"subscribe": topic, "channel": "self", "startingOffsets": "earliest"}
    rows = spark.readStream.format("nsqext").options(**options).load().select("value", "offset")
    writer = rows.join(rows.withColumnRenamed("offset", "other"), "value").writeStream.format("noop")
    with pytest.raises(StreamingQueryException) as caught:
        run_to_end(writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start)
    cause = root_cause(caught.value)
    assert cause is not None
    assert "a self-join, two queries of one DataFrame" in cause
    assert "call load() for each use" in cause
