"""Call blocking handlers in threads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from nsqext.errors import InvalidSetting, InvalidState


def check_blocking_handler(function: Callable[..., object]) -> None:
    """Refuse a handler of blocking clients' messages; raises InvalidSetting."""
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.annotation
        place = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}."
        if place in ("sync.Message", "nsqext.sync.Message") or place.startswith("nsqext.sync."):
            raise InvalidSetting(
                f"the parameter {parameter.name} is a message of blocking clients",
                hint="annotate it with nsqext.Message, and raise Requeue or Reject; or use nsqext.sync.Consumer",
            )


class LeftThreads:
    """Runs blocking handlers in threads. Only `leave` abandons these: a handler's time limit waits for its thread."""

    def __init__(self) -> None:
        self._running: set[anyio.CancelScope] = set()

    def leave(self) -> None:
        """Leave the handlers that run; call it after their workers were cancelled."""
        for scope in tuple(self._running):
            scope.cancel()

    async def run(self, function: Callable[[], object]) -> object:
        """Call a function in a thread."""
        await checkpoint_if_cancelled()
        with anyio.CancelScope(shield=True) as scope:
            self._running.add(scope)
            try:
                return await _run_in_thread(function, abandon=True)
            finally:
                self._running.discard(scope)
        await anyio.sleep_forever()  # raises the cancellation of the worker
        return None


async def _run_in_thread(function: Callable[[], object], *, abandon: bool = False) -> object:
    # anyio's default limiter has 40 places for the whole program; the consumer limits calls
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=abandon, limiter=anyio.CapacityLimiter(1))


def in_thread(
    function: Callable[..., object], left: LeftThreads | None = None
) -> Callable[..., Coroutine[Any, Any, object]]:
    """Return a coroutine function that calls a blocking handler in a thread, with its name and annotations.

    A thread cannot be interrupted: a cancelled call waits for the function and returns its result, unless the handlers
    are ``left`` running.
    """
    shown = function
    while isinstance(shown, functools.partial):
        shown = shown.func
    if not inspect.isroutine(shown):
        shown = type(shown).__call__
    name = getattr(function, "__qualname__", shown.__qualname__)
    run_in_thread = _run_in_thread if left is None else left.run

    async def call(*arguments: object, **named: object) -> object:
        def run() -> object:
            result = function(*arguments, **named)
            if inspect.iscoroutine(result):
                result.close()
                raise InvalidState(f"the handler {name} returned a coroutine", hint="declare it with 'async def'")
            return result

        return await run_in_thread(run)

    functools.update_wrapper(call, shown)
    # selects the arguments; the signature of `shown` has further arguments
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    call.__qualname__ = name
    call.runs_in_thread = left is None  # type: ignore[attr-defined] # see `nsqext.client.consumer.handler_functions`
    return call
