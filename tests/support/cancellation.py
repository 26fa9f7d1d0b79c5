"""Cancel an operation at its n-th await, for sweeps over all awaits.

::

    with step.scope:                             # outermost, because scopes must be left in reverse order
        async with Producer(...) as producer:
            await step.watch(producer.publish("t", b"x"))
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar, cast

import anyio
from anyio import get_running_tasks

from tests.support.consumers import eventually

__all__ = ("Step", "sweep")

T = TypeVar("T")

_MOST = 2000


class Step:
    """Cancels a scope at the n-th await of the watched operations.

    Args:
        number: number of the await, from 1.

    Attributes:
        scope: the scope to cancel.
        waited: number of awaits so far.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.waited = 0
        self.scope = anyio.CancelScope()

    @property
    def reached(self) -> bool:
        """Whether the scope was cancelled."""
        return self.scope.cancel_called

    async def watch(self, awaitable: Awaitable[T]) -> T:
        """Await an operation and count its awaits."""
        return cast("T", await _Counted(awaitable, self))

    async def run(self, awaitable: Awaitable[object]) -> None:
        """Watch an operation inside the scope."""
        with self.scope:
            await self.watch(awaitable)

    def count(self) -> None:
        """Count an await."""
        self.waited += 1
        if self.waited == self.number:
            self.scope.cancel()


class _Counted:
    def __init__(self, awaitable: Awaitable[object], step: Step) -> None:
        self._awaitable = awaitable
        self._step = step

    def __await__(self) -> Generator[Any, Any, object]:
        inner = self._awaitable.__await__()
        try:
            waits_for = inner.send(None)
            while True:
                self._step.count()
                try:
                    value = yield waits_for
                except BaseException as error:
                    waits_for = inner.throw(error)
                else:
                    waits_for = inner.send(value)
        except StopIteration as stop:
            return stop.value


async def sweep(once: Callable[[Step], Awaitable[None]]) -> int:
    """Repeat an operation, cancelled at its first await, its second, and so on, until it completes.

    Returns:
        The approximate number of its awaits.
    """
    for number in range(1, _MOST):
        before = len(get_running_tasks())
        step = Step(number)
        with anyio.fail_after(25):
            await once(step)
        await eventually(lambda: len(get_running_tasks()) <= before)  # noqa: B023 - it ends before the next round of the loop
        if not step.reached:
            gc.collect()  # makes unclosed resources warn
            return number - 1
    raise AssertionError(f"more than {_MOST} awaits")
