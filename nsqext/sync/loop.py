"""The event loop behind the blocking objects, how they wait for it, and members that call the asynchronous object."""

from __future__ import annotations

import _thread
import atexit
import functools
import inspect
import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, overload

from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from nsqext.errors import InvalidState
from nsqext.transport.event_loop import current_loop
from nsqext.types import ProcessBound
from nsqext.waits import AsyncioLoop

logger: logging.Logger = logging.getLogger("nsqext.sync")

_HALT_TIMEOUT = 5.0  # seconds that the end of the process waits for a busy event loop

C = TypeVar("C", bound=AbstractAsyncContextManager[Any, bool | None])
T = TypeVar("T")


class OpenLoop:
    """Keeps the shared event loop running within a block.

    A class, because garbage collection would run the ``finally`` of a generator, which would wait for an object that is
    never closed.
    """

    def __enter__(self) -> BlockingPortal:
        self._provider, self._portal = shared_loop.enter()
        return self._portal

    def __exit__(self, *error: object) -> None:
        if self._portal not in shared_loop.orphaned:
            self._provider.__exit__(None, None, None)


class SharedLoop:
    """The event loop of all open objects: starts with the first, ends after the last."""

    def __init__(self) -> None:
        #: of event loops in the parent of this forked process
        self.orphaned: tuple[BlockingPortal, ...] = ()
        #: starts the event loop for the first open object, and ends it after the last
        self.provider: BlockingPortalProvider
        self._portal: BlockingPortal | None = None
        self._kept: tuple[BlockingPortalProvider, BlockingPortal] | None = None
        self._renew()
        atexit.register(self._halt)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        portal, self._portal = self._portal, None
        self._kept, self._keeping = None, threading.Lock()  # the parent may hold the lock
        if portal is not None:
            self.orphaned = (*self.orphaned, portal)
            # the end of the interpreter would wait for its thread forever
            _refuse(portal, "the event loop stayed in the parent when this process was forked")
        self.provider = BlockingPortalProvider("asyncio", {"use_uvloop": find_spec("uvloop") is not None})

    def enter(self) -> tuple[BlockingPortalProvider, BlockingPortal]:
        """Start the event loop unless it runs; return its provider, to be exited, and its portal."""
        _check_system_threads()
        provider = self.provider
        self._portal = provider.__enter__()
        return provider, self._portal

    def kept(self) -> BlockingPortal:
        """Keep the event loop running until the process ends; return its portal. Forked children have their own."""
        with self._keeping:
            if self._kept is None:
                self._kept = self.enter()
                atexit.register(self._end, self._kept)
            return self._kept[1]

    def _end(self, kept: tuple[BlockingPortalProvider, BlockingPortal]) -> None:
        provider, portal = kept
        if portal not in self.orphaned:
            portal.call(portal.stop, True)  # cancels what unclosed objects wait for
            provider.__exit__(None, None, None)

    def _halt(self) -> None:
        """Stop the event loop of unclosed objects before the interpreter ends.

        A timer of uvloop that is due in its daemon thread after the interpreter's end kills the process with SIGSEGV.
        Nothing is closed or cancelled, as in a killed process.
        """
        halted = threading.Event()

        def halt() -> None:
            halted.set()
            threading.Event().wait()  # until the process ends

        if self._portal is not None:
            with suppress(RuntimeError):  # the last object was closed
                self._portal.start_task_soon(halt)
                halted.wait(_HALT_TIMEOUT)
            _refuse(self._portal, "the process ends")


def _check_system_threads() -> None:
    """Raise InvalidState if the event loop cannot run in a system thread, or threads cannot wait for it."""
    for what, function in (("threads", _thread.start_new_thread), ("sockets", socket.socket)):
        library = function.__module__.partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise InvalidState(
                f"{library} has replaced {what}, and blocking clients need those of the system",
                hint="do not patch this process; with Celery use the pools prefork, threads or solo",
            )


class _Refused(RuntimeError):
    """The event loop runs no further calls."""


def _refuse(portal: BlockingPortal, reason: str) -> None:
    """Refuse further calls, which would wait forever."""

    def refuse(*_: object, **__: object) -> None:
        raise _Refused(reason)

    vars(portal)["start_task_soon"] = refuse


_PORTAL_CLOSED = "This portal is not running"  # anyio's text
_WHILE_OPEN = {
    "consumer": "messages are answered inside its 'with' block",
    "batcher": "use it inside the 'with' block of its producer",
}

shared_loop: SharedLoop = SharedLoop()
"""The event loop of this process."""


def call(
    portal: BlockingPortal | None,
    what: str,
    function: Callable[..., Coroutine[Any, Any, T]],
    /,
    *args: object,
    **keywords: object,
) -> T:
    """Run a coroutine function in an open object's event loop; raises InvalidState.

    An exception in the waiting thread, such as KeyboardInterrupt, cancels the coroutine.
    """
    if portal is None:
        raise InvalidState(f"the {what} is not open", hint=f"use it inside a 'with' block of the {what}")
    if portal in shared_loop.orphaned:
        raise InvalidState(
            f"the {what} was opened before this process was forked", hint="create a new one in the child"
        )
    try:
        future: Future[T] = portal.start_task_soon(partial(function, **keywords), *args)
    except RuntimeError as error:
        if str(error) == _PORTAL_CLOSED:
            raise InvalidState(f"the {what} was closed", hint=_WHILE_OPEN.get(what, "create a new one")) from error
        own = None if isinstance(error, _Refused) else "this is its event loop's thread, which must not wait"
        raise InvalidState(f"the {what} cannot be used: {error}", hint=own) from error
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def call_now(portal: BlockingPortal | None, what: str, function: Callable[[], T]) -> T:
    """Run a function in the event loop's thread; see `call`."""

    async def run() -> T:
        return function()

    return call(portal, what, run)


class BlockingClient(ProcessBound, Generic[C]):
    """A blocking object that opens and calls an asynchronous object in the shared event loop."""

    _what = "object"

    def __init__(self, original: C) -> None:
        self._original: C = original
        self._portal: BlockingPortal | None = None
        self._closing: ExitStack | None = None
        # held to close it: the event loop must not end below another thread that closes it; reentrant for signals
        self._closers = threading.RLock()
        loop = current_loop()
        if loop is not None and not isinstance(loop.native_token, AsyncioLoop):
            raise InvalidState(
                f"a blocking {self._what} cannot be made in an event loop of trio",
                hint=f"use the asynchronous {self._what} of nsqext there, or make and use it in a thread",
            )
        if loop is not None:
            logger.warning(
                "a blocking %s was made in a running event loop, which stops while it waits: use the asynchronous %s "
                "of nsqext, or make it in a thread",
                self._what,
                self._what,
            )

    def __repr__(self) -> str:
        return f"sync.{self._original!r}"

    def __del__(self) -> None:
        portal: BlockingPortal | None = vars(self).get("_portal")  # None if the constructor raised an error
        if portal is not None and portal not in shared_loop.orphaned:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def _enter(self, portal: BlockingPortal | None = None) -> None:
        if self._portal is not None:
            raise InvalidState(f"the {self._what} is open already")
        with ExitStack() as stack:
            # first: a consumer calls its handlers while it opens
            self._portal = portal = portal or stack.enter_context(OpenLoop())
            try:
                stack.enter_context(portal.wrap_async_context_manager(self._original))
            except BaseException:
                self._portal = None
                raise
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal in shared_loop.orphaned:  # the parent closes it, and may have held the lock
            self._portal = self._closing = None
            return
        with self._closers:
            closing, self._closing = self._closing, None
            if closing is None:
                return
            try:
                closing.__exit__(kind, error, trace)
            finally:
                self._portal = None

    def _run(self, function: Callable[..., Coroutine[Any, Any, T]], /, *args: object, **keywords: object) -> T:
        return call(self._portal, self._what, function, *args, **keywords)

    def _run_now(self, function: Callable[[], T]) -> T:
        return call_now(self._portal, self._what, function)


if TYPE_CHECKING:
    from typing import Protocol

    class Blocking(Protocol):
        """A blocking object."""

        _original: Any

        def _run(
            self, function: Callable[..., Coroutine[Any, Any, Any]], /, *args: object, **keywords: object
        ) -> Any: ...


P = ParamSpec("P")


class Method(Generic[P, T]):
    """A method that calls the asynchronous object's method of this name in the event loop, and waits.

    Assigned with ``Final``, because users' type checkers would not know its type otherwise.
    """

    @overload
    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None: ...

    @overload
    def __init__(self, function: Callable[Concatenate[Any, P], T]) -> None: ...

    def __init__(self, function: Callable[Concatenate[Any, P], Any]) -> None:
        self._function = function  # the asynchronous method, with parameters and result

    def __set_name__(self, owner: type, name: str) -> None:
        """Replace this by a function, which documentation and inspection show as a method."""

        def call(self: Blocking, /, *args: object, **keywords: object) -> object:
            return self._run(getattr(self._original, name), *args, **keywords)

        original = self._function
        # annotations are looked up in the original's globals
        method = FunctionType(call.__code__, original.__globals__, name, None, call.__closure__)
        functools.update_wrapper(method, original)
        del vars(method)["__wrapped__"]  # mocks would count it as a coroutine function
        vars(method)["__signature__"] = inspect.signature(original)
        method.__module__, method.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        method.__doc__ = f"See `nsqext.{owner.__name__}.{name}`."
        setattr(owner, name, method)

    if TYPE_CHECKING:

        @overload
        def __get__(self, blocking: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...

        @overload
        def __get__(self, blocking: object, owner: type) -> Callable[P, T]: ...

        def __get__(self, blocking: object, owner: type) -> Any:
            """Bind the method."""


class Same(Generic[T]):
    """A property with the value of the asynchronous object's member of this name."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Replace this by a read-only property."""
        setattr(owner, name, property(attrgetter(f"_original.{name}"), doc=f"See `nsqext.{owner.__name__}.{name}`."))

    if TYPE_CHECKING:

        @overload
        def __get__(self, blocking: None, owner: type) -> Self: ...

        @overload
        def __get__(self, blocking: Blocking, owner: type) -> T: ...

        def __get__(self, blocking: Blocking | None, owner: type) -> T | Self:
            """Return the value."""

        def __set__(self, blocking: Blocking, value: Never) -> None:
            """Raise AttributeError."""
