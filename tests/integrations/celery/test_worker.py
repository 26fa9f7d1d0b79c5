"""Celery's worker on NSQ, in processes of its own."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kombu.pools
import pytest

from nsqext import sync
from tests.support.blocking_client import eventually
from tests.support.command_line import Process, environment

if TYPE_CHECKING:
    from nsqext.broker import Cluster

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_IMPORTS = (
    *("celery.__main__", "celery.bin.celery", "celery.apps.worker", "celery.worker.worker", "celery.worker.consumer"),
    *("celery.concurrency.prefork", "celery.concurrency.solo", "celery.concurrency.thread", "celery.app.amqp"),
    *("celery.app.control", "celery.app.events", "celery.app.log", "celery.events.state", "celery.fixups.django"),
    *("celery.worker.components", "celery.worker.control", "celery.worker.strategy", "celery.backends.base"),
    *("celery.loaders.app", "kombu.transport.virtual", "nsqext.integrations.celery"),
)


@pytest.fixture
def tasks(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the tasks, connected to the cluster."""
    (tmp_path / "notes").touch()
    monkeypatch.setenv("NSQ_BROKER", f"nsq://{cluster.lookupd[0]}")
    monkeypatch.setenv("NSQ_NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("NSQ_OPTIONS", '{"heartbeat_interval": 1.0}')
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("tasks", None)
    module = importlib.import_module("tasks")
    yield module
    module.app.close()
    kombu.pools.reset()  # the pools of connections belong to the process, not to the app
    sys.modules.pop("tasks", None)


def notes() -> set[int]:
    """Return the numbers of the tasks that were run."""
    return {int(line) for line in Path(os.environ["NSQ_NOTES"]).read_text().split()}


@contextmanager
def worker(name: str, pool: str = "prefork") -> Iterator[Process]:
    """A worker with two processes or threads."""
    words = ["worker", "--concurrency", "2", "--pool", pool, "--hostname", f"{name}@test", "--loglevel", "WARNING"]
    with Process(
        (str(HERE / "worker.py"), "-A", "tasks", *words), environment(), HERE, imports=_IMPORTS, output=(1, 2)
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(25)


# each pool, and each generation
@pytest.mark.parametrize(
    ("cluster", "pool"), [("redesigned", "prefork"), ("original", "threads")], indirect=["cluster"]
)
def test_a_worker_runs_tasks_answers_ping_and_drains(tasks: Any, pool: str) -> None:
    for number in range(50):
        tasks.note.delay(number)
    tasks.note.apply_async((50,), countdown=1)
    with worker("one", pool) as process:
        eventually(lambda: notes() == set(range(51)), seconds=60.0)
        assert tasks.app.control.inspect(["one@test"], timeout=25).ping() == {"one@test": {"ok": "pong"}}
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0


@pytest.mark.parametrize(
    ("cluster", "pool"),
    [("redesigned", "solo"), ("redesigned", "threads"), ("original", "prefork")],
    indirect=["cluster"],
)
def test_a_task_longer_than_msg_timeout_and_heartbeats_runs_once(tasks: Any, pool: str) -> None:
    tasks.note.delay(1, 4.5)  # msg_timeout is 3 s
    with worker("long", pool):
        eventually(lambda: notes() == {1}, seconds=60.0)
        tasks.note.delay(2)
        eventually(lambda: notes() == {1, 2}, seconds=60.0)
    assert Path(os.environ["NSQ_NOTES"]).read_text().split() == ["1", "2"]


@pytest.mark.parametrize("cluster", ["original"], indirect=True)
def test_a_worker_holds_as_many_tasks_as_its_prefetch_count(tasks: Any, cluster: Cluster) -> None:
    for number in range(30):
        tasks.note.delay(number, 0.3)
    seen: list[int] = []

    def in_flight() -> bool:
        (partition,) = admin.stats("celery", "celery").partitions
        seen.append(partition.channels["celery"].in_flight)
        return len(notes()) > 10

    with sync.Admin(cluster.lookupd) as admin, worker("prefetch"):
        eventually(in_flight, seconds=60.0)
        eventually(lambda: notes() == set(range(30)), seconds=60.0)
    assert max(seen) == 8  # worker_prefetch_multiplier 4, two processes


@pytest.mark.parametrize("cluster", ["redesigned"], indirect=True)
def test_events_of_tasks_arrive(tasks: Any) -> None:
    seen: set[str] = set()
    with worker("events"), tasks.app.connection_for_read() as connection:
        eventually(lambda: tasks.app.control.ping(timeout=1), seconds=60.0)
        tasks.app.control.enable_events()
        receiver = tasks.app.events.Receiver(connection, handlers={"*": lambda event: seen.add(event["type"])})
        thread = threading.Thread(target=lambda: receiver.capture(limit=None, timeout=None, wakeup=True))
        thread.start()
        try:
            eventually(lambda: "worker-heartbeat" in seen, seconds=60.0)
            tasks.note.delay(1)
            eventually(lambda: {"task-received", "task-started", "task-succeeded"} <= seen, seconds=60.0)
        finally:
            receiver.should_stop = True
            thread.join(25)


@pytest.mark.parametrize("cluster", ["original"], indirect=True)
def test_late_acknowledged_tasks_survive_the_kill_of_a_worker(tasks: Any) -> None:
    for number in range(100):
        tasks.note.delay(number, 0.02)
    with worker("first") as first, worker("second"):
        eventually(lambda: len(notes()) > 10, seconds=60.0)
        children = [int(pid) for pid in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
        for pid in (first.pid, *children):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: notes() == set(range(100)), seconds=60.0)


@pytest.mark.parametrize("cluster", ["redesigned"], indirect=True)
def test_the_example_runs(cluster: Cluster) -> None:
    env = {**os.environ, "BROKER_URL": f"nsq://{cluster.lookupd[0]}", "PYTHONUNBUFFERED": "1"}
    python = [sys.executable, "-m"]
    words = ["celery", "--app", "examples.celery.tasks", "worker", "--concurrency", "1", "--pool", "solo"]
    with subprocess.Popen([*python, *words], cwd=ROOT, env=env, stderr=subprocess.PIPE) as process:
        try:
            sent = subprocess.run(
                [*python, "examples.celery.tasks"], cwd=ROOT, env=env, capture_output=True, timeout=60
            )
            assert sent.stdout == b"3 tasks are stored\n", sent.stderr
            assert process.stderr is not None
            # Celery logs what tasks print
            lines = (line.rpartition(b"] ")[2] for line in process.stderr if b"order " in line)
            assert {next(lines) for _ in range(3)} == {b"order a-%d is confirmed\n" % number for number in (1, 2, 3)}
        finally:
            process.terminate()
            process.communicate(timeout=25)
