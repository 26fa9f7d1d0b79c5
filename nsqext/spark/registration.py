"""Registers the format with a Spark session, and checks that its Python workers can run it."""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.errors import AnalysisException

from nsqext._version import __version__
from nsqext.errors import InvalidState, NsqError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

logger: logging.Logger = logging.getLogger("nsqext.spark")

FORMAT = "nsqext"
"""Argument of `format()`."""
_OLDEST = (4, 0)
_OLDEST_ARROW = (18,)
_NEEDED = "import nsqext, numpy, pandas, pyarrow, pyspark"
_TIMEOUT = 60.0
_INSTALL = "see docs/howto/deploy-spark.md: install nsqext[spark] on the workers, or deliver it with spark.archives"

WorkerVersions = tuple[str, str, str, str]
"""Host, interpreter's path, versions of nsqext and pyarrow; an error text in place of a version."""


def register(spark: SparkSession) -> None:
    """Register ``format("nsqext")`` with a session, and check its Python workers.

    The format also works without this call if the module ``pyspark_nsqext`` is installed for Spark's interpreter. With
    the call, the session uses a Python that can import this package, and wrong versions on the workers raise an error
    now instead of in the first task.

    - A local master uses this process's interpreter if Spark's cannot import the package.
    - The session's ``spark.pyspark.python`` is used if ``PYSPARK_PYTHON`` is not set.
    - A relative ``PYSPARK_PYTHON`` (``./environment/bin/python`` with ``spark.archives``) exists only on the workers,
      but Spark also starts it on the driver: the call links ``./environment`` to this process's environment.

    Args:
        spark: the session; for Spark Connect the server must have the package.

    Raises:
        InvalidState: PySpark is too old, or the interpreter of the driver or of a worker cannot run the format.
    """
    check_pyspark(pyspark.__version__)
    context: SparkContext | None = getattr(spark, "_sc", None)
    if context is None:  # Spark Connect: the server chooses the interpreter
        from nsqext.spark.shipped_source import shipped_source

        _add(spark, shipped_source())
        return
    from nsqext.spark.source import NsqDataSource

    usual = context.pythonExec
    with _interpreter(context, spark.conf.get("spark.pyspark.python", None)):
        if not (context.master or "").startswith("local"):
            check_workers(_workers(context))
        if context.pythonExec != usual or not _is_found(spark):
            _add(spark, NsqDataSource)


def _is_found(spark: SparkSession) -> bool:
    """Return whether the session has the format, found by Spark or registered: a second registration would warn."""
    try:
        state: Any = spark._jsparkSession.sessionState()
        return bool(state.dataSourceManager().dataSourceExists(FORMAT))
    except Exception:  # not public: another version of Spark may lack it
        return False


def _add(spark: SparkSession, source: type[DataSource]) -> None:
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        # PySpark 4.0, which found the format itself
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def check_pyspark(version: str) -> None:
    if _numbers(version)[:2] < _OLDEST:
        raise InvalidState(
            f"PySpark is version {version}", hint="nsqext needs 4.0 or later: pip install 'nsqext[spark]'"
        )


def default_source() -> type[DataSource]:
    """Return the class that Spark finds; with an old PySpark, a class that raises when used.

    An import error would hide all other Python sources from Spark.
    """
    try:
        check_pyspark(pyspark.__version__)
    except InvalidState as error:
        return _unsupported(error)
    from nsqext.spark.source import NsqDataSource

    return NsqDataSource


def _unsupported(error: InvalidState) -> type[DataSource]:
    from pyspark.sql.datasource import DataSource

    class Unsupported(DataSource):
        def __init__(self, options: dict[str, str]) -> None:
            raise error

        @classmethod
        def name(cls) -> str:
            return FORMAT

    return Unsupported


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


@contextmanager
def _interpreter(context: SparkContext, configured: str | None) -> Iterator[None]:
    """Use an interpreter for the format that exists on the driver."""
    usual = context.pythonExec
    wanted = usual if "PYSPARK_PYTHON" in os.environ or configured is None else configured
    chosen = driver_python(wanted, context.master or "", _python_path(context))
    if chosen != usual:
        logger.info("the format nsqext runs with %s instead of %s", chosen, usual)
    context.pythonExec = chosen
    try:
        yield
    finally:
        context.pythonExec = usual


def _python_path(context: SparkContext) -> list[str]:
    """Return the files that ``--py-files`` or ``SparkContext.addPyFile`` put on the workers' path."""
    from pyspark.core.files import SparkFiles

    root = SparkFiles.getRootDirectory()
    return [root, *(str(Path(root, name)) for name in context._python_includes or ())]


def driver_python(wanted: str, master: str, path: list[str]) -> str:
    """Return an interpreter for the format that starts on driver and workers; Spark adds ``path`` to ``sys.path``."""
    is_relative = os.sep in wanted and not Path(wanted).is_absolute()
    if not master.startswith("local") and is_relative and not Path(wanted).exists():
        _link_environment(wanted)
    found = shutil.which(wanted)
    if found is not None and _environment(found) == _environment(sys.executable):
        return wanted
    problem = _problem(found, path) if found is not None else "it does not exist"
    if not problem:
        return wanted
    if master.startswith("local"):
        return sys.executable
    raise InvalidState(
        f"Spark starts {wanted} on the driver and on the workers; on the driver it cannot run nsqext: {problem}",
        hint="set PYSPARK_PYTHON, or spark.pyspark.python of the session, to an interpreter with nsqext[spark] that "
        f"has the same path on every machine; {_INSTALL}",
    )


def _environment(interpreter: str) -> tuple[Path, str]:
    """Return what two interpreters of one environment share, so that both start or neither.

    Only the folder is resolved: a virtual environment's interpreter is a link to another interpreter.
    """
    path = Path(interpreter).absolute()
    return path.parent.resolve(), path.name


def _link_environment(wanted: str) -> None:
    """Create a link on the driver at the relative path where workers unpack the archive."""
    tail = Path("bin", Path(wanted).name)
    link = Path(*Path(wanted).parts[: -len(tail.parts)])
    target = Path(sys.prefix)
    if link == Path() or Path(wanted).parts[-2:] != tail.parts or link.is_symlink() or link.exists():
        return
    if not (target / tail).exists():
        return
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    except OSError as error:
        raise InvalidState(
            f"the driver cannot link {link.absolute()} to {target}: {error.strerror or error}",
            hint=f"start the program in a writable directory, or create the link: the driver also starts {wanted}",
        ) from error
    atexit.register(link.unlink, missing_ok=True)
    logger.info("linked %s to %s: Spark starts %s on the driver as well, to plan", link, target, wanted)


def _problem(interpreter: str, path: list[str]) -> str:
    """Return why an interpreter cannot run the format; empty if it can."""
    search = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        run: Any = subprocess.run(  # noqa: S603 (the interpreter that Spark is about to run)
            [interpreter, "-c", _NEEDED],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
            env={**os.environ, "PYTHONPATH": search},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return run.stderr.strip().rpartition("\n")[2] if run.returncode else ""


# Errors

_ERROR = re.compile(r"^\s*(?:[\w.]+: )?nsqext\.errors\.(?:\w+\.)*(\w+: .+?)\s*$", re.MULTILINE)
# Spark's texts about processes, and what happened
_OF_PROCESSES = {
    re.compile(r"Python worker failed to connect back"): "PythonWorkerTooSlow: Spark gives a Python process 10 seconds "
    "to start, and this machine was busy: start the query again with the same checkpoint",
    re.compile(r"terminated with exception:\s*(?:SQLSTATE|=== |$)"): "PythonPlannerEnded: the Python process that "
    "plans the stream was killed or ran out of memory: start the query again with the same checkpoint",
    re.compile(r"Python worker exited unexpectedly"): "PythonWorkerEnded: a Python process of a task was killed or ran "
    "out of memory: start the query again with the same checkpoint, or the job again",
}


def root_cause(error: BaseException) -> str | None:
    """Return this package's error in a text of Spark, without traces and plan: ``DataLoss: the messages from 0 …``.

    The result also says that a Python process was killed or started too slowly.

    Args:
        error: an error that Spark or this package raised.

    Returns:
        Kind and message; None for another cause.
    """
    if isinstance(error, NsqError):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    found = _ERROR.findall(text)
    if found:
        return str(found[-1])
    return next((cause for pattern, cause in _OF_PROCESSES.items() if pattern.search(text)), None)


# Versions on the workers

_PROBE = """
def probe(_):
    import socket, sys
    versions = []
    for name in ("nsqext", "pyarrow"):
        try:
            versions.append(__import__(name).__version__)
        except Exception as error:
            versions.append(f"{type(error).__name__}: {error}")
    yield (socket.gethostname(), sys.executable, *versions)
"""


def _workers(context: SparkContext) -> list[WorkerVersions]:
    """Run a small job that returns the workers' versions."""
    slots = max(context.defaultParallelism, 2)
    # no function of this package: workers without the package could not load it
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    exec(_PROBE, namespace)  # noqa: S102
    probe: FunctionType = namespace["probe"]
    try:
        found: list[WorkerVersions] = context.parallelize(range(slots), slots).mapPartitions(probe).collect()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "Error" in line or "Exception" in line or "[" in line]
        raise InvalidState(
            f"the Python workers did not start: {(lines or [str(error)])[0].strip()}",
            hint=f"every worker needs Python {sys.version_info[0]}.{sys.version_info[1]} as PYSPARK_PYTHON; {_INSTALL}",
        ) from error
    return found


def check_workers(workers: list[WorkerVersions]) -> None:
    for host, interpreter, package, arrow in workers:
        where = f"worker {host}, {interpreter}"
        for name, found in (("nsqext", package), ("pyarrow", arrow)):
            if not found[:1].isdecimal():
                raise InvalidState(f"{where}: {name} cannot be imported: {found}", hint=_INSTALL)
        if package != __version__:
            raise InvalidState(
                f"{where}: nsqext is version {package}, and {__version__} on the driver",
                hint="install the same version on all machines",
            )
        if _numbers(arrow) < _OLDEST_ARROW:
            raise InvalidState(f"{where}: pyarrow is version {arrow}", hint="nsqext needs pyarrow 18 or later")
