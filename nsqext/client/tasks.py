"""Background tasks of producers and consumers, independent of the opening task."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextvars import ContextVar, copy_context
from functools import partial
from inspect import ismethod
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod, WeakSet

import anyio
from anyio.lowlevel import current_token

from nsqext.errors import InvalidState
from nsqext.transport.event_loop import call_soon, current_loop
from nsqext.types import ProcessBound
from nsqext.waits import AsyncioLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

logger: logging.Logger = logging.getLogger("nsqext.tasks")

E = TypeVar("E", bound=BaseException)

_get_ident = threading.get_ident

# markers of the `BackgroundTasks` that the current task belongs to, or was started from
_running_inside: ContextVar[tuple[object, ...]] = ContextVar("nsqext_background_tasks", default=())


def first_error(errors: BaseExceptionGroup[E]) -> E:
    """Return the first error of a group: users never see groups."""
    first = errors.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


def _never() -> bool:
    return False


def _is_current(current: Callable[[], object], token: object) -> bool:
    try:
        return current() is token
    except RuntimeError:
        return False


class BackgroundTasks:
    """Run the tasks of an object, opened in one task and closed in another, on asyncio and trio.

    They run at the top level of the event loop: in a task of the asyncio loop, or a system task of trio. Cancellation
    of the task that called `start` does not reach them, but its context variables do.

    A task that raises ends the object: its error is logged and kept in ``error``, ``close`` runs, `aclose` raises the
    error once, and `check` raises `InvalidState` with this cause.
    """

    def __init__(self, owner: str, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self.error: BaseException | None = None  #: first error of a task
        self.loop: object = None  #: native event loop of `start`
        # the loop's thread; 0 before `start` and in a forked process, where the loop does not run
        self._thread = 0
        self._loop_runs: Callable[[], bool] = _never
        self._owner = owner  # for error messages, for example ``producer``
        # called once at the end, in the host task: sends pending data and closes connections, before the tasks are
        # cancelled. A bound method is held weakly.
        self._close: Callable[[], Callable[[], Awaitable[None]] | None] = (
            WeakMethod(close) if ismethod(close) else lambda: close
        )
        self._marker = object()
        self._task: object = None
        self._group: TaskGroup | None = None
        self._ready = anyio.Event()
        self._closing = anyio.Event()
        self._ended = anyio.Event()
        # the task group may be closed
        self._cancelling = False
        # the event loop ended before the object was closed
        self._cut_off = False
        self._cancelled: type[BaseException] = BaseException
        self._reported = False

    async def start(self) -> None:
        """Start the host task; return when `start_soon` can be called. Cancellation does not interrupt it.

        Raises InvalidState when called again.
        """
        if self.loop is not None:
            raise InvalidState(f"this {self._owner} was opened before", hint="create a new one: each is opened once")
        self._cancelled = anyio.get_cancelled_exc_class()
        loop = current_token().native_token
        name = f"nsqext {self._owner}"
        if isinstance(loop, AsyncioLoop):
            self._loop_runs = loop.is_running
            self._task = loop.create_task(self._host(), name=name)  # the loop holds tasks by weak references
        else:
            trio: Any = sys.modules["trio"].lowlevel
            self._loop_runs = partial(_is_current, trio.current_trio_token, loop)
            self._task = trio.spawn_system_task(self._host, name=name, context=copy_context())
        self.loop = loop
        self._thread = _get_ident()
        _started.add(self)
        with anyio.CancelScope(shield=True):
            await self._ready.wait()

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a task, cancelled after the object has closed; raises InvalidState as `check`."""
        self.check().start_soon(self._run, function, args, name=getattr(function, "__qualname__", None))

    async def aclose(self) -> None:
        """Close the object and wait until its tasks have ended; without effect before `start` and when called again.

        Callable from any task of the event loop, concurrently. In a task of this object, such as a handler, it returns
        at once: that task must end first. Cancellation does not interrupt it.

        Raises:
            BaseException: the error of the task that ended the object, in the first waiting call.
            InvalidState: called from another event loop.
        """
        if self.loop is None:
            return
        if not self._ended.is_set():
            self.check_event_loop()
            self._closing.set()
            if self.inside:
                return
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
        if self.error is not None and not self._reported:
            self._reported = True
            raise self.error

    def abandon(self) -> None:
        """Cancel the tasks without closing, from any thread: for ``__del__`` of an unclosed object."""
        group = self._group
        if group is not None and not self._ended.is_set():
            call_soon(self.loop, group.cancel_scope.cancel)

    @property
    def state(self) -> str:
        """In words, for ``repr``."""
        if self.loop is None:
            return "not open"
        if self.error is not None:
            return "failed"
        if self._cut_off:
            return "ended with its event loop"
        if self._ended.is_set():
            return "closed"
        return "closing" if self.closing else "open"

    @property
    def left_open(self) -> bool:
        """Whether it was opened, and neither closed nor ended by an error."""
        return self.loop is not None and (self._cut_off or not self.closing)

    @property
    def closing(self) -> bool:
        """Whether it must end, by `aclose` or by the error of a task."""
        return self._closing.is_set()

    def is_cancelled(self) -> bool:
        """Return whether the program, or the end of asyncio's event loop, has cancelled the host task."""
        return getattr(self._task, "cancelling", int)() > 0

    @property
    def inside(self) -> bool:
        return self._marker in _running_inside.get()

    def in_event_loop(self) -> bool:
        """Return whether the caller runs in the event loop of `start`.

        asyncio's function for the running loop makes a system call, which would slow each publish.
        """
        return _get_ident() == self._thread and self._loop_runs()

    def check(self) -> TaskGroup:
        """Return the task group; raises InvalidState if not started, ended, or called from another event loop."""
        if self.loop is None:
            raise InvalidState(
                f"the {self._owner} is not open", hint=f"use 'async with' or await {self._owner}.start() first"
            )
        if self.error is not None:
            raise InvalidState(f"the {self._owner} has failed: {self.error!r}", hint="create a new one") from self.error
        if self._cut_off and not self.in_event_loop():
            raise InvalidState(
                f"another event loop opened this {self._owner}, and ended before the {self._owner} was closed",
                hint=f"open one {self._owner} for each event loop, and close it there; nsqext.sync needs no event loop",
            )
        if self._ended.is_set() or self._group is None or (self._cancelling and not self.inside):
            raise InvalidState(f"the {self._owner} is closed", hint="create a new one")
        self.check_event_loop()
        return self._group

    def check_event_loop(self) -> None:
        """Raise InvalidState if the caller runs in another event loop."""
        if not self.in_event_loop():
            raise InvalidState(
                f"the {self._owner} is used from another event loop than the one that opened it",
                hint=f"open one {self._owner} for each event loop; nsqext.sync serves threads",
            )

    async def _host(self) -> None:
        _running_inside.set((*_running_inside.get(), self._marker))
        try:
            async with anyio.create_task_group() as self._group:
                try:
                    self._ready.set()
                    await self._closing.wait()
                    if (close := self._close()) is not None:
                        await self._keep_error(close)
                finally:
                    self._cut_off = not self._closing.is_set()
                    self._cancelling = True
                self._group.cancel_scope.cancel()
        finally:
            self._ready.set()
            self._closing.set()
            self._ended.set()

    async def _run(self, function: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        _running_inside.set((*_running_inside.get(), self._marker))
        await self._keep_error(function, *args)

    async def _keep_error(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Keep a function's error: an error that escapes from a system task ends trio."""
        try:
            await function(*args)
        except BaseExceptionGroup as group:
            errors = group.split(self._cancelled)[1]
            if errors is None:
                raise
            self._failed(first_error(errors))
        except (self._cancelled, GeneratorExit):
            raise
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            logger.error("a background task of the %s failed: %r", self._owner, error)
        self._closing.set()


_started: WeakSet[BackgroundTasks] = WeakSet()


def _forget_event_loops() -> None:
    """Record in a forked process that no event loop runs."""
    for tasks in _started:
        tasks._thread = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_event_loops)


class Runnable(ProcessBound):
    """A client that serves until stopped: by `serve` in an event loop, or by `run` in a new loop."""

    async def serve(self, *, signals: bool | None = None) -> None:
        """Serve until stopped; then drain and close."""
        raise NotImplementedError

    def run(
        self, *, signals: bool | None = None, backend: str = "asyncio", backend_options: dict[str, Any] | None = None
    ) -> None:
        """Run `serve` in a new event loop.

        Args:
            signals: see `serve`.
            backend: ``asyncio`` or ``trio``.
            backend_options: see `anyio.run`, for example ``{"use_uvloop": True}``.

        Raises:
            InvalidState: called in a running event loop; use `serve` there.
            NsqError: as for `serve`.
        """
        if current_loop() is not None:
            serve = f"{type(self).__name__.lower()}.serve()"
            raise InvalidState("run() starts an event loop, and one is running", hint=f"await {serve} in it")
        anyio.run(partial(self.serve, signals=signals), backend=backend, backend_options=backend_options)
