"""A stream that is appended to an Iceberg table is exactly once, though its driver is killed and repeats a batch.

Runs where ``NSQEXT_TEST_ICEBERG_PACKAGE`` names the Maven package of Iceberg for the installed PySpark, for example
``org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0`` with PySpark 4.1; Spark downloads it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import ROOT, java_version
from tests.support.missing import reason_without
from tests.support.spark_queries import forget_last_commit

if TYPE_CHECKING:
    from tests.support.spark_cluster import Servers

PACKAGE = os.environ.get("NSQEXT_TEST_ICEBERG_PACKAGE", "")
_ROWS = 600

pytestmark = [
    pytest.mark.skipif(not PACKAGE, reason="NSQEXT_TEST_ICEBERG_PACKAGE does not name a Maven package of Iceberg"),
    pytest.mark.skipif(java_version() < 17, reason=reason_without("Java 17", "openjdk-17-jre-headless")),
    pytest.mark.timeout(400),
]


def run(folder: Path, options: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the stream to its end, or to its death."""
    return subprocess.run(
        [sys.executable, "-m", "tests.spark.iceberg_append", str(folder), json.dumps(options | {"package": PACKAGE})],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=350,
        start_new_session=True,
    )


def test_each_message_is_in_the_table_once_after_kills(servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("iceberg", 2)
    bodies = [[b"%d-%d" % (partition, number) for number in range(_ROWS)] for partition in range(2)]
    for partition in range(2):
        servers.publish(topic, bodies[partition], partition)
    start = json.dumps({topic: dict.fromkeys(("0", "1"), servers.first)})
    options = servers.options | {"subscribe": topic, "channel": "iceberg", "startingOffsets": start}
    options["maxOffsetsPerTrigger"] = "200"
    for batch in ("1", "3"):
        killed = run(tmp_path, options | {"die_after": batch})
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-5000:]
        # as if it had died before Spark noted the batch, which is in the table
        assert forget_last_commit(tmp_path / "checkpoint") >= int(batch)
    done = run(tmp_path, options)
    assert done.returncode == 0, done.stderr[-5000:]
    found = sorted(json.loads((tmp_path / "found.json").read_text()))
    assert found == [
        [partition, servers.first + number, body.decode()]
        for partition in range(2)
        for number, body in enumerate(bodies[partition])
    ]
