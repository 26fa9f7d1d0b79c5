"""Two attempts of one task at the same time: each row is there once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.spark.conftest import ROOT, java_version
from tests.spark.speculating import SLOW
from tests.support.spark_cluster import running_servers

_MESSAGES = 600
_PARTITIONS = 2
_DEADLINE = 60.0
_READY = re.compile(r"Starting Spark master at (spark://[\d.:]+)")
_CLASS = "org.apache.spark.deploy"

pytestmark = [
    pytest.mark.skipif(java_version() < 17, reason="Java 17 is missing"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs more than one loopback address"),
    pytest.mark.timeout(240),
]


def _spark_class() -> str:
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin" / "spark-class")


@contextmanager
def _running(log: Path, host: str, *command: str) -> Iterator[Callable[[], str]]:
    """Run a program of Spark, and give a function that reads what it has said; all of it ends with the context."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(Path(_spark_class()).parent.parent),
        "SPARK_LOCAL_IP": host,
        "SPARK_LOCAL_HOSTNAME": host,
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [_spark_class(), *command], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield log.read_text
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _until_said(expected: Callable[[], str], wanted: re.Pattern[str]) -> str:
    end = time.monotonic() + _DEADLINE
    while (found := wanted.search(expected())) is None:
        assert time.monotonic() < end, expected()
        time.sleep(0.1)
    return found[1]


@contextmanager
def _standalone(folder: Path) -> Iterator[str]:
    """Run a master and two workers of one core each, on two hosts; gives the master's address."""
    with ExitStack() as stack:
        master = (f"{_CLASS}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        expected = stack.enter_context(_running(folder / "master.log", "127.0.0.1", *master))
        address = _until_said(expected, _READY)
        for host in ("127.0.0.2", "127.0.0.3"):
            ports = ("--host", host, "--port", "0", "--webui-port", "0")
            size = ("-c", "1", "-m", "600m", "-d", str(folder / host))
            worker = (f"{_CLASS}.worker.Worker", *ports, *size, address)
            stack.enter_context(_running(folder / f"{host}.log", host, *worker))
        yield address


def test_a_task_that_runs_twice_at_once(tmp_path: Path) -> None:
    with running_servers() as servers, _standalone(tmp_path) as master:
        topic = servers.make_topic("speculated", _PARTITIONS, extend=False)
        wanted = []
        for partition in range(_PARTITIONS):
            bodies = [b"%d-%d" % (partition, number) for number in range(_MESSAGES)]
            servers.publish(topic, bodies, partition)
            wanted += [[partition, servers.first + number, body.decode()] for number, body in enumerate(bodies)]
        start = json.dumps({topic: {str(partition): servers.first for partition in range(_PARTITIONS)}})
        options = {"subscribe": topic, "channel": "spark", "minPartitions": "4", "arrowBatchRows": "50"}
        arguments = (master, str(tmp_path), json.dumps(servers.options | options | {"startingOffsets": start}))
        program = subprocess.run(
            [sys.executable, "-m", "tests.spark.speculating", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
    assert program.returncode == 0, program.stderr
    attempts = {path.name for path in tmp_path.glob(f"attempt-{SLOW}-*")}
    assert attempts == {f"attempt-{SLOW}-0", f"attempt-{SLOW}-1"}
    assert sorted(json.loads((tmp_path / "found.json").read_text())) == wanted
