"""Find calls of a scenario that were not awaited: such a node was not killed, and the test passes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, Concatenate, ParamSpec, TypeVar

from nsqext.errors import InvalidState

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound="NotedCalls")


class NotedCalls:
    """An object whose calls have to be awaited; see `awaited`."""

    def __init__(self, calls: list[Coroutine[Any, Any, Any]]) -> None:
        self.calls: list[Coroutine[Any, Any, Any]] = calls


def awaited(
    method: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]]:
    """Decorator: note each call of a coroutine method, for `forgotten`."""

    @wraps(method)
    def call(owner: Owner, /, *args: P.args, **settings: P.kwargs) -> Coroutine[Any, Any, T]:
        coroutine = method(owner, *args, **settings)
        owner.calls.append(coroutine)
        return coroutine

    return call


def forgotten(calls: list[Coroutine[Any, Any, Any]]) -> InvalidState | None:
    """Return the error of the first call that was never awaited; None if all were."""
    left = [call for call in calls if getcoroutinestate(call) == CORO_CREATED]
    for call in left:
        call.close()  # without a warning of Python
    if not left:
        return None
    name = getattr(left[0], "__name__", "a method")
    return InvalidState(f"{name}() was called and not awaited, and had no effect", hint=f"write await ….{name}(…)")
