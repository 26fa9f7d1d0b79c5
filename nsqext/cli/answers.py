"""Ask a cluster that may not respond yet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio

from nsqext.errors import NsqError
from nsqext.waits import Doubling

if TYPE_CHECKING:
    from nsqext.admin import Admin
    from nsqext.cli.connection import ServerAccess

logger: logging.Logger = logging.getLogger("nsqext.relay")

T = TypeVar("T")

_FIRST, _LONGEST = 0.2, 5.0  # seconds between two requests


async def answer_of(access: ServerAccess, ask: Callable[[Admin], Awaitable[T]]) -> T | None:
    """Return the answer of a cluster; None for a cluster that is known by its nodes alone.

    It waits while an error may pass: lookup or a node is down, or a topic does not exist yet.
    """
    if not access.load().lookupd:
        return None
    pauses = Doubling(_FIRST, _LONGEST)
    level = logging.WARNING
    while True:
        try:
            async with access.admin() as admin:
                return await ask(admin)
        except NsqError as error:
            if not error.retryable:
                raise
            logger.log(level, "waiting: %s", error)
            level = logging.INFO
        await anyio.sleep(pauses.next())
