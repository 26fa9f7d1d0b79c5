"""Call blocking handlers in threads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

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


def in_thread(function: Callable[..., object], *, abandon: bool = False) -> Callable[..., Coroutine[Any, Any, object]]:
    """Return a coroutine function that calls a blocking handler in a thread, with its name and annotations.

    A thread cannot be interrupted: a cancelled call waits for the function and returns its result, or with ``abandon``
    leaves it running.
    """
    shown = function
    while isinstance(shown, functools.partial):
        shown = shown.func
    if not inspect.isroutine(shown):
        shown = type(shown).__call__
    name = getattr(function, "__qualname__", shown.__qualname__)

    async def call(*arguments: object, **named: object) -> object:
        def run() -> object:
            result = function(*arguments, **named)
            if inspect.iscoroutine(result):
                result.close()
                raise InvalidState(f"the handler {name} returned a coroutine", hint="declare it with 'async def'")
            return result

        # anyio's default limiter has 40 places for the whole program; the consumer limits calls
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=abandon, limiter=anyio.CapacityLimiter(1))

    functools.update_wrapper(call, shown)
    # selects the arguments; the signature of `shown` has further arguments
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    call.__qualname__ = name
    call.runs_in_thread = not abandon  # type: ignore[attr-defined] # see `nsqext.client.consumer.handler_functions`
    return call
