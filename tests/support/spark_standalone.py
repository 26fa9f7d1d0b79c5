"""A standalone Spark cluster from the pyspark package: a master and workers, each a process on 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

__all__ = ("JAVA_OPTIONS", "SESSION", "Standalone", "archive_of_link", "archive_of_venv", "interpreter", "standalone")

JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""Make a Java process that runs for seconds start with less than half of the CPU time: it does not verify Spark's
classes, and compiles them quickly instead of well."""

SESSION: dict[str, Any] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.sql.shuffle.partitions": "2",
    # a busy machine may stop processes for longer than the defaults of 120 and 15 seconds
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "120s",
}
"""Settings of every session."""

_HOST = "127.0.0.1"
_HOSTS = ("127.0.0.2", "127.0.0.3") if sys.platform.startswith("linux") else (_HOST, _HOST)
"""Of the workers. Spark repeats a slow task on another host only; Linux has all of 127.0.0.0/8 on its loopback."""
_START = 120.0
_EXECUTOR = "CoarseGrainedExecutorBackend"


@define
class Standalone:
    """A running cluster.

    Attributes:
        folder: for logs and the workers' files.
        url: address of the master.
        workers: the worker processes.
    """

    folder: Path
    master: subprocess.Popen[bytes]
    url: str
    workers: list[subprocess.Popen[bytes]] = field(factory=list)

    def start_workers(self) -> None:
        """Start two workers of two cores each, and wait until the master knows them."""
        for number, host in enumerate(_HOSTS):
            words = ["--host", host, "--cores", "2", "--memory", "1g", "--webui-port", "0"]
            work = ["--work-dir", str(self.folder / f"work{number}"), self.url]
            log = self.folder / f"worker{number}.log"
            self.workers.append(_start("org.apache.spark.deploy.worker.Worker", [*words, *work], log, host))
        for number, process in enumerate(self.workers):
            _wait_for_line(self.folder / f"worker{number}.log", r"Successfully registered with master", process)

    def executors(self, worker: int) -> list[int]:
        """Return the process ids of the executors of a worker."""
        return [pid for pid in _children(self.workers[worker].pid) if _EXECUTOR in _command(pid)]

    def kill_executor(self, worker: int) -> bool:
        """Kill one executor of a worker with SIGKILL; return False if the worker has none."""
        return any(_kill(pid) for pid in self.executors(worker)[:1])

    def kill_worker(self, worker: int) -> None:
        """End a worker and its executors by SIGKILL."""
        executors = self.executors(worker)
        self.workers[worker].kill()
        self.workers[worker].wait()
        for pid in executors:
            _kill(pid)  # an executor also ends by itself when it has lost its worker

    def stop(self) -> None:
        """End all processes."""
        for number, worker in enumerate(self.workers):
            if worker.poll() is None:
                self.kill_worker(number)
        self.master.kill()
        self.master.wait()


@contextmanager
def standalone(folder: Path) -> Iterator[Standalone]:
    """Run a cluster of two workers."""
    folder.mkdir(exist_ok=True)
    log = folder / "master.log"
    words = ["--host", _HOST, "--port", "0", "--webui-port", "0"]
    master = _start("org.apache.spark.deploy.master.Master", words, log, _HOST)
    try:
        url = _wait_for_line(log, r"Starting Spark master at (spark://\S+)", master)
    except BaseException:
        master.kill()
        master.wait()
        raise
    cluster = Standalone(folder, master, url)
    try:
        cluster.start_workers()
        yield cluster
    finally:
        cluster.stop()


def _start(name: str, words: list[str], log: Path, host: str) -> subprocess.Popen[bytes]:
    import pyspark

    home = Path(pyspark.__file__).parent
    # workers get neither the interpreter nor the path of this process: these have to be delivered
    left_out = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": host,
        "SPARK_LOCAL_HOSTNAME": host,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
    }
    with log.open("wb") as file:
        # exec: the process is the JVM itself, whose children are the executors
        return subprocess.Popen(
            [str(home / "bin" / "spark-class"), name, *words], stdout=file, stderr=subprocess.STDOUT, env=env
        )


def _wait_for_line(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if (match := re.search(pattern, text)) is not None:
            return match[match.lastindex or 0]
        assert process.poll() is None, text
        time.sleep(0.05)
    raise AssertionError(log.read_text(errors="replace"))


def _kill(pid: int) -> bool:
    """Kill a process with SIGKILL; return False if it does not exist any more."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(words[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def interpreter(folder: Path, *path: Path) -> Path:
    """Return a script that starts the interpreter of this process with some folders on its path."""
    script = folder / "python"
    search = os.pathsep.join(map(str, path))
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{search}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def archive_of_link(folder: Path, *path: Path) -> Path:
    """Return an archive whose ``bin/python`` is an `interpreter`.

    Delivered as an environment of venv-pack is, and made in no time; it works on this machine only.
    """
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(interpreter(folder, *path), "bin/python")
    return archive


def archive_of_venv(folder: Path, source: Path) -> Path:
    """Return an environment with this package and what it needs, packed by venv-pack; takes minutes."""
    venv, archive = folder / "venv", folder / "environment.tar.gz"
    run = subprocess.check_call
    run([sys.executable, "-m", "venv", "--copies", str(venv)])
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # pyspark is on every worker already
    run([*pip, str(source), "pyarrow", "pandas", "setuptools<81"])
    run([*pip, "venv-pack"])
    run([str(venv / "bin" / "python"), "-m", "venv_pack", "--quiet", "-p", str(venv), "-o", str(archive)])
    return archive
