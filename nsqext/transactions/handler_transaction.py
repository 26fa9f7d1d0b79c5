"""A transaction around each call of a handler, in which the message is recorded: shared by inbox and positions."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from secrets import token_hex
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from anyio import CancelScope, get_cancelled_exc_class, to_thread

from nsqext.arguments import check_plain_function
from nsqext.client.consumer.handlers.forgotten_await import check_awaited, requeue_not_awaited
from nsqext.client.consumer.message import Finish
from nsqext.client.middleware import Middleware
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.transactions.boundaries import (
    End,
    OpenTransaction,
    autocommit_error,
    check_outermost,
    end_error,
    finished_error,
    hidden_error,
    no_transaction_error,
    uncommitted_error,
)
from nsqext.transactions.outages import MISSING, outage_of
from nsqext.transactions.schema import SqlConnection, Statement, execute, missing_table

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import CallNext, Handling


logger: logging.Logger = logging.getLogger("nsqext.transactions")

S = TypeVar("S", bound=SqlConnection)

Begin = Callable[[], AbstractAsyncContextManager[S] | AbstractContextManager[S]]
"""Opens a transaction, and commits it at the end or rolls it back after an exception."""


class _RolledBack(Exception):
    """Ends a transaction without an effect."""


def _not_hidden(error: BaseException) -> BaseException:
    """Return what is raised where a transaction has hidden an error; a cancellation stays."""
    return hidden_error() if isinstance(error, Exception) else error


async def _end(opened: OpenTransaction) -> End:
    """Return whether a transaction is still open, also to a handler that is cancelled: its record may be committed."""
    with CancelScope(shield=True):
        end = await opened.end()
    return end


def _check_not_requeued(message: Message) -> None:
    """End the transaction of a message that is handled again."""
    if message.requeue_called:
        raise _RolledBack if message.requeued else requeue_not_awaited()


class HandlerTransaction(Middleware, Generic[S]):
    """What `Inbox` and `Positions` share."""

    _tables: ClassVar[tuple[str, ...]]
    opens_transaction = True
    unsupported: ClassVar[Mapping[str, str]] = {
        "batches": "use a handler of single messages, or give it to those handlers alone: handler(…, middleware=[…])",
        "auto_finish=False": "the message is recorded as handled when its handler returns: leave out auto_finish",
        "iteration": "the transaction begins and ends with the call of a handler: @consumer.handler",
    }

    def __init__(self, begin: Begin[S]) -> None:
        check_plain_function("begin", begin)
        self._begin = begin
        self._session: ContextVar[list[S]] = ContextVar("nsqext_session")  # empty behind the handler
        self._checked = False
        self.skipped: int = 0  #: messages that were handled before, and skipped

    def session(self) -> S:
        """Return the session of the message that is being handled: ``Annotated[AsyncSession, Depends(inbox.session)]``.

        Raises:
            InvalidState: no message is being handled.
        """
        found = self._session.get(None)
        if not found:
            raise InvalidState(
                "no message is being handled",
                hint="call it in a handler with this middleware, and in no task that runs longer than the handler",
            )
        return found[0]

    async def start(self) -> None:
        """Call `check`; a warning is logged if the database does not respond.

        Raises:
            InvalidSetting: as for `check`.
        """
        if self._checked:
            return
        try:
            await self.check()
        except (InvalidInput, InvalidSetting):
            raise
        except Exception as error:
            logger.warning("%s cannot check its database yet: %s", type(self).__name__, error)

    async def _check_tables(self) -> None:
        for table in self._tables:
            try:
                await self._read(f"SELECT 1 FROM {table} WHERE 1 = 0")  # noqa: S608
            except Exception as error:
                if outage_of(error) not in (None, *MISSING):
                    raise
                await self._read("SELECT 1")  # raises if the database does not respond
                raise missing_table(type(self).__name__, table, error) from error

    async def _read(self, sql: str) -> None:
        async with self._transaction() as session:
            check_outermost(session)
            await execute(session, sql, {})

    async def check(self) -> None:
        """Check that the tables exist, and that ``begin`` commits at its end and rolls back after an exception.

        Called at the start of an app or consumer. A row is written and removed in three transactions.

        Raises:
            InvalidSetting: a table is missing, or ``begin`` does not commit or roll back, hides errors, or opens a
                savepoint in a longer transaction.
            Exception: an error of the database.
        """
        await self._check_tables()
        name = token_hex(8)
        with suppress(_RolledBack):
            async with self._transaction() as session:
                await self._write_probe(session, name)
                raise _RolledBack
        async with self._transaction() as session:
            stayed = await self._remove_probe(session, name)
            if not stayed:
                await self._write_probe(session, name)
        if stayed:
            raise autocommit_error()
        async with self._transaction() as session:
            committed = await self._remove_probe(session, name)
        if not committed:
            raise uncommitted_error()
        self._checked = True

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler in a transaction, unless the message was handled before.

        Raises:
            InvalidSetting: ``begin`` opens no transaction that is committed or rolled back at its end.
            InvalidState: the handler has ended its transaction, or did not await a requeue; the message is handled
                again. Or it has finished its message, before the commit, which has succeeded.
            Exception: an error of the handler or database; nothing is committed then.
        """
        if not self._checked:
            await self.check()
        undo: list[Statement] = []
        try:
            return await self._handle(handling, call_next, undo)
        except _RolledBack:
            return None
        finally:
            if undo:
                await self._undo(undo[0])

    async def _handle(self, handling: Handling, call_next: CallNext, undo: list[Statement]) -> object:
        """Call the handler in a transaction; add to ``undo`` what removes a record that may be committed alone."""
        message = handling.message
        finish: Finish | None = None
        result: object = None
        async with self._transaction() as session:
            check_outermost(session)
            opened = OpenTransaction(session)
            removal = await self._record(opened, handling.channel, message)
            if removal is None:
                self.skipped += 1
                return None
            undo.append(removal)
            await opened.guard()
            undo.clear()
            current = [session]
            token = self._session.set(current)
            try:
                result = await call_next(handling)
                check_awaited(result)
                _check_not_requeued(message)
            except Finish as signal:  # the message is done: commit
                finish = signal
            except get_cancelled_exc_class():
                with suppress(Exception):  # without the database nothing more is committed
                    if await _end(opened) is not End.OPEN:
                        undo.append(removal)
                raise
            except Exception as error:
                end = await _end(opened)
                if end is not End.OPEN:
                    undo.append(removal)
                if end is End.ENDED:
                    raise end_error(end, message.topic) from error
                raise
            finally:
                opened.release()
                current.clear()  # for tasks that the handler has started
                self._session.reset(token)
            end = await _end(opened)
            if end is not End.OPEN:
                undo.append(removal)
                raise end_error(end, message.topic)
        if finish is not None:
            raise finish
        if message.answered:
            raise finished_error(message.topic)
        return result

    async def _undo(self, removal: Statement) -> None:
        """Remove the record of a message, so that it is handled again."""
        try:
            with CancelScope(shield=True):
                async with self._transaction() as session:
                    await execute(session, *removal)
        except Exception:
            logger.exception("a message may be skipped although its handler has failed")

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[S]:
        """Open a transaction; a blocking connection begins and ends it in a thread.

        Raises:
            InvalidSetting: ``begin`` hides an error of the block: it would hide a failed commit too.
        """
        manager = self._begin()
        if isinstance(manager, AbstractAsyncContextManager):
            hidden: BaseException | None = None
            async with manager as session:
                try:
                    yield session
                except BaseException as error:
                    hidden = error
                    raise
            if hidden is not None:
                raise _not_hidden(hidden) from hidden
            return
        if not isinstance(manager, AbstractContextManager):
            raise no_transaction_error(manager)
        session = await to_thread.run_sync(manager.__enter__)
        try:
            yield session
        except BaseException as error:
            with CancelScope(shield=True):
                hides = await to_thread.run_sync(manager.__exit__, type(error), error, error.__traceback__)
            if hides:
                raise _not_hidden(error) from error
            raise
        with CancelScope(shield=True):
            await to_thread.run_sync(manager.__exit__, None, None, None)

    @abstractmethod
    async def _record(self, opened: OpenTransaction, channel: str, message: Message) -> Statement | None:
        """Begin a transaction with the record of a message; return what removes it, None if it was handled before."""

    @abstractmethod
    async def _write_probe(self, session: S, name: str) -> None:
        """Write a row that stands for no message."""

    @abstractmethod
    async def _remove_probe(self, session: S, name: str) -> bool:
        """Remove that row; return whether it existed."""
