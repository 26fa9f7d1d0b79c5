"""Making the format known, with an interpreter that can run it."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nsqext.errors import InvalidState
from nsqext.spark import register
from nsqext.spark.registration import check_pyspark, driver_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter that has nothing installed."""
    script = tmp_path / "bare"
    script.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named numpy' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.mark.parametrize("version", ["4.1.4", "3.5.0"])
def test_an_old_pyspark_is_refused(version: str) -> None:
    with pytest.raises(InvalidState, match=f"PySpark is version {version}: nsqext needs 4.2"):
        check_pyspark(version)


def test_a_new_pyspark_is_fine() -> None:
    for version in ("4.2.0", "4.10.0.dev1", "5.0"):
        check_pyspark(version)


def test_this_interpreter_is_fine_everywhere() -> None:
    assert driver_python(sys.executable, "spark://host:7077", []) == sys.executable


def test_one_that_can_run_it_stays(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    link.chmod(link.stat().st_mode | stat.S_IXUSR)
    assert driver_python(str(link), "local[2]", []) == str(link)


def test_one_that_cannot_is_replaced_here(bare: str) -> None:
    assert driver_python(bare, "local[*]", []) == sys.executable
    assert driver_python("no-such-python", "local", []) == sys.executable


def test_one_that_cannot_is_refused_elsewhere(bare: str) -> None:
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
