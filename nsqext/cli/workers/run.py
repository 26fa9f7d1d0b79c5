"""``nsqext run MODULE:APP``: run an app in several worker processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import orjson

from nsqext.app.health import Health
from nsqext.cli.command import examples
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.status_page import StatusPage, listen_for_status
from nsqext.cli.workers.worker import ASK_HEALTH, ASK_METRICS, CANNOT_START, LOG_FORMAT
from nsqext.client.signals import REPEATED
from nsqext.errors import InvalidSetting
from nsqext.waits import Doubling, Waiters

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from anyio.abc import Process

logger: logging.Logger = logging.getLogger("nsqext.run")

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0  # seconds before a dead worker restarts; the pause doubles while the worker dies early
_STABLE = 60.0  # seconds of running after which a worker restarts after the first pause
_STATUS_TIMEOUT = 2.0  # seconds for reports of workers
_SCAN = 0.5  # seconds between checks of the source files


class Supervisor:
    """Runs worker processes that share the topics of an app; restarts dead workers, except after status 0 (`App.stop`).

    Workers stop if this process is killed.
    """

    def __init__(
        self, command: Sequence[str], workers: int, *, close_timeout: float = 40.0, ready_file: Path | None = None
    ) -> None:
        # `{number}` and `{ready}` stand for a worker's number and its descriptor for reports
        self._command = command
        self._workers = workers
        self._close_timeout = close_timeout  # seconds until draining workers are killed
        self._ready_file = ready_file  # exists while all workers are ready
        self._processes: dict[int, Process] = {}
        self._ready: set[int] = set()
        self._stopping = False
        self._changes = 0  # of source files
        self._waiting = Waiters()
        self._status = 0
        self._health: dict[int, Health] = {}
        self._metrics: dict[int, str] = {}
        self._reported = Waiters()

    async def run(self, watch: Path | None = None, listener: socket.socket | None = None) -> int:
        """Run until a signal, or until all workers have exited with status 0; return the exit status.

        The status is 1 if workers were killed, or failed while they drained. They restart when a Python file below the
        watched folder changes; the listener serves their health and metrics.
        """
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)  # of a supervisor that was killed
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._receive_signals)
                if watch is not None:
                    tasks.start_soon(self._watch, watch)
                if listener is not None:
                    from nsqext.http.uvicorn_server import HttpServer

                    page = StatusPage(self.ask_health, self.ask_metrics)
                    await tasks.start(HttpServer(page).serve, listener)
                async with anyio.create_task_group() as workers:
                    for number in range(1, self._workers + 1):
                        workers.start_soon(self._keep_running, number, watch is not None)
                tasks.cancel_scope.cancel()
        finally:
            self._mark_ready(ready=False)
        return self._status

    async def _keep_running(self, number: int, reload: bool) -> None:
        pauses = Doubling(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._stopping:
            started, changes = time.monotonic(), self._changes
            try:
                status = await self._run_once(number)
            except OSError as error:  # no memory or process is left, or Python is being upgraded: others run on
                logger.warning("worker %d cannot be started, trying again: %s", number, error)
                with anyio.move_on_after(0.0 if self._stopping else pauses.next()):
                    await self._waiting.wait()
                continue
            if self._stopping:
                if status not in (0, -signal.SIGTERM, CANNOT_START):
                    logger.error("worker %d exited with status %d while it drained", number, status)
                    self._status = self._status or 1
                return
            if status == 0 and not reload:
                return
            if status == CANNOT_START and not reload:
                self._status = CANNOT_START
                self.stop()
                return
            if status in (0, -signal.SIGTERM) and changes != self._changes:
                continue
            if status == 0:
                logger.info("worker %d has ended; it starts again when a source file changes", number)
                await self._waiting.wait()
                continue
            if time.monotonic() - started > _STABLE:
                pauses = Doubling(_FIRST_PAUSE, _LONGEST_PAUSE)
            pause = pauses.next()
            logger.error("worker %d exited with status %d; restarting it in %g s", number, status, pause)
            with anyio.move_on_after(pause):
                await self._waiting.wait()

    async def _run_once(self, number: int) -> int:
        reading, writing = os.pipe()
        try:
            try:
                process = await anyio.open_process(
                    [word.format(number=number, ready=writing) for word in self._command],
                    stdin=subprocess.PIPE,
                    stdout=None,
                    stderr=None,
                    pass_fds=[writing],
                    start_new_session=True,  # ^C reaches only this process
                    env={**os.environ, "NSQEXT_WORKER": str(number)},
                )
            finally:
                os.close(writing)
            self._processes[number] = process
            if self._stopping:
                process.terminate()
            async with process, anyio.create_task_group() as tasks:
                tasks.start_soon(self._read_reports, number, reading)
                status = await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            os.close(reading)
            self._processes.pop(number, None)
            self._set_ready(number, ready=False)
            self._reported.wake()  # nothing waits for its answer any more
        return status

    async def _read_reports(self, number: int, reading: int) -> None:
        rest = b""
        while True:
            await anyio.wait_readable(reading)
            data = os.read(reading, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take_report(number, orjson.loads(line))

    def _take_report(self, number: int, report: Mapping[str, Any]) -> None:
        if "live" in report:
            self._health[number] = Health(report["live"], report["health"], tuple(report["reasons"]))
        elif "metrics" in report:
            self._metrics[number] = report["metrics"]
        else:
            if report["ready"]:
                logger.info("worker %d is ready, pid %d", number, self._processes[number].pid)
            self._set_ready(number, ready=report["ready"])
            return
        self._reported.wake()

    async def ask_health(self) -> Mapping[int, Health]:
        """Return the health of each worker by number; a worker without response in time is not live."""
        asked = await self._ask(ASK_HEALTH, self._health)
        missing = Health(live=False, ready=False, reasons=("does not respond",))
        restarting = Health(live=False, ready=False, reasons=("does not run",))
        return {
            number: self._health.get(number, missing if number in asked else restarting)
            for number in range(1, self._workers + 1)
        }

    async def ask_metrics(self) -> Mapping[int, str]:
        """Return the metrics of the workers that respond in time."""
        await self._ask(ASK_METRICS, self._metrics)
        return dict(self._metrics)

    async def _ask(self, question: bytes, answers: dict[int, Any]) -> Collection[int]:
        """Ask all workers, and wait for their answers; return the numbers of the asked workers."""
        answers.clear()
        asked = {number: process.stdin for number, process in self._processes.items()}
        with anyio.move_on_after(_STATUS_TIMEOUT):
            for stdin in asked.values():
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    if stdin is not None:
                        await stdin.send(question)
            while not answers.keys() >= asked.keys() & self._processes.keys():
                await self._reported.wait()
        return asked.keys()

    def _set_ready(self, number: int, *, ready: bool) -> None:
        (self._ready.add if ready else self._ready.discard)(number)
        complete = len(self._ready) == self._workers
        self._mark_ready(ready=complete)
        if complete and ready:
            logger.info("all workers are ready: %d", self._workers)

    def _mark_ready(self, *, ready: bool) -> None:
        """Create or remove the file; a full disk or a removed folder must not end workers that run."""
        if self._ready_file is None:
            return
        try:
            if ready:
                self._ready_file.touch()
            else:
                self._ready_file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("--ready-file does not show that workers are %sready: %s", "" if ready else "not ", error)

    def stop(self) -> None:
        self._stopping = True
        self._end_workers()

    def _end_workers(self, number: signal.Signals = signal.SIGTERM) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)
        self._waiting.wake()

    async def _receive_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                logger.info("stopping on %s", number.name)
                self.stop()
                with anyio.move_on_after(REPEATED):  # see `nsqext.client.signals`
                    async for _ in signals:
                        pass
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._kill_late)
                    async for again in signals:
                        logger.warning("killing the workers on a second %s", again.name)
                        self._kill_workers()

    async def _kill_late(self) -> None:
        await anyio.sleep(self._close_timeout)
        logger.error("killing workers that did not exit within %g s", self._close_timeout)
        self._kill_workers()

    def _kill_workers(self) -> None:
        if self._processes:
            self._status = self._status or 1  # workers did not drain
            self._end_workers(signal.SIGKILL)

    async def _watch(self, folder: Path) -> None:
        known = _modified(folder)
        while True:
            await anyio.sleep(_SCAN)
            found = await anyio.to_thread.run_sync(_modified, folder)
            if found != known:
                changed = sorted(str(path) for path, _ in known.items() ^ found.items())
                logger.info("restarting the workers: %s changed", changed[0])
                known = found
                self._changes += 1
                self._end_workers()


def _modified(folder: Path) -> Mapping[Path, int]:
    """Return the modification times of Python files, without hidden folders and virtual environments."""
    found: dict[Path, int] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and not Path(place, name, "pyvenv.cfg").exists()
        ]
        for name in files:
            if name.endswith(".py"):
                with suppress(FileNotFoundError):
                    found[Path(place, name)] = Path(place, name).stat().st_mtime_ns
    return found


@examples("nsqext run shop:app --workers 4", "nsqext run shop:app --reload")
def run(
    app: Annotated[str, Argument(help="MODULE:APP, found from the current folder.")],
    workers: Annotated[int, Option(min=1, help="Number of processes.")] = 1,
    reload: Annotated[bool, Option(help="Restart the workers when a Python file of this folder changes.")] = False,
    backend: Annotated[Literal["asyncio", "trio"], Option(help="Event loop of the workers.")] = "asyncio",
    close_timeout: Annotated[float, Option(min=0, help="Seconds until workers that drain are killed.")] = 40.0,
    ready_file: Annotated[Path | None, Option(help="A file that exists while all workers are ready.")] = None,
    http: Annotated[
        str | None, Option(help="HOST:PORT that serves /healthz, /readyz and /metrics of all workers.")
    ] = None,
) -> None:
    """Run an app in worker processes until SIGTERM or Ctrl+C; then drain them. A second signal kills them.

    Dead workers restart. Workers log to standard error, and have their number in NSQEXT_WORKER. Signals within a second
    of the first are ignored.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.format("supervisor"))
    if ready_file is not None and (ready_file.is_dir() or not ready_file.absolute().parent.is_dir()):
        raise InvalidSetting(f"--ready-file {ready_file} cannot be created", hint="name a file in an existing folder")
    listener = None if http is None else listen_for_status(http)
    command = [sys.executable, "-m", "nsqext.cli.workers.worker", app, "{number}", "{ready}", backend, str(workers)]
    supervisor = Supervisor(command, workers, close_timeout=close_timeout, ready_file=ready_file)

    async def supervise() -> int:
        try:
            return await supervisor.run(Path.cwd() if reload else None, listener)
        finally:
            # a repeated signal must not change the exit status
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)

    raise SystemExit(anyio.run(supervise))
