"""Celery on NSQ, Redis and RabbitMQ: ``python -m benchmarks.bench_tasks``.

One process sends tasks that do nothing, one after the other; then a worker with four processes runs them. Needs the
programs ``redis-server`` and ``rabbitmq-server``; a broker whose program is missing is left out.
NSQEXT_BENCH_NSQD names another nsqd than ``nsqext nsqd``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import NamedTuple

from benchmarks.other_servers import Server, installed, rabbitmq, redis
from benchmarks.report import table, write_section
from benchmarks.servers import cluster_process, cpu_of, original_nsqd, program_given

_WARM = 500
"""Tasks that are run before the measurement."""
_PATIENT = 120.0


class Figures(NamedTuple):
    """What a round gave: tasks per second, and microseconds of CPU per task."""

    sent: float
    sending: float
    done: float
    working: float
    serving: float


@contextmanager
def _nsqd() -> Iterator[Server]:
    with original_nsqd(mem_queue_size=0, program=program_given()) as nsqd:
        yield Server(f"nsqd://{nsqd.tcp}", nsqd.pid)


@contextmanager
def _redesigned() -> Iterator[Server]:
    with cluster_process() as (pid, lookupd):
        yield Server(f"nsq://{lookupd}", pid)


def _brokers() -> dict[str, Callable[[], AbstractContextManager[Server]]]:
    name = "NSQ, " + (Path(program_given() or "").name or "nsqext nsqd")
    found: dict[str, Callable[[], AbstractContextManager[Server]]] = {
        name: _nsqd,
        "NSQ, redesigned (embedded)": _redesigned,
    }
    found |= {"Redis": redis} if installed("redis-server") else {}
    return found | ({"RabbitMQ": rabbitmq} if installed("rabbitmq-server") else {})


def _cpu(pid: int) -> float:
    """Return the seconds of CPU of a process and its descendants that run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return cpu_of(pid) + sum(_cpu(int(child)) for child in children)


def _send(count: int) -> tuple[float, float]:
    """Send tasks in this process; return seconds and CPU seconds."""
    from benchmarks.task_app import note  # reads the environment

    for number in range(_WARM):
        note.delay(number)
    began, used = time.perf_counter(), time.process_time()
    for number in range(count):
        note.delay(number)
    return time.perf_counter() - began, time.process_time() - used


def _round(server: Server, count: int, folder: Path) -> Figures:
    done = folder / "done"
    own = {"BENCH_BROKER": server.url, "BENCH_QUEUE": f"bench_{token_hex(4)}", "BENCH_DONE": str(done)}
    env = {**os.environ, **own}
    # each broker is sent to by a process of its own
    words = [sys.executable, "-m", "benchmarks.bench_tasks", "--send", str(count)]
    sent = subprocess.run(words, env=env, check=True, capture_output=True, text=True)  # noqa: S603
    seconds, cpu = map(float, sent.stdout.split())
    words = [sys.executable, "-m", "celery", "-A", "benchmarks.task_app", "worker", "--concurrency", "4"]
    words += ["--loglevel", "ERROR", "--without-gossip", "--without-mingle"]
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(words, env=env, stdout=log, stderr=log)  # noqa: S603
    try:
        _wait(done, _WARM)
        first, before = done.stat().st_size, (_cpu(worker.pid), _cpu(server.pid))
        began = time.perf_counter()
        _wait(done, _WARM + count)
        taken = time.perf_counter() - began
        after = (_cpu(worker.pid), _cpu(server.pid))
    finally:
        worker.terminate()
        worker.wait()
    ran = _WARM + count - first
    working, serving = ((new - old) / ran * 1e6 for old, new in zip(before, after, strict=True))
    return Figures(count / seconds, cpu / count * 1e6, ran / taken, working, serving)


def _wait(done: Path, count: int) -> None:
    until = time.monotonic() + _PATIENT
    while not done.exists() or done.stat().st_size < count:
        if time.monotonic() > until:
            raise SystemExit("the worker does not run the tasks")
        time.sleep(0.01)


def main() -> None:
    """Measure all brokers in turns, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_tasks", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.send:
        print(*_send(given.send))
        return
    figures: dict[str, list[Figures]] = {name: [] for name in _brokers()}
    for number in range(given.rounds):
        for name, broker in _brokers().items():
            with broker() as server, tempfile.TemporaryDirectory() as folder:
                figures[name].append(_round(server, given.tasks, Path(folder)))
            print(f"round {number + 1}, {name}: {figures[name][-1]}", file=sys.stderr)
    head = ["", "tasks sent/s", "sender, µs/task", "tasks done/s", "worker, µs/task", "broker, µs/task"]
    rows = [
        [name, *(f"{median(column):,.0f}" for column in zip(*rounds, strict=True))] for name, rounds in figures.items()
    ]
    text = (
        f"{given.tasks:,} tasks that do nothing, acknowledged late, with results ignored; four prefork processes, "
        "`worker_prefetch_multiplier` 16. One thread sends them, and waits for each until the broker has stored it; "
        "then a worker runs them. µs of CPU. nsqd (`-mem-queue-size 0`), Redis (`appendonly`) and RabbitMQ (durable, "
        "with confirms) write tasks to files; the embedded cluster keeps them in memory.\n\n" + table(head, rows)
    )
    print(text)
    write_section("Celery beside Redis and RabbitMQ", text)


if __name__ == "__main__":
    main()
