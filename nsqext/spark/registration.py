"""Making the format known to a Spark session, with workers that can run it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("check_version", "choose_interpreter", "register")

logger: logging.Logger = logging.getLogger("nsqext.spark")

_OLDEST = (4, 2)
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_NEEDED = "import nsqext, numpy, pandas, pyarrow, pyspark"
_TIMEOUT = 60.0


def register(spark: SparkSession) -> None:
    """Make ``format("nsqext")`` known to a session; call it once for each session, before the first read or write.

    Spark runs sources in processes of their own, with the interpreter that ``PYSPARK_PYTHON`` or
    ``spark.pyspark.python`` names, and ``python3`` without. Where that one cannot import this package, local masters
    use this process's interpreter for the format, and other masters are refused.

    Filters are pushed down to the source where ``spark.sql.python.filterPushdown.enabled`` is on at this moment; call
    it again after turning that on or off.

    Args:
        spark: the session.

    Raises:
        InvalidState: PySpark is too old, or the workers' interpreter lacks this package.
    """
    check_version(pyspark.__version__)
    from nsqext.spark.source import NsqDataSource, PushingDataSource

    source = PushingDataSource if spark.conf.get(_PUSHDOWN, "false") == "true" else NsqDataSource
    with _interpreter(spark):
        spark.dataSource.register(source)


def check_version(version: str) -> None:
    """Raise if a version of PySpark lacks what is needed.

    Raises:
        InvalidState: it is too old.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < _OLDEST:
        raise InvalidState(
            f"PySpark is version {version}", hint="nsqext needs 4.2 or later: pip install 'nsqext[spark]'"
        )


@contextmanager
def _interpreter(spark: SparkSession) -> Iterator[None]:
    """See to an interpreter that can run the format, while it is registered."""
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has none: its server decides
    if context is None:
        yield
        return
    usual = context.pythonExec
    chosen = choose_interpreter(usual, context.master)
    if chosen != usual:
        logger.info("the format %s runs with %s: %s cannot import it", "nsqext", chosen, usual)
    context.pythonExec = chosen
    try:
        yield
    finally:
        context.pythonExec = usual


def choose_interpreter(usual: str, master: str) -> str:
    """Return the interpreter that is to run the format.

    Args:
        usual: the one that Spark would take.
        master: where Spark runs.

    Raises:
        InvalidState: the usual one lacks what is needed, and no other one can be named.
    """
    found = shutil.which(usual)
    # not resolved: the interpreter of a virtual environment is a link to another one
    if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return usual
    problem = _problem(found) if found is not None else "it is not found"
    if not problem:
        return usual
    if master.startswith("local"):
        return sys.executable
    raise InvalidState(
        f"Spark's workers run {usual}, which cannot run nsqext here: {problem}",
        hint="set PYSPARK_PYTHON or spark.pyspark.python to an interpreter that has nsqext[spark], on every machine",
    )


def _problem(interpreter: str) -> str:
    """Return why an interpreter cannot run the format; nothing if it can."""
    try:
        run: Any = subprocess.run(  # noqa: S603 (the interpreter that Spark is about to run)
            [interpreter, "-c", _NEEDED], capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return run.stderr.strip().rpartition("\n")[2] if run.returncode else ""
