"""`nsqext run`: worker processes that are restarted, drained and reloaded."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import nsqext
from nsqext import sync
from nsqext.cli.apps import load_app
from nsqext.cli.workers.run import Supervisor
from nsqext.cli.workers.worker import CANNOT_START, check_order
from nsqext.errors import InvalidSetting
from tests.support.blocking_client import eventually
from tests.support.command_line import run, started

if TYPE_CHECKING:
    from nsqext.app.health import Health
    from nsqext.broker import Cluster

NODES = 2

SERVICE = """
import os
import sys
import anyio
import nsqext

app = nsqext.App()

@app.handler({topic!r}, "ch", concurrency=4)
async def handle(body: str) -> None:
    if body == "stop":
        app.stop()
    if body == "hang":
        print("hanging", file=sys.stderr)
        await anyio.sleep_forever()
    await anyio.sleep(0.05)
    with open("handled", "a") as file:
        file.write(f"{prefix}{{body}} {{os.getpid()}}\\n")
"""

FINISHES_SLOWLY = """
@app.lifespan
async def drains(app):
    yield
    await anyio.sleep(0.5)
    print("the lifespan has ended", file=sys.stderr)
"""


LIBRARY = """
import sniffio

@app.lifespan
async def names_the_library(app):
    print("runs on", sniffio.current_async_library(), file=sys.stderr)
    yield
"""


REFUSES = """
import nsqext
from nsqext.errors import InvalidSetting

app = nsqext.App()

@app.lifespan
async def check(app):
    raise InvalidSetting("the store has no name")
    yield
"""


class Program:
    """A running ``nsqext run``."""

    def __init__(self, folder: Path, cluster: Cluster, *words: str) -> None:
        self.log = ""
        self._folder = folder
        self.process = started("run", *words, cwd=folder, NSQEXT_LOOKUPD=cluster.lookupd[0])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line.decode()

    def wait_log(self, text: str, count: int = 1) -> None:
        """Wait until the log contains a text ``count`` times."""
        eventually(lambda: self.log.count(text) >= count, seconds=30.0)

    def ready(self) -> dict[int, int]:
        """Return the process ids of the workers that became ready last."""
        return {int(worker): int(pid) for worker, pid in re.findall(r"worker (\d+) is ready, pid (\d+)", self.log)}

    def handled(self) -> list[str]:
        """Return body and process id of all handled messages."""
        file = self._folder / "handled"
        return file.read_text().splitlines() if file.exists() else []

    def reads(self) -> bool:
        """Return whether a process that was started still has the other side of standard error."""
        return self._reader.is_alive()

    def kill_workers(self) -> None:
        """Kill workers that outlive their supervisor by seconds: the test has failed."""
        self._reader.join(5)
        if self.reads():
            for pid in self.ready().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end and return the exit status."""
        status = self.process.wait(30)
        self._reader.join(30)
        return status


@contextmanager
def program(folder: Path, cluster: Cluster, *words: str) -> Iterator[Program]:
    """Run the command, and kill it afterwards."""
    running = Program(folder, cluster, *words)
    with running.process:
        try:
            yield running
        finally:
            running.process.kill()
            running.kill_workers()
            running.end()


def publish(cluster: Cluster, topic: str, *bodies: str) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish_many(topic, [body.encode() for body in bodies])


def test_workers_share_are_restarted_and_drained(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix=""))
    words = ("service:app", "--workers", "2", "--ready-file", "ready")
    with program(tmp_path, cluster, *words) as running:
        running.wait_log("all workers are ready: 2")
        assert (tmp_path / "ready").exists()
        before = running.ready()
        with sync.Producer(cluster.lookupd) as producer:
            for number in range(40):
                producer.publish(topic, b"%d" % number)
        eventually(lambda: len(running.handled()) >= 40, seconds=30.0)
        assert {int(line.split()[1]) for line in running.handled()} == set(before.values())
        os.kill(before[1], signal.SIGKILL)
        running.wait_log("worker 1 exited with status -9; restarting it in 0.5 s")
        eventually(lambda: not (tmp_path / "ready").exists() or running.log.count("all 2 workers") == 2, seconds=30.0)
        running.wait_log("all workers are ready: 2", 2)
        after = running.ready()
        assert after[1] != before[1]
        assert after[2] == before[2]
        publish(cluster, topic, *map(str, range(40, 80)))
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert not (tmp_path / "ready").exists()
    handled = [int(line.split()[0]) for line in running.handled()]
    assert set(range(40)) <= set(handled)
    assert "[worker 2] nsqext.consumer: drained and closed" in running.log
    assert "Traceback" not in running.log


@contextmanager
def when_ready(act: Callable[[], None], workers: int = 1) -> Iterator[None]:
    """Call a function when the log says that all workers are ready."""

    def look(record: logging.LogRecord) -> bool:
        if record.getMessage() == f"all workers are ready: {workers}":
            act()
        return True

    logger = logging.getLogger("nsqext.run")
    logger.addFilter(look)
    try:
        yield
    finally:
        logger.removeFilter(look)


def test_workers_that_do_not_drain_in_time_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsqext.run")
    worker = (
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "os.write({ready}, b'{{\"ready\": true}}\\n'); signal.pause()"
    )
    supervisor = Supervisor([sys.executable, "-I", "-c", worker], 1, close_timeout=0.01)
    with when_ready(lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert anyio.run(supervisor.run) == 1


def test_health_does_not_wait_for_a_worker_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqext.run")
    monkeypatch.setattr("nsqext.cli.workers.run._STATUS_TIMEOUT", 3600.0)
    monkeypatch.setattr("nsqext.cli.workers.run._FIRST_PAUSE", 3600.0)
    worker = "import os, sys; os.write({ready}, b'{{\"ready\": true}}\\n'); sys.stdin.read(1); sys.exit(5)"
    supervisor = Supervisor([sys.executable, "-I", "-c", worker], 1)

    async def ask() -> Mapping[int, Health]:
        ready = anyio.Event()
        with when_ready(ready.set):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.run)
                await ready.wait()
                with anyio.fail_after(25):
                    found = await supervisor.ask_health()
                supervisor.stop()
        return found

    assert anyio.run(ask)[1].reasons == ("does not respond",)


def test_a_worker_that_fails_while_it_drains_is_a_failure_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsqext.run")
    worker = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); "
        "os.write({ready}, b'{{\"ready\": true}}\\n'); signal.pause()"
    )
    supervisor = Supervisor([sys.executable, "-I", "-c", worker], 1)
    with when_ready(supervisor.stop):
        assert anyio.run(supervisor.run) == 1
    assert "worker 1 exited with status 5 while it drained" in caplog.text


@pytest.mark.parametrize(("stable", "expected"), [(60.0, [0.01, 0.02, 0.04]), (0.0, [0.01, 0.01, 0.01])])
def test_the_pauses_of_a_worker_that_ends_early_double(
    monkeypatch: pytest.MonkeyPatch, stable: float, expected: list[float]
) -> None:
    def look(record: logging.LogRecord) -> bool:
        if "restarting it" in record.msg and isinstance(record.args, tuple):
            pauses.append(record.args[2])
            if len(pauses) == 3:
                supervisor.stop()
        return True

    pauses: list[object] = []
    monkeypatch.setattr("nsqext.cli.workers.run._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("nsqext.cli.workers.run._STABLE", stable)
    supervisor = Supervisor([sys.executable, "-I", "-c", "raise SystemExit(5)"], 1)
    logger = logging.getLogger("nsqext.run")
    logger.addFilter(look)
    try:
        assert anyio.run(supervisor.run) == 0
    finally:
        logger.removeFilter(look)
    assert pauses == expected


def test_a_worker_that_starts_while_the_supervisor_stops_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_late(*arguments: Any, **options: Any) -> Any:
        process = await open_process(*arguments, **options)
        supervisor.stop()
        return process

    open_process = anyio.open_process
    monkeypatch.setattr(anyio, "open_process", open_late)
    worker = f"import pathlib, time; time.sleep(3); pathlib.Path({str(tmp_path / 'ended')!r}).touch()"
    supervisor = Supervisor([sys.executable, "-I", "-c", worker], 1)
    assert anyio.run(supervisor.run) == 0
    assert not (tmp_path / "ended").exists()


def test_the_ready_file_exists_when_the_workers_are_reported_as_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqext.run")
    file = tmp_path / "ready"
    file.touch()  # of a supervisor that was killed
    worker = (
        f"import os, pathlib, sys; assert not pathlib.Path({str(file)!r}).exists(); "
        "os.write({ready}, b'{{\"ready\": true}}\\n'); sys.stdin.read()"
    )
    supervisor = Supervisor([sys.executable, "-I", "-c", worker], 1, ready_file=file)
    existed: list[bool] = []

    def stop() -> None:
        existed.append(file.exists())
        supervisor.stop()

    with when_ready(stop):
        assert anyio.run(supervisor.run) == 0
    assert (existed, file.exists()) == ([True], False)
    assert "restarting" not in caplog.text


def test_a_worker_that_cannot_be_started_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No process was left at the moment, or Python was being upgraded: all workers were killed."""
    caplog.set_level(logging.INFO, "nsqext.run")
    monkeypatch.setattr("nsqext.cli.workers.run._FIRST_PAUSE", 0.01)
    failures = [BlockingIOError(11, "no process is left"), FileNotFoundError(2, "no Python")]

    async def open_process(words: list[str], **options: Any) -> Any:
        if words[-1] == "2" and failures:
            raise failures.pop(0)
        return await opened(words, **options)

    opened = anyio.open_process
    monkeypatch.setattr(anyio, "open_process", open_process)
    worker = "import os, sys; os.write({ready}, b'{{\"ready\": true}}\\n'); sys.stdin.read()"
    supervisor = Supervisor([sys.executable, "-I", "-c", worker, "{number}"], 2)
    with when_ready(supervisor.stop, workers=2):
        assert anyio.run(supervisor.run) == 0
    assert caplog.text.count("worker 2 cannot be started, trying again") == 2
    assert "no process is left" in caplog.text and caplog.text.count("is ready, pid") == 2


def test_a_ready_file_that_cannot_be_written_does_not_end_the_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder was cleaned up while a worker restarted: all workers were killed."""
    caplog.set_level(logging.INFO, "nsqext.run")
    worker = "import os, sys; os.write({ready}, b'{{\"ready\": true}}\\n'); sys.stdin.read()"
    supervisor = Supervisor([sys.executable, "-I", "-c", worker], 1, ready_file=tmp_path / "removed" / "ready")
    with when_ready(supervisor.stop):
        assert anyio.run(supervisor.run) == 0
    assert "--ready-file does not show that workers are ready: " in caplog.text
    assert "No such file or directory" in caplog.text


def test_workers_that_stop_by_themselves_are_not_restarted(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix="") + LIBRARY)
    with program(tmp_path, cluster, "service", "--backend", "trio") as running:
        running.wait_log("all workers are ready: 1")
        publish(cluster, topic, "stop")
        assert running.end() == 0
    assert [line.split()[0] for line in running.handled()] == ["stop"]
    assert "runs on trio" in running.log


def test_workers_are_restarted_when_their_source_changes_and_killed_on_a_second_signal(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix=""))
    (tmp_path / "env").mkdir()
    for name in ("pyvenv.cfg", "library.py"):
        (tmp_path / "env" / name).touch()
    with program(tmp_path, cluster, "service:app", "--reload") as running:
        running.wait_log("all workers are ready: 1")
        (tmp_path / "env" / "library.py").write_text("installed = True")
        (tmp_path / "service.py").write_text("def")
        running.wait_log("SyntaxError")
        assert "library.py changed" not in running.log
        (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix="new "))
        running.wait_log("all workers are ready: 1", 2)
        publish(cluster, topic, "x")
        eventually(lambda: [line.rpartition(" ")[0] for line in running.handled()] == ["new x"], seconds=30.0)
        publish(cluster, topic, "hang")
        running.wait_log("hanging")
        running.process.send_signal(signal.SIGINT)
        running.wait_log("stopping on SIGINT")
        while running.process.poll() is None and "killing the workers" not in running.log:
            running.process.send_signal(signal.SIGINT)  # those of the first second are ignored
            time.sleep(0.1)
        assert running.end() == 1
    assert "killing the workers on a second SIGINT" in running.log


def test_a_worker_that_stops_by_itself_waits_for_a_change_of_its_source(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix=""))
    with program(tmp_path, cluster, "service:app", "--reload") as running:
        running.wait_log("all workers are ready: 1")
        publish(cluster, topic, "stop")
        running.wait_log("worker 1 has ended; it starts again when a source file changes")
        (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix="new "))
        running.wait_log("all workers are ready: 1", 2)
        assert running.log.count("worker 1 is ready") == 2


def test_signals_that_are_repeated_within_a_second_do_not_end_the_drain(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix="") + FINISHES_SLOWLY)
    with program(tmp_path, cluster, "service:app", "--backend", "trio") as running:
        running.wait_log("all workers are ready: 1")
        running.process.send_signal(signal.SIGTERM)
        running.wait_log("stopping on SIGTERM")  # signals that wait together are received as one
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
    assert "the lifespan has ended" in running.log
    assert "killing" not in running.log


def test_a_worker_whose_app_has_failed_is_restarted(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    fails = """
from nsqext.errors import ConnectionFailed

@app.lifespan
async def connect(app):
    if not os.path.exists("failed"):
        open("failed", "w").close()
        raise ConnectionFailed("the store has no room")
    yield
"""
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix="") + fails)
    with program(tmp_path, cluster, "service:app") as running:
        running.wait_log("all workers are ready: 1")
    assert "the store has no room" in running.log
    assert "worker 1 exited with status 1; restarting it in 0.5 s" in running.log


def test_workers_end_when_their_supervisor_is_killed(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix=""))
    with program(tmp_path, cluster, "service:app") as running:
        running.wait_log("all workers are ready: 1")
        running.process.kill()
        running.wait_log("stopping: the supervisor has ended")
        running.wait_log("drained and closed")


def test_a_worker_whose_supervisor_was_killed_before_it_was_ready_ends(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    waits = """
@app.lifespan
async def wait(app):
    print("lifespan", file=sys.stderr)
    while not os.path.exists("go"):
        await anyio.sleep(0.02)
    yield
    print("the lifespan ends", file=sys.stderr)
"""
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic, prefix="") + waits)
    with program(tmp_path, cluster, "service:app") as running:
        running.wait_log("lifespan")
        running.process.kill()
        running.wait_log("stopping: the supervisor has ended")
        (tmp_path / "go").touch()
        running.wait_log("the lifespan ends")
        running.end()
        assert not running.reads()
    assert "Traceback" not in running.log
    assert "subscribed" not in running.log


@pytest.mark.parametrize(
    ("source", "place", "workers", "reason"),
    [
        ("", "absent:app", 2, "no module 'absent'"),
        ("", "absent.inner:app", 1, "no module 'absent'"),
        ("app = 1", "service:app", 1, "is not an nsqext.App"),
        ("import absent", "service:app", 1, "cannot be imported"),
        ("", ":app", 1, "names no module"),
        ("import nsqext\napp = nsqext.App('127.0.0.1:1', tls_key=1)", "service:app", 1, "tls_key"),
        ("import nsqext\napp = nsqext.App('127.0.0.1:1')", "service:app", 1, "neither handlers nor lifespans"),
        (REFUSES, "service:app", 1, "the store has no name"),
    ],
)
def test_a_program_that_cannot_start_ends(
    cluster: Cluster, tmp_path: Path, source: str, place: str, workers: int, reason: str
) -> None:
    (tmp_path / "service.py").write_text(source)
    with program(tmp_path, cluster, place, "--workers", str(workers)) as running:
        assert running.end() == CANNOT_START
    assert reason in running.log


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"key": "k"}, True),
        ({"key": "k", "ordered": True}, False),
        ({"key": "k", "dispatch": "key_failover"}, False),
        ({}, False),
    ],
)
def test_several_workers_refuse_lanes_that_cannot_keep_the_order(
    settings: nsqext.HandlerSettings, refused: bool
) -> None:
    app = nsqext.App("127.0.0.1:1")

    async def handle(message: nsqext.Message) -> None:
        """Do nothing."""

    app.handler("orders", "billing", **settings)(handle)
    check_order(app, 1)
    if not refused:
        check_order(app, 2)
        return
    with pytest.raises(InvalidSetting, match=r"2 workers .* orders/billing .*: run one worker; or make"):
        check_order(app, 2)


@pytest.mark.parametrize(
    "words", [("--backend", "curio"), ("--close-timeout", "-1"), ("--ready-file", "/absent/ready")]
)
def test_options_that_cannot_take_effect_are_refused(words: tuple[str, ...]) -> None:
    done = run("run", "service:app", *words)
    assert (done.returncode, words[0].encode() in done.stderr) == (2, True), done.stderr


def test_apps_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"service_{token_hex(4)}"
    (tmp_path / f"{name}.py").write_text("import nsqext\nclass Space:\n    other = nsqext.App('127.0.0.1:1')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_app(f"{name}:Space.other") is sys.modules[name].Space.other
    with pytest.raises(InvalidSetting, match="module:app"):
        load_app(name)
