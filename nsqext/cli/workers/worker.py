"""A worker process of ``nsqext run``: ``python -m nsqext.cli.workers.worker MODULE:APP NUMBER READY_FD BACKEND``."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

import anyio

from nsqext import App
from nsqext.client.tasks import stop_on_signals
from nsqext.errors import InvalidSetting, NsqError

__all__ = ("CANNOT_START", "LOG_FORMAT", "load_app", "main")

logger: logging.Logger = logging.getLogger("nsqext.run")

CANNOT_START = 3
"""Exit status of a worker that must not be restarted."""
LOG_FORMAT = "%(asctime)s %(levelname)s [{}] %(name)s: %(message)s"


def load_app(place: str) -> App:
    """Import an app.

    Args:
        place: ``module:name``; the name may have dots, and is ``app`` by default.

    Raises:
        InvalidSetting: there is no such module or app.
    """
    module, _, name = place.partition(":")
    try:
        found: object = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import of the app's module failed
        raise InvalidSetting(f"{place}: no module {error.name!r}", hint="run it in the folder of the module") from None
    for part in (name or "app").split("."):
        found = getattr(found, part, None)
    if not isinstance(found, App):
        raise InvalidSetting(f"{place} is not an nsqext.App", hint="write module:app")
    return found


async def _serve(app: App, ready: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signals, app.stop, logger)
        tasks.start_soon(_stop_with_parent, app)
        await app.start()
        with suppress(BrokenPipeError):  # the supervisor was killed, and `_stop_with_parent` stops the app
            os.write(ready, b"ready")
        await app.wait()
        tasks.cancel_scope.cancel()


async def _stop_with_parent(app: App) -> None:
    """Stop at the end of standard input, which the supervisor keeps open: the supervisor was killed."""
    await anyio.wait_readable(sys.stdin.fileno())
    logger.error("stopping: the supervisor has ended")
    app.stop()


def main(place: str, number: str, ready: str, backend: str) -> int:
    """Run a worker and return its exit status."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.format(f"worker {number}"))
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        app = load_app(place)
    except InvalidSetting as error:
        logger.critical("%s", error)
        return CANNOT_START
    except Exception:
        logger.critical("%s cannot be imported", place, exc_info=True)
        return CANNOT_START
    options = {"use_uvloop": find_spec("uvloop") is not None} if backend == "asyncio" else {}
    try:
        anyio.run(_serve, app, int(ready), backend=backend, backend_options=options)
    except BaseExceptionGroup as group:
        return _failed(group)
    except NsqError as error:
        return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    from nsqext.client.tasks import first_error

    cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
    if not isinstance(cause, NsqError):
        raise error
    logger.critical("%s", cause)
    return CANNOT_START if isinstance(cause, InvalidSetting) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
