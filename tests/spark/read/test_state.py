"""Keyed state over a topic: ``transformWithState`` continues after a restart.

PySpark needs the package protobuf for it, and has no extra that installs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tests.support.spark_queries import run_to_end, starting

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.spark_cluster import Servers

pytestmark = pytest.mark.skipif(
    find_spec("google") is None or find_spec("google.protobuf") is None, reason="protobuf is not installed"
)

_ROCKS = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Totals(StatefulProcessor):
    """The sum of the numbers of a key."""

    def init(self, handle: Any) -> None:
        self._total: Any = handle.getValueState("total", "total bigint")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        import pandas as pd

        total = self._total.get()[0] if self._total.exists() else 0
        total += sum(int(frame["number"].sum()) for frame in rows)
        self._total.update((total,))
        yield pd.DataFrame({"key": [key[0]], "total": [total]})


def test_state_of_keys_is_kept_over_a_restart(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("state", 2)
    options = {"subscribe": topic, "channel": "state", "startingOffsets": starting(servers.first, {topic: 2})}
    words = sf.split(sf.col("value").cast("string"), " ")
    seen: list[dict[str, int]] = []

    def take(rows: DataFrame, batch: int) -> None:
        seen.append({row.key: row.total for row in rows.collect()})

    def run() -> None:
        rows = spark.readStream.format("nsqext").options(**servers.options, **options).load()
        totals = (
            rows.select(words[0].alias("key"), words[1].cast("bigint").alias("number"))
            .groupBy("key")
            .transformWithStateInPandas(Totals(), "key string, total bigint", "Update", "None")
        )
        writer = totals.writeStream.outputMode("update").option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_end(writer.foreachBatch(take).trigger(availableNow=True).start)

    spark.conf.set("spark.sql.streaming.stateStore.providerClass", _ROCKS)
    try:
        for partition in range(2):
            servers.publish(topic, [b"%b %d" % (b"ab"[number % 2 :][:1], number) for number in range(10)], partition)
        run()
        servers.publish(topic, [b"a 100", b"c 7"], 0)
        run()
    finally:
        spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    assert [batch for batch in seen if batch] == [{"a": 40, "b": 50}, {"a": 140, "c": 7}]
