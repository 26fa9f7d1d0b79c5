"""One question about many things, asked for several of them at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

import anyio

from nsqext.client.tasks import first_error
from nsqext.errors import NsqError

__all__ = ("together",)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_AT_ONCE = 16


async def together(keys: Iterable[K], function: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """Call a coroutine function for everything, for several at the same time; returns the results in the same order.

    Raises:
        NsqError: the first error of any; what is under way for the others is cancelled.
    """
    results: dict[K, T] = {}
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def run(key: K) -> None:
        async with limiter:
            results[key] = await function(key)

    wanted = list(keys)
    try:
        async with anyio.create_task_group() as tasks:
            for key in wanted:
                tasks.start_soon(run, key)
    except* NsqError as errors:
        raise first_error(errors) from None
    return {key: results[key] for key in wanted}
