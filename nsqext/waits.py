"""Pauses between attempts: numbers, or strategies of tenacity; repeated events; concurrent calls.

A number is the first pause; pauses double up to a bound, with full jitter, as in `tenacity.wait_random_exponential`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Iterable
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable
from weakref import ref

import anyio
from anyio.lowlevel import checkpoint, current_token
from attrs import define

from nsqext.arguments import is_number
from nsqext.errors import InvalidSetting, NsqError

if TYPE_CHECKING:
    from tenacity.wait import wait_base

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_get_ident = threading.get_ident

chance: Random = Random()
"""Source of jitter. Clients in a background thread leave the state of the module ``random`` to the application."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=chance.seed)  # forked workers draw different pauses


def check_wait(name: str, value: object, bound_name: str, bound: float, default_bound: float) -> None:
    """Check a first pause in seconds, which ``bound_name`` bounds, or a strategy; raises InvalidSetting."""
    if is_number(value, -math.inf):
        if not value > 0:
            raise InvalidSetting(f"{name}={value!r} is not positive")
        return
    from tenacity.wait import wait_base

    if not isinstance(value, wait_base):
        raise InvalidSetting(
            f"{name}={value!r} is neither a number of seconds nor a wait strategy of tenacity",
            hint="give 0.1, or tenacity.wait_exponential(...), for example",
        )
    if bound != default_bound:
        raise InvalidSetting(f"{bound_name} has no effect with a strategy", hint=f"give the strategy of {name} a max")


def pause_after(wait: float | wait_base, longest: float, attempts: int, error: BaseException | None = None) -> float:
    """Return the seconds until the next attempt, after that many failed attempts; strategies may use the latest error.

    ``longest`` bounds doubling pauses, not a strategy's.
    """
    if not isinstance(wait, (int, float)):
        return _ask(wait, attempts, error)
    from tenacity import wait_exponential

    return chance.uniform(0.0, _ask(wait_exponential(multiplier=wait, max=longest), attempts))


def _ask(strategy: wait_base, attempts: int, error: BaseException | None = None) -> float:
    from tenacity import RetryCallState, Retrying

    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = max(attempts, 1)
    if error is not None:
        state.set_exception((type(error), error, error.__traceback__))
    return max(0.0, strategy(state))


@define(eq=False)
class Doubling:
    """Pauses of a polling loop: each is twice the previous pause, up to a bound."""

    _first: float  # seconds
    _longest: float  # seconds
    _count: int = 0

    def next(self) -> float:
        self._count += 1
        if self._count == 1:
            return min(self._first, self._longest)
        from tenacity import wait_exponential

        return _ask(wait_exponential(multiplier=self._first, max=self._longest), self._count)

    def reset(self) -> None:
        self._count = 0


@runtime_checkable
class AsyncioLoop(Protocol):
    """An event loop of asyncio."""

    def create_task(self, coro: Coroutine[Any, Any, None], *, name: str) -> object: ...

    def is_running(self) -> bool: ...

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None: ...

    def remove_reader(self, fd: int) -> bool: ...

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None: ...

    def remove_writer(self, fd: int) -> bool: ...

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any: ...


class Turns:
    """The turns of an event loop of asyncio, in which waiting tasks continue; see `turns_of`."""

    __slots__ = ("__weakref__", "_read_before", "_read_last", "call_soon", "cancelled", "loop", "woken")

    def __init__(self, loop: AsyncioLoop) -> None:
        self.loop: AsyncioLoop = loop
        self.call_soon: Callable[[Callable[[], None]], object] = loop.call_soon
        self.cancelled: type[BaseException] = anyio.get_cancelled_exc_class()  #: exception that cancels a task
        #: waiters whose tasks `resume_woken` continues; None if no call of it is due
        self.woken: list[Waiter] | None = None
        # sockets read last, each other than the one before
        self._read_last = self._read_before = -1

    def few_sockets(self, fd: int) -> bool:
        """Note that a socket is read; return whether it is one of the two that were read last."""
        if fd == self._read_last:
            return True
        few = self._read_before in (fd, -1)
        self._read_last, self._read_before = fd, self._read_last
        return few

    def wake(self, waiter: Waiter) -> None:
        """Continue a task soon: one callback for all tasks of a turn costs a third of one for each."""
        if self.woken is None:
            self.woken = [waiter]
            self.call_soon(self.resume_woken)
        else:
            self.woken.append(waiter)

    def resume_woken(self, *, answered: bool = False) -> None:
        """Run the woken tasks until they wait again; not within a task.

        Args:
            answered: only those that waited for a response; others continue in the next turn.
        """
        waiters, self.woken = self.woken or (), None
        if answered:
            for waiter in waiters:
                if not waiter.answered:
                    self.wake(waiter)
            waiters = [waiter for waiter in waiters if waiter.answered]
        rest = iter(waiters)
        try:
            for waiter in rest:
                waiter.resume()
        finally:
            for waiter in rest:  # after an exception that stops the event loop
                self.call_soon(waiter.resume)


class _LastTurns(threading.local):
    """The `Turns` used last in a thread, as long as something waits with it."""

    turns: Callable[[], Turns | None] = staticmethod(lambda: None)


_last = _LastTurns()


def turns_of(loop: AsyncioLoop) -> Turns:
    """Return the object that all waits in an event loop share; call it in the loop's thread."""
    turns = _last.turns()
    if turns is None or turns.loop is not loop:
        turns = Turns(loop)
        _last.turns = ref(turns)
    return turns


class Waiter:
    """A future that a single task awaits, with the interface that asyncio's tasks expect."""

    __slots__ = ("_asyncio_future_blocking", "_callback", "_cancel_args", "_context", "_done", "_turns")

    answered: ClassVar[bool] = False  #: whether what sets it is the response to a request

    def __init__(self, turns: Turns) -> None:
        self._asyncio_future_blocking = False
        self._turns = turns
        self._done = False
        self._cancel_args: tuple[str, ...] | None = None
        self._callback: Callable[[Waiter], object] | None = None
        self._context: Context | None = None

    def set(self) -> None:
        """Wake the task, unless woken or cancelled before."""
        if self._done:
            return
        self._done = True
        self._turns.wake(self)

    def resume(self) -> None:
        """Run the task until it waits again."""
        if self._callback is not None and self._context is not None:
            self._context.run(self._callback, self)

    def __await__(self) -> Generator[Any, None, None]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self

    # What asyncio's tasks and debuggers call

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return self._cancel_args is not None

    def get_loop(self) -> object:
        return self._turns.loop

    def add_done_callback(self, callback: Callable[[Waiter], object], *, context: Context) -> None:
        self._callback = callback
        self._context = context

    def cancel(self, msg: str | None = None) -> bool:
        """Cancel the task in the next turn; return whether it was waiting."""
        if self._done:
            return False
        self._done = True
        self._cancel_args = () if msg is None else (msg,)
        self._turns.call_soon(self.resume)
        return True

    def result(self) -> None:
        if self._cancel_args is not None:
            raise self._turns.cancelled(*self._cancel_args)


class EventWaiter:
    """As `Waiter`, for trio."""

    __slots__ = ("_event", "set")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self.set: Callable[[], None] = self._event.set

    def __await__(self) -> Generator[Any, None, None]:
        return self._event.wait().__await__()


class WaitingTasks:
    """Tasks of an event loop that wait.

    On asyncio, `anyio.Event` costs three times as much for each wait: it looks for the event loop.
    """

    __slots__ = ("_events", "_thread", "_turns")

    def __init__(self) -> None:
        self._turns: Turns | None = None  # of the loop of the last wait, on asyncio
        self._thread = 0
        self._events = False  # a wait was on trio, where to look for the loop costs ten times as much as an event

    def new(self) -> Waiter | EventWaiter:
        """Return what the current task can wait for."""
        turns = self._turns
        if turns is not None and self._thread == _get_ident() and turns.loop.is_running():
            return Waiter(turns)
        if self._events:
            return EventWaiter()
        loop = current_token().native_token
        if not isinstance(loop, AsyncioLoop):
            self._events = True
            return EventWaiter()
        self._turns, self._thread = turns_of(loop), _get_ident()
        return Waiter(self._turns)


class Waiters:
    """Wakes all waiting tasks, repeatedly."""

    def __init__(self) -> None:
        self._tasks = WaitingTasks()
        self._waiting: dict[Waiter | EventWaiter, None] = {}  # an ordered set

    def wake(self) -> None:
        """Wake the waiting tasks; later tasks wait for the next call."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter.set()

    async def wait(self) -> None:
        waiter = self._tasks.new()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)


class Wakeup:
    """Wakes a task, at once or as soon as it waits: no call of `wake` is missed."""

    def __init__(self) -> None:
        self._tasks = WaitingTasks()
        self._waiter: Waiter | EventWaiter | None = None
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        if self._waiter is not None:
            self._waiter.set()

    async def wait(self) -> None:
        """Wait until `wake` was called after the last wait; other tasks run at least once."""
        if self._woken:
            await checkpoint()
        else:
            self._waiter = self._tasks.new()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False


async def gather(keys: Iterable[K], function: Callable[[K], Awaitable[T]], *, at_once: int = 8) -> dict[K, T]:
    """Call a coroutine function for each key, concurrently; return the results in the order of keys.

    Raises the first error, which cancels the other calls.
    """
    results: dict[K, T] = {}
    errors: list[NsqError] = []
    turns = anyio.Semaphore(at_once)

    async def call(key: K) -> None:
        try:
            async with turns:
                results[key] = await function(key)
        except NsqError as error:
            errors.append(error)
            tasks.cancel_scope.cancel()

    wanted = list(dict.fromkeys(keys))
    async with anyio.create_task_group() as tasks:
        for key in wanted:
            tasks.start_soon(call, key)
    if errors:
        raise errors[0]
    return {key: results[key] for key in wanted}
