"""Calls from blocking code into the event loop of readers, which runs until the process ends."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from nsqext.sync import loop

T = TypeVar("T")

readers_loop: loop.SharedLoop = loop.SharedLoop()
"""The blocking clients' loop would end with its last client, and cost a connection per range."""


def call(function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
    """Run a coroutine function in the event loop and return its result; a caller's interrupt cancels it."""
    return loop.call(readers_loop.kept(), "event loop", function, *args)


def iterate(
    manager: AbstractAsyncContextManager[Any, bool | None], following: Callable[[], Coroutine[Any, Any, T | None]]
) -> Iterator[T]:
    """Enter a context manager in the event loop; yield a coroutine function's results until it returns None.

    Closing the generator leaves the context manager.
    """
    with readers_loop.kept().wrap_async_context_manager(manager):
        while (item := call(following)) is not None:
            yield item
