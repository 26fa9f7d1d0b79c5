"""Tasks of Celery and Taskiq while workers, nsqd and lookup are killed: ``python -m tests.campaigns.soak.tasks``.

Each task must run at least once, and none may be left in the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson
from attrs import define, frozen

from nsqext import NsqError, sync
from nsqext.testing.simulation import Fault
from tests.campaigns.soak.clusters import SoakCluster, new_cluster, targets
from tests.support.child_processes import children, kill_children
from tests.support.programs import ROOT

__all__ = ("FRAMEWORKS", "TaskResult", "main", "run_tasks")

FAULTS = (("child_kill", ""), ("worker_kill", ""), ("kill", "n1"), ("kill", "n2"), ("kill", "n3"), ("lookup_kill", ""))
"""Kinds of faults and their nodes, in their order; another kind stands for one that the cluster does not have."""
_DOWN = 2.0
"""Seconds for which a node is down, at least."""
_PATIENT = 120.0
"""Seconds without progress after which tasks count as stuck."""


MaySend = Callable[[int], bool]
"""Says whether a task may be sent: some wait for the faults, so that there are tasks during each."""


@frozen
class Framework:
    """How a framework runs and sends tasks.

    Attributes:
        module: the module of its tasks.
        channel: the channel of a queue; the queue's name without one.
        command: words of a worker with two processes.
        send: sends tasks with the given numbers, each when it may be sent, with its duration in seconds.
    """

    module: str
    channel: str | None
    command: Callable[[str], list[str]]
    send: Callable[[Any, range, float, MaySend], None]


def _send_celery(module: Any, numbers: range, seconds: float, may_send: MaySend) -> None:
    for number in numbers:
        while not may_send(number):
            time.sleep(0.01)
        while True:
            try:
                module.note.delay(number, seconds)
                break
            except Exception as error:
                _check_retryable(error)
                time.sleep(0.1)


def _send_taskiq(module: Any, numbers: range, seconds: float, may_send: MaySend) -> None:
    async def send() -> None:
        await module.broker.startup()
        for number in numbers:
            while not may_send(number):  # noqa: ASYNC110 - another thread decides
                await asyncio.sleep(0.01)
            while True:
                try:
                    await module.note.kiq(number, seconds)
                    break
                except Exception as error:
                    _check_retryable(error)
                    await asyncio.sleep(0.1)
        await module.broker.shutdown()

    asyncio.run(send())


def _check_retryable(error: BaseException) -> None:
    """Raise an error that is not one of a node that is down; frameworks wrap them."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, NsqError):
            return
        found = found.__cause__
    raise error


def _celery_command(name: str) -> list[str]:
    words = ["celery", "-A", _CELERY, "worker", "--concurrency", "2", "--hostname", f"{name}@soak"]
    return [*words, "--loglevel", "WARNING"]


def _taskiq_command(_: str) -> list[str]:
    return ["taskiq", "worker", f"{_TASKIQ}:broker", "--workers", "2", "--max-async-tasks", "4"]


_CELERY = "tests.integrations.celery.tasks"
_TASKIQ = "tests.campaigns.soak.taskiq_tasks"
FRAMEWORKS: dict[str, Framework] = {
    "celery": Framework(_CELERY, None, _celery_command, _send_celery),
    "taskiq": Framework(_TASKIQ, "taskiq", _taskiq_command, _send_taskiq),
}


@frozen
class TaskResult:
    """What a run gave.

    Attributes:
        runs: how often each task ran.
        missing: tasks that did not run.
        waiting: messages in the queue at the end.
        seconds: from the first task sent to the last one done.
        faults: kinds of the faults that were begun.
    """

    runs: Counter[int]
    missing: list[int]
    waiting: int
    seconds: float
    faults: list[str]


@define
class _Workers:
    """Workers with their processes."""

    framework: Framework
    queue: str
    env: dict[str, str]
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *self.framework.command(name)]
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """Kill a worker with its processes, and start it again."""
        process = self.processes[name]
        kill_children(process.pid)
        process.kill()
        process.wait()
        self.start(name)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _inject(kind: str, node: str, workers: _Workers, cluster: SoakCluster) -> str:
    """Begin and end a fault; return its kind."""
    if kind == "child_kill":
        os.kill(children(workers.processes["one"].pid)[-1], signal.SIGKILL)
    elif kind == "worker_kill":
        workers.kill("two")
    else:
        kind = kind if kind in cluster.kinds else cluster.kinds[0]
        end = cluster.begin(Fault(kind, 0.0, _DOWN, node, 0.0), (workers.queue,))
        time.sleep(max(_DOWN, cluster.shortest))
        end()
        time.sleep(cluster.shortest)  # two replicas must not be down
    return kind


def run_tasks(
    framework: Framework,
    target: str,
    count: int,
    seconds: float,
    *,
    folder: Path,
    kill: str = "kill",
    environment: Callable[[str, str], None] = os.environ.__setitem__,
    workers: Sequence[str] = ("one", "two"),
    injected: Sequence[tuple[str, str]] = FAULTS,
) -> TaskResult:
    """Send tasks to workers, with each fault once, at even distances of the progress.

    Args:
        framework: the framework.
        target: the kind of cluster.
        count: number of tasks.
        seconds: duration of each.
        folder: for logs and files.
        kill: how nsqd ends: ``kill`` or ``terminate``.
        environment: sets a variable of this process, which sends the tasks.
        workers: names of the workers; faults kill processes of ``one``, and ``two``.
        injected: kinds of faults and their nodes, in their order.
    """
    notes = folder / "notes"
    notes.touch()
    cluster = new_cluster(target, 1, folder)
    cluster.start()
    options = {"topic_replicas": 2 if target in ("embedded", "real") else 1}
    address = ",".join(cluster.lookupd) if framework.module == _TASKIQ else f"nsq://{cluster.lookupd[0]}"
    queue = f"tasks_{token_hex(4)}"  # a real cluster keeps messages of earlier runs
    own = {
        "NSQ_QUEUE": queue,
        "NSQ_BROKER": address,
        "NSQ_NOTES": str(notes),
        "NSQ_OPTIONS": orjson.dumps(options).decode(),
    }
    running = _Workers(framework, queue, {**os.environ, **own}, folder, {})
    for name, value in own.items():
        environment(name, value)
    sys.modules.pop(framework.module, None)
    module = importlib.import_module(framework.module)
    faults: list[str] = []
    share = count / (len(injected) + 1)

    def may_send(number: int) -> bool:
        return len(faults) == len(injected) or number < share * (len(faults) + 2)

    arguments = (module, range(count), seconds, may_send)
    sender = threading.Thread(target=framework.send, args=arguments, daemon=True)
    try:
        for name in workers:
            running.start(name)
        began = time.monotonic()
        sender.start()
        runs: Counter[int] = Counter()
        progress = began
        while len(runs) < count:
            time.sleep(0.05)
            found = Counter(int(line) for line in notes.read_text().splitlines())
            if found.total() > runs.total():
                progress = time.monotonic()
            runs = found
            if len(faults) < len(injected) and len(runs) >= share * (len(faults) + 1):
                kind, node = injected[len(faults)]
                faults.append(_inject(kill if kind == "kill" else kind, node, running, cluster))
                progress = time.monotonic()
            if time.monotonic() > progress + _PATIENT:
                break
        taken = progress - began
        sender.join(_PATIENT)
        waiting = _waiting(cluster, queue, framework.channel or queue)
    finally:
        running.stop()
        cluster.stop()
    return TaskResult(runs, sorted(set(range(count)) - runs.keys()), waiting, taken, faults)


def _waiting(cluster: SoakCluster, topic: str, channel: str) -> int:
    """Return the messages of a channel when all that are redelivered have been acknowledged, or at the end of 30 s."""
    until = time.monotonic() + 30
    with sync.Admin(cluster.lookupd) as admin:
        while True:
            partitions = admin.stats(topic, channel).partitions
            count = sum(one.lag for partition in partitions for one in partition.channels.values())
            if not count or time.monotonic() > until:
                return count
            time.sleep(0.5)


def main() -> int:
    """Run tasks under faults; 1 if one did not run, or if a message is left."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak.tasks", description=__doc__)
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), default="celery")
    parser.add_argument("--target", choices=targets(), default="embedded")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=0.005, help="duration of each task")
    parser.add_argument("--terminate", action="store_true", help="end nsqd by SIGTERM instead of kill -9")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{given.framework}-"))
    kill = "terminate" if given.terminate else "kill"
    result = run_tasks(FRAMEWORKS[given.framework], given.target, given.tasks, given.seconds, folder=folder, kill=kill)
    failed = bool(result.missing or result.waiting)
    sys.stdout.write(
        f"{given.framework} on {given.target}: {len(result.runs)} of {given.tasks} tasks ran in "
        f"{result.seconds:.0f} s, {result.runs.total() - len(result.runs)} of them again, "
        f"{len(result.missing)} not at all, "
        f"{result.waiting} messages are left; {', '.join(result.faults)}\n"
    )
    if failed:
        sys.stdout.write(f"logs: {folder}\n")
    else:
        shutil.rmtree(folder)
    return failed


if __name__ == "__main__":
    sys.exit(main())
