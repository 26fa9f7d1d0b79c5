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

from attrs import define, field

__all__ = ("Standalone", "archive_of_link", "archive_of_venv", "standalone")

_HOST = "127.0.0.1"
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

    def start_worker(self) -> None:
        """Start a worker with two cores."""
        number = len(self.workers)
        words = ["--host", _HOST, "--cores", "2", "--memory", "1g", "--webui-port", "0"]
        work = ["--work-dir", str(self.folder / f"work{number}"), self.url]
        process = _start("org.apache.spark.deploy.worker.Worker", [*words, *work], self.folder / f"worker{number}.log")
        _wait_for_line(self.folder / f"worker{number}.log", r"Successfully registered with master", process)
        self.workers.append(process)

    def executors(self, worker: int) -> list[int]:
        """Return the process ids of the executors of a worker."""
        return [pid for pid in _children(self.workers[worker].pid) if _EXECUTOR in _command(pid)]

    def kill_executor(self, worker: int) -> bool:
        """End one executor of a worker by SIGKILL; returns False if there is none."""
        for pid in self.executors(worker)[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def kill_worker(self, worker: int) -> None:
        """End a worker and its executors by SIGKILL."""
        executors = self.executors(worker)
        self.workers[worker].kill()
        self.workers[worker].wait()
        for pid in executors:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End all processes."""
        for number, worker in enumerate(self.workers):
            if worker.poll() is None:
                self.kill_worker(number)
        self.master.kill()
        self.master.wait()


@contextmanager
def standalone(folder: Path, workers: int = 2) -> Iterator[Standalone]:
    """Run a cluster."""
    log = folder / "master.log"
    words = ["--host", _HOST, "--port", "0", "--webui-port", "0"]
    master = _start("org.apache.spark.deploy.master.Master", words, log)
    try:
        url = _wait_for_line(log, r"Starting Spark master at (spark://\S+)", master)
    except BaseException:
        master.kill()
        master.wait()
        raise
    cluster = Standalone(folder, master, url)
    try:
        for _ in range(workers):
            cluster.start_worker()
        yield cluster
    finally:
        cluster.stop()


def _start(name: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    import pyspark

    home = Path(pyspark.__file__).parent
    # workers get neither the interpreter nor the path of this process: these have to be delivered
    left_out = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": _HOST, "SPARK_DAEMON_MEMORY": "256m"}
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


def archive_of_link(folder: Path, *path: Path) -> Path:
    """Return an archive whose ``bin/python`` starts the interpreter of this process with some folders on its path.

    Delivered as an environment of venv-pack is, and made in no time; it works on this machine only.
    """
    script = folder / "python"
    search = os.pathsep.join(map(str, path))
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{search}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(script, "bin/python")
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
