"""Tasks that end in order: nothing cancels them but their owner, and of several errors one comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

__all__ = ("OrderedTasks", "first_error")

E = TypeVar("E", bound=BaseException)


def first_error(errors: BaseExceptionGroup[E]) -> E:
    """Return the first error of a group: users see one error, never a group."""
    first = errors.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


class OrderedTasks:
    """A task group, and tasks in it that outlive its cancellation until `leave`.

    Attributes:
        group: for tasks that may be cancelled with it.
    """

    def __init__(self) -> None:
        self.group: TaskGroup = anyio.create_task_group()
        self._scopes: list[anyio.CancelScope] = []

    async def enter(self) -> None:
        """Enter the task group."""
        await self.group.__aenter__()

    def start(self, function: Callable[[], Awaitable[object]]) -> None:
        """Start a task that only `leave` cancels, so that leaving is orderly."""
        scope = anyio.CancelScope(shield=True)
        self._scopes.append(scope)

        async def run() -> None:
            with scope:
                await function()

        self.group.start_soon(run)

    async def leave(self, error: BaseException | None) -> None:
        """Cancel all tasks and wait for their end.

        Args:
            error: what the body of the task group raised.

        Raises:
            BaseException: the first error of a task; a cancellation, unless the body raised something else, which goes
                on: the cancellation comes back at the next chance.
        """
        for scope in self._scopes:
            scope.cancel()
        self.group.cancel_scope.cancel()
        try:
            await self.group.__aexit__(None, None, None)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        except anyio.get_cancelled_exc_class():
            if error is None or isinstance(error, anyio.get_cancelled_exc_class()):
                raise
