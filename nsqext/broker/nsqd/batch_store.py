"""Store large batches: a part in each turn of the event loop, so that other clients are served meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.publish import Stored
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Hosted

T = TypeVar("T")

_PART = 2000
"""Messages that are stored in one turn of the event loop."""


def is_large(hosted: Hosted, items: Sequence[object]) -> bool:
    """Return whether a publish has to use `store_in_parts`: it is large, or another large one is being stored."""
    return len(items) > _PART or hosted.storing is not None


async def store_in_parts(hosted: Hosted, items: Sequence[T], put: Callable[[Sequence[T]], Stored]) -> Stored:
    """Store a batch; other publishes to the partition wait, so that ids and offsets are consecutive.

    If ``put``, which stores a part, raises `RequestError` or `Refusal`, no message of the batch is stored.
    """
    while hosted.storing is not None:
        await hosted.storing.wait()
    hosted.storing = done = anyio.Event()
    parts: list[Stored] = []
    try:
        for start in range(0, len(items), _PART):
            if parts:
                await checkpoint()
            parts.append(put(items[start : start + _PART]))
    except (RequestError, Refusal):
        if parts:
            hosted.partition.rollback(parts[0])
        raise
    finally:
        hosted.storing = None
        done.set()
    entries = [entry for part in parts for entry in part.entries]
    return Stored(parts[0].message_id, parts[0].offset, sum(part.size for part in parts), entries, parts)


@frozen(eq=False)
class Deferred:
    """The rest of a command, to be awaited; nothing is left behind if the node is killed before that."""

    start: Callable[[], Coroutine[Any, Any, None]]

    def __await__(self) -> Generator[Any, Any, None]:
        return self.start().__await__()
