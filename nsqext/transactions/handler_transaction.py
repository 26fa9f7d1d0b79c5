"""A transaction around each call of a handler, which is committed before the message is finished."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, TypeVar

from anyio import CancelScope, to_thread

from nsqext.client.consumer.message import Finish
from nsqext.client.middleware import Middleware
from nsqext.errors import InvalidInput, InvalidState
from nsqext.transactions.schema import SqlConnection

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import CallNext, Handling

S = TypeVar("S", bound=SqlConnection)

Begin = Callable[[], AbstractAsyncContextManager[S] | AbstractContextManager[S]]
"""Opens a transaction, and commits it at the end or rolls it back after an exception."""


class HandlerTransaction(Middleware, Generic[S]):
    """What `Inbox` and `Positions` share.

    Args:
        begin: see there.
    """

    def __init__(self, begin: Begin[S]) -> None:
        self._begin = begin
        self._session: ContextVar[S] = ContextVar("nsqext_session")
        self.skipped: int = 0
        """Messages that were handled before, and skipped."""

    def session(self) -> S:
        """Return the session of the message that is being handled: ``Annotated[AsyncSession, Depends(inbox.session)]``.

        Raises:
            InvalidState: no message is being handled.
        """
        found = self._session.get(None)
        if found is None:
            raise InvalidState("no message is being handled", hint="call it in a handler with this middleware")
        return found

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler in a transaction, unless the message was handled before.

        Raises:
            InvalidInput: the handler receives batches.
            Exception: that of the handler, or of the database; nothing is committed then.
        """
        if handling.batch:
            raise InvalidInput(
                f"{type(self).__name__} cannot be used with batches", hint="use a handler of single messages"
            )
        finish: Finish | None = None
        result: object = None
        async with self._transaction() as session:
            if not await self._is_new(session, handling.channel, handling.message):
                self.skipped += 1
                return None
            token = self._session.set(session)
            try:
                result = await call_next(handling)
            except Finish as signal:  # the message is done: commit
                finish = signal
            finally:
                self._session.reset(token)
        if finish is not None:
            raise finish
        return result

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[S]:
        """Open a transaction; one of a blocking connection begins and ends in a thread."""
        manager = self._begin()
        if isinstance(manager, AbstractAsyncContextManager):
            async with manager as session:
                yield session
            return
        session = await to_thread.run_sync(manager.__enter__)
        try:
            yield session
        except BaseException as error:
            with CancelScope(shield=True):
                await to_thread.run_sync(manager.__exit__, type(error), error, error.__traceback__)
            raise
        with CancelScope(shield=True):
            await to_thread.run_sync(manager.__exit__, None, None, None)

    @abstractmethod
    async def _is_new(self, session: S, channel: str, message: Message) -> bool:
        """Record a message in the transaction; return whether it was not handled before."""
