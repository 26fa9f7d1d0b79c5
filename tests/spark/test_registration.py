"""Making the format known, with an interpreter that can run it."""

from __future__ import annotations

import atexit
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from pyspark.core.files import SparkFiles
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as sf

from nsqext._version import __version__
from nsqext.errors import InvalidState
from nsqext.spark import register, root_cause
from nsqext.spark.registration import check_pyspark, check_workers, default_source, driver_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.spark_cluster import Servers


def executable(path: Path, script: str) -> str:
    """Write a shell script; return its path."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


STREAM_FAILED = """[STREAM_FAILED] Query [id = 7] terminated with exception: [PYTHON_STREAMING_DATA_SOURCE]
Failed when Python streaming data source perform latestOffset: Traceback (most recent call last):
  File "stream.py", line 1, in latest
nsqext.errors.DataLoss: the messages from 0 to 5 are not retained any more (topic t, partition 1): use another channel
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Current State: ACTIVE"""


def test_the_error_that_counts_is_found() -> None:
    expected = (
        "DataLoss: the messages from 0 to 5 are not retained any more (topic t, partition 1): use another channel"
    )
    assert root_cause(StreamingQueryException(message=STREAM_FAILED)) == expected
    assert root_cause(ValueError("nsqext is not involved")) is None
    assert root_cause(ValueError(f"nsqext.errors.ConnectionLost: the first\n{STREAM_FAILED}")) == expected
    assert root_cause(InvalidState("it is", topic="t")) == "InvalidState: it is (topic t)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception:  SQLSTATE: XXKST\n=== Streaming",
            "PythonPlannerEnded: ",
        ),
        ("SparkException: Python worker failed to connect back.", "PythonWorkerTooSlow: "),
        ("Python worker exited unexpectedly (crashed)", "PythonWorkerEnded: "),
    ],
)
def test_the_end_of_a_process_is_named(text: str, expected: str) -> None:
    cause = root_cause(StreamingQueryException(message=text))
    assert cause is not None
    assert cause.startswith(expected)
    assert "start the query again with the same checkpoint" in cause


def test_a_session_that_has_found_the_format_registers_nothing(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would log a warning."""
    added: list[object] = []
    monkeypatch.setattr(type(spark.dataSource), "register", lambda *given: added.append(given))
    register(spark)
    assert added == []


class Session:
    """A session of Spark: what register uses of it."""

    def __init__(self, master: str = "local[2]", configured: str | None = None, *, found: bool = False) -> None:
        self._sc = SimpleNamespace(pythonExec=sys.executable, master=master, _python_includes=[])
        manager = SimpleNamespace(dataSourceExists=lambda name: found)
        self._jsparkSession = SimpleNamespace(sessionState=lambda: SimpleNamespace(dataSourceManager=lambda: manager))
        self.conf = SimpleNamespace(get=lambda name, default: configured)
        self.registered: list[str] = []  # interpreters of the registrations
        self.dataSource = SimpleNamespace(register=lambda _: self.registered.append(self._sc.pythonExec))

    def register(self) -> list[str]:
        """Register the format; return the interpreters with which it was registered."""
        register(cast("SparkSession", self))
        assert self._sc.pythonExec == sys.executable
        return self.registered


def test_a_format_is_registered_once_with_the_interpreter_of_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path))
    other = executable(tmp_path / "python", f'exec {sys.executable} "$@"')
    assert Session().register() == [sys.executable]
    assert Session(found=True).register() == []
    assert Session(configured=other, found=True).register() == [other]
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert Session(configured=other).register() == [sys.executable]


def test_workers_of_a_cluster_are_asked_for_their_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path))
    monkeypatch.setattr("nsqext.spark.registration._workers", lambda _: [("host", "python", "0.0.1", "20.0.0")])
    with pytest.raises(InvalidState, match=r"nsqext is version 0\.0\.1"):
        Session("spark://host:7077").register()
    assert Session().register() == [sys.executable]


def test_versions_of_workers() -> None:
    good = ("host", "/bin/python", __version__, "20.0.0")
    check_workers([good])
    for change, expected in (
        ((2, "ModuleNotFoundError: No module named 'nsqext'"), "worker host, /bin/python: nsqext cannot be imported"),
        ((2, "0.0.1"), f"nsqext is version 0.0.1, and {__version__} on the driver"),
        ((3, "ModuleNotFoundError: No module named 'pyarrow'"), "pyarrow cannot be imported"),
        ((3, "17.0.0"), "pyarrow is version 17.0.0: nsqext needs pyarrow 18"),
    ):
        worker = list(good)
        worker[change[0]] = change[1]
        with pytest.raises(InvalidState) as caught:
            check_workers([good, (worker[0], worker[1], worker[2], worker[3])])
        assert expected in str(caught.value)


def test_an_environment_that_is_unpacked_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark starts the relative path of the archive on the driver as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atexit, "register", lambda *_, **__: None)
    wanted = f"./environment/bin/{Path(sys.executable).name}"
    assert driver_python(wanted, "spark://host:7077", []) == wanted
    assert (tmp_path / "environment").readlink() == Path(sys.prefix)
    # the environment of this process is not started to be checked, which takes seconds
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.run", None)
        assert driver_python(wanted, "spark://host:7077", []) == wanted
    with pytest.raises(InvalidState, match="it does not exist"):
        driver_python("./other/bin/no-such-python", "yarn", [])
    assert not (tmp_path / "other").exists()
    (tmp_path / "made").mkdir()
    with pytest.raises(InvalidState, match="it does not exist"):
        driver_python(f"./made/bin/{Path(sys.executable).name}", "yarn", [])


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter that has nothing installed."""
    return executable(tmp_path / "bare", "echo 'ModuleNotFoundError: No module named numpy' >&2\nexit 1")


@pytest.mark.parametrize("version", ["3.5.6", "3.4.0"])
def test_an_old_pyspark_is_refused(version: str) -> None:
    with pytest.raises(InvalidState, match=f"PySpark is version {version}: nsqext needs 4.0"):
        check_pyspark(version)


def test_with_an_old_pyspark_the_format_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "3.5.6")
    source = default_source()
    assert source.name() == "nsqext"
    with pytest.raises(InvalidState, match=r"PySpark is version 3\.5\.6"):
        source({})


def test_a_new_pyspark_is_accepted() -> None:
    for version in ("4.0.0", "4.10.0.dev1", "5.0"):
        check_pyspark(version)


def test_this_interpreter_is_fine_everywhere() -> None:
    assert driver_python(sys.executable, "spark://host:7077", []) == sys.executable


def test_a_usable_interpreter_stays(tmp_path: Path) -> None:
    link = executable(tmp_path / "python", f'exec {sys.executable} "$@"')
    assert driver_python(link, "local[2]", []) == link


def test_files_that_spark_delivers_are_searched(tmp_path: Path) -> None:
    script = executable(
        tmp_path / "python", 'case "$PYTHONPATH" in *delivered*) exit 0;; esac\necho missing >&2; exit 1'
    )
    assert driver_python(script, "yarn", ["/delivered"]) == script
    with pytest.raises(InvalidState, match="missing"):
        driver_python(script, "yarn", [])


def test_another_environment_of_the_same_interpreter_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / Path(sys.executable).name
    link.symlink_to(Path(sys.executable).resolve())
    failed = SimpleNamespace(returncode=1, stderr="No module named 'nsqext'")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(InvalidState, match="No module named 'nsqext'"):
        driver_python(str(link), "yarn", [])


def test_an_unusable_interpreter_is_replaced_locally(bare: str) -> None:
    assert driver_python(bare, "local[*]", []) == sys.executable
    assert driver_python("no-such-python", "local", []) == sys.executable


def test_an_unusable_interpreter_is_refused_on_a_cluster(bare: str) -> None:
    with pytest.raises(InvalidState, match=r"No module named numpy.*PYSPARK_PYTHON"):
        driver_python(bare, "spark://host:7077", [])
    with pytest.raises(InvalidState, match=r"no-such-python.*it does not exist"):
        driver_python("no-such-python", "yarn", [])


def test_a_session_keeps_its_interpreter(spark: SparkSession, bare: str) -> None:
    context = spark.sparkContext
    usual = context.pythonExec
    context.pythonExec = bare
    try:
        register(spark)
        assert context.pythonExec == bare
    finally:
        context.pythonExec = usual
    # the planner runs with the interpreter that was chosen
    rows = spark.read.format("nsqext").options(lookupd="127.0.0.1:1", subscribe="t", includeHeaders="true").load()
    assert rows.columns[-2:] == ["headers", "key"]
    register(spark)


def test_spark_finds_the_format_by_itself(servers: Servers, spark: SparkSession) -> None:
    """The session has not registered the format; SQL tables work, too."""
    topic = servers.make_topic("table")
    servers.publish(topic, [b"%d" % number for number in range(5)], 0)
    other = spark.newSession()
    options = {**servers.options, "subscribe": topic}
    assert other.read.format("nsqext").options(**options).load().count() == 5 + servers.first
    given = ", ".join(f'{name} "{value}"' for name, value in {**options, "topic": topic}.items())
    other.sql(f"CREATE TABLE {topic} USING nsqext OPTIONS ({given}) COMMENT 'rows' TBLPROPERTIES ('team' = 'a')")
    try:
        rows = other.table(topic).agg(sf.count("*").alias("rows"), sf.max("offset").alias("last")).collect()
        assert [(row["rows"], row["last"]) for row in rows] == [(5 + servers.first, 4 + servers.first)]
        assert other.table(topic).columns[:2] == ["value", "topic"]
        # PySpark 4.0 does not fill columns with nulls
        other.table(topic).where(f"offset = {servers.first}").write.insertInto(topic)
        assert other.table(topic).count() == 6 + servers.first
    finally:
        other.sql(f"DROP TABLE {topic}")
