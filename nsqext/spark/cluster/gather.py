"""One request for each of many keys, several at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

import anyio

from nsqext.client.tasks import first_error
from nsqext.errors import NsqError

__all__ = ("gather",)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_CONCURRENT = 16


async def gather(keys: Iterable[K], function: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """Call a coroutine function for each key, for several at the same time; returns the results in the order of keys.

    Raises:
        NsqError: the first error; the other calls are cancelled.
    """
    results: dict[K, T] = {}
    limiter = anyio.CapacityLimiter(_CONCURRENT)

    async def run(key: K) -> None:
        async with limiter:
            results[key] = await function(key)

    wanted = list(keys)
    try:
        async with anyio.create_task_group() as tasks:
            for key in wanted:
                tasks.start_soon(run, key)
    except BaseExceptionGroup as group:
        errors, others = group.split(NsqError)
        if errors is None or others is not None:
            raise
        raise first_error(errors) from None
    return {key: results[key] for key in wanted}
