"""Pauses between attempts: numbers, or strategies of tenacity; repeated events; concurrent calls.

A number is the first pause; pauses double up to a bound, with full jitter, as in `tenacity.wait_random_exponential`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Hashable, Iterable
from random import Random
from typing import TYPE_CHECKING, TypeVar

import anyio
from attrs import define

from nsqext.arguments import is_number
from nsqext.errors import InvalidSetting, NsqError

if TYPE_CHECKING:
    from tenacity.wait import wait_base

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

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


class Waiters:
    """Wakes all waiting tasks, repeatedly."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def wake(self) -> None:
        """Wake the waiting tasks; later tasks wait for the next call."""
        self._event.set()

    async def wait(self) -> None:
        if self._event.is_set():
            self._event = anyio.Event()
        await self._event.wait()


class Wakeup:
    """Wakes a task, at once or as soon as it waits: no call of `wake` is missed."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Wait until `wake` was called after the last wait."""
        await self._event.wait()
        self._event = anyio.Event()


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
