"""A service that writes each message to a table: plainly, with an inbox, or with positions.

As a program it kills itself at a step of its handler.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from nsqext import Consumer, Message
from nsqext.client.middleware import Middleware
from nsqext.transactions import Inbox, Positions

if TYPE_CHECKING:
    from nsqext.client.middleware import CallNext, Handling

__all__ = ("MODES", "STEPS", "Service")

MODES = ("plain", "inbox", "positions")
STEPS = ("the call", "the effect", "the return", "the commit", "FIN")
"""What the program does with a message, in this order."""

Begin = Callable[[], AbstractAsyncContextManager[AsyncSession]]
Reach = Callable[[str], object]


class _Around(Middleware):
    """Reports the step before the next middleware is called, or after it."""

    def __init__(self, reach: Reach, before: str | None, after: str) -> None:
        self._reach, self._before, self._after = reach, before, after

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        if self._before is not None:
            self._reach(self._before)
        result = await call_next(handling)
        self._reach(self._after)
        return result


class _Plain(Middleware):
    """A transaction around the handler, without a memory."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._open: AsyncSession | None = None

    def session(self) -> AsyncSession:
        assert self._open is not None
        return self._open

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        async with self._begin() as self._open:
            return await call_next(handling)


class Service:
    """A consumer of the channel ``ch`` whose handler writes the body to a table.

    Args:
        mode: how it remembers what it has handled.
        topic: name of the topic.
        lookupd: addresses.
        sessions: opens transactions.
        reach: called before each step.
        begin: opens the transaction of the handler; that of ``sessions`` by default.
    """

    def __init__(
        self,
        mode: str,
        topic: str,
        lookupd: Any,
        sessions: async_sessionmaker[AsyncSession],
        *,
        reach: Reach = lambda step: None,
        begin: Begin | None = None,
    ) -> None:
        opens: Begin = begin if begin is not None else sessions.begin
        self.sessions = sessions
        memory: Any = {"plain": _Plain, "inbox": Inbox, "positions": Positions}[mode](opens)
        self._check = getattr(memory, "check", None)
        settings: dict[str, Any] = {"start": memory} if mode == "positions" else {}
        self.consumer = Consumer(
            topic,
            "ch",
            lookupd,
            middleware=[_Around(reach, STEPS[0], STEPS[4]), memory, _Around(reach, None, STEPS[3])],
            requeue_delay=0.05,
            backoff="off",
            msg_timeout=2.0,
            **settings,
        )

        @self.consumer.handler
        async def note(message: Message) -> None:
            reach(STEPS[1])
            statement = text("INSERT INTO effects (number, body) VALUES (0, :body)")
            await memory.session().execute(statement, {"body": message.body.decode()})
            reach(STEPS[2])

    async def check(self) -> None:
        """Do what the first message does besides: check how transactions begin and end."""
        if self._check is not None:
            await self._check()

    async def effects(self) -> dict[str, int]:
        """Return how many times each message had its effect."""
        async with self.sessions() as session:
            return dict(Counter((await session.execute(text("SELECT body FROM effects"))).scalars()))

    async def finishes(self, count: int) -> None:
        """Run until a number of messages are finished, and none is delivered for a while."""
        async with self.consumer:
            await self.quiet(count)

    async def quiet(self, count: int) -> None:
        """Wait until a number of messages are finished, and none is delivered for a while."""
        before, seconds = -1, 0.0
        with anyio.fail_after(25):
            while before != (found := self.consumer.statistics()).received or seconds < 0.5 or found.finished < count:
                seconds = seconds + 0.1 if before == found.received else 0.0
                before = found.received
                await anyio.sleep(0.1)


@asynccontextmanager
async def lost_response(sessions: async_sessionmaker[AsyncSession], failures: list[str]) -> AsyncIterator[AsyncSession]:
    """Open a transaction; while failures are left, its commit succeeds, and the response to it is lost."""
    async with sessions.begin() as session:
        yield session
    if failures:
        failures.pop()
        raise ConnectionError("the database was stopped")


def _die_at(step: str) -> Reach:
    def reach(here: str) -> None:
        if here == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


async def _main(mode: str, lookupd: str, topic: str, url: str, step: str) -> None:
    sessions = async_sessionmaker(create_async_engine(url))
    async with Service(mode, topic, lookupd, sessions, reach=_die_at(step)).consumer:
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(partial(_main, *sys.argv[1:]))
