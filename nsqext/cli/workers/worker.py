"""A worker process of ``nsqext run``.

``python -m nsqext.cli.workers.worker MODULE:APP NUMBER STATUS_FD BACKEND WORKERS``
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec

import anyio
import orjson
from anyio import to_thread

from nsqext import App, Consumer, Producer
from nsqext.cli.apps import load_app
from nsqext.cli.waiting import wait_of_app, waits
from nsqext.client.signals import stop_on_signals
from nsqext.client.tasks import first_error
from nsqext.errors import InvalidSetting, NsqError
from nsqext.protocol.identify import KEY_FAILOVER

logger: logging.Logger = logging.getLogger("nsqext.run")

CANNOT_START = 3
"""Exit status of a worker that must not be restarted."""
ASK_HEALTH, ASK_METRICS = b"h", b"m"
"""What a supervisor writes to the standard input of a worker."""
_START_INTERVAL, _READY_INTERVAL = 0.05, 1.0  # seconds between two checks of the app's health
LOG_FORMAT = "%(asctime)s %(levelname)s [{}] %(name)s: %(message)s"


async def _serve(app: App, status: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signals, app.stop, logger)
        tasks.start_soon(_answer_supervisor, app, status)
        tasks.start_soon(_say_what_is_missing, app)
        await app.start()
        tasks.start_soon(_report_readiness, app, status)
        await app.wait()
        tasks.cancel_scope.cancel()


async def _say_what_is_missing(app: App) -> None:
    """Report what the app waits for until it is ready for the first time."""
    with waits.waiting(wait_of_app(app)):
        while not app.health().ready:  # noqa: ASYNC110 - an app has no event for it
            await anyio.sleep(_START_INTERVAL)


async def _report_readiness(app: App, status: int) -> None:
    """Report when the app becomes ready or stops being ready."""
    ready = False
    while True:
        if app.health().ready != ready:
            ready = not ready
            _send(status, {"ready": ready})
        await anyio.sleep(_READY_INTERVAL if ready else _START_INTERVAL)


async def _answer_supervisor(app: App, status: int) -> None:
    """Send health and metrics when standard input asks for them; stop at its end: the supervisor was killed."""
    reading = anyio.CapacityLimiter(1)
    async with anyio.create_task_group() as tasks:
        while True:
            await anyio.wait_readable(sys.stdin.fileno())
            asked = os.read(sys.stdin.fileno(), 64)
            if not asked:
                logger.error("stopping: the supervisor has ended")
                app.stop()
                return
            if ASK_HEALTH in asked:
                health = app.health()
                _send(status, {"live": health.live, "health": health.ready, "reasons": health.reasons})
            if ASK_METRICS in asked and not reading.borrowed_tokens:
                tasks.start_soon(_send_metrics, app, status, reading)


async def _send_metrics(app: App, status: int, reading: anyio.CapacityLimiter) -> None:
    """Send the metrics, which a thread reads: a relay asks its database, and a collector of the program may fail."""
    try:
        text = await to_thread.run_sync(_metrics, app, limiter=reading, abandon_on_cancel=True)
    except Exception:
        logger.exception("the metrics of this worker cannot be read")
        text = ""
    _send(status, {"metrics": text})


def _metrics(app: App) -> str:
    """Return the process's metrics as text; empty without prometheus_client."""
    if find_spec("prometheus_client") is None:
        return ""
    from prometheus_client import generate_latest

    from nsqext.observability.prometheus import Prometheus

    metrics = Prometheus()
    clients: tuple[Producer | Consumer, ...] = (app.producer, *app.consumers)
    for client in clients:
        metrics.attach(client)
    return generate_latest().decode()


def _send(status: int, report: Mapping[str, object]) -> None:
    with suppress(BrokenPipeError):  # the supervisor was killed, which ends the app
        data = orjson.dumps(report) + b"\n"
        while data:
            data = data[os.write(status, data) :]


def check_has_work(app: App, place: str) -> None:
    """Check that the app has a handler, or a lifespan that may publish."""
    if not app.specs and not app.lifespans:
        raise InvalidSetting(
            f"{place} has neither handlers nor lifespans: it would do nothing",
            hint="decorate a function with @app.handler, or include the router that has the handlers",
        )


def check_order(app: App, workers: int) -> None:
    """Check that several processes keep the order of keys."""
    for consumer in app.consumers if workers > 1 else ():
        settings = consumer.settings
        if settings["key"] is not None and settings["dispatch"] != KEY_FAILOVER and not settings["ordered"]:
            raise InvalidSetting(
                f"{workers} workers would handle the messages of one key at the same time: key= keeps their order "
                f"within one process, and the server gives each message of {'/'.join(consumer.topics)}/"
                f"{consumer.channel} to any of them",
                hint="run one worker; or make the topic ordered, and give the handler ordered=True; or use "
                'dispatch="key_failover" here, and key_tags=16 for producers (redesigned NSQ, topics with extend '
                "support)",
            )


def main(place: str, number: str, status: str, backend: str, workers: str) -> int:
    """Run a worker and return its exit status."""
    try:
        app = load_app(place)
        check_has_work(app, place)
        check_order(app, int(workers))
    except Exception as error:
        _configure_logging(number)
        if isinstance(error, InvalidSetting):
            logger.critical("%s", error)
        else:
            logger.critical("%s cannot be imported", place, exc_info=True)
        return CANNOT_START
    _configure_logging(number)
    options = {"use_uvloop": find_spec("uvloop") is not None} if backend == "asyncio" else {}
    try:
        anyio.run(_serve, app, int(status), backend=backend, backend_options=options)
    except (BaseExceptionGroup, NsqError) as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, NsqError):
            raise
        logger.critical("%s", cause)
        return CANNOT_START if isinstance(cause, InvalidSetting) else 1
    return 0


def _configure_logging(number: str) -> None:
    """Log to standard error, unless the program has configured logging."""
    if logging.getLogger().handlers:
        return
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.format(f"worker {number}"))
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
