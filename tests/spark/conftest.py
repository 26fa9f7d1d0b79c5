"""One Spark session and one cluster for all tests of Spark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.missing import skip_without
from tests.support.spark_cluster import REAL, Servers, running_servers
from tests.support.spark_python import forked_python
from tests.support.spark_standalone import SESSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
_JAVA = 17
_SLOW = 200
_PATIENT = 300


def pytest_configure(config: pytest.Config) -> None:
    """Allow PySpark 4.0 and 4.1 to leave the sockets of results open."""
    if find_spec("pyspark") is not None and find_spec("pyspark.sql.streaming.datasource") is None:
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time to what starts Java, and more to what waits for topics of a real cluster."""
    for item in items:
        if item.path.is_relative_to(HERE) and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_PATIENT if REAL else _SLOW))


def java_version() -> int:
    """Return the version of the Java that Spark uses; 0 without Java."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        return 0
    expected = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30).stderr
    found = re.search(r'version "(\d+)', expected)
    return int(found[1]) if found else 0


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session that knows the format, with two workers and a second try for tasks; tests are skipped without Java."""
    if java_version() < _JAVA:
        skip_without(f"Java {_JAVA}", "openjdk-17-jre-headless")
    from pyspark.sql import SparkSession

    from nsqext.spark import register
    from tests.support.spark_home import link_spark

    folder = tmp_path_factory.mktemp("spark")
    link_spark(folder / "home")
    with pytest.MonkeyPatch.context() as patch, forked_python() as python:
        # workers import the modules of the tests, whose functions are sent to them
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
        patch.setenv("PYSPARK_PYTHON", python)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("SPARK_HOME", str(folder / "home"))
        session = (
            SparkSession.builder.master("local[2, 2]")
            .appName("nsqext tests")
            .config(map=SESSION)
            # queries that run once are not worth their compilation
            .config("spark.sql.codegen.wholeStage", "false")
            .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
            .config("spark.sql.adaptive.enabled", "false")
            .config("spark.sql.shuffle.partitions", "1")
            # a stream looks for messages 20 times a second instead of 100
            .config("spark.sql.streaming.pollingDelay", "50ms")
            # Hadoop starts a program for each file of a checkpoint, and for that of its checksum
            .config("spark.hadoop.fs.AbstractFileSystem.file.impl", "org.apache.hadoop.fs.local.RawLocalFs")
            .config("spark.sql.streaming.checkpoint.fileChecksum.enabled", "false")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .config("spark.local.dir", str(folder / "local"))
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )
        patch.delenv("SPARK_HOME")  # programs of tests start sessions of their own
        session.sparkContext.setLogLevel("ERROR")
        register(session)
        try:
            yield session
        finally:
            session.stop()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The embedded cluster of three nodes, or the real one that NSQEXT_TEST_LOOKUPD names."""
    with running_servers() as servers:
        yield servers
