"""Observers: middleware that does not change outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from nsqext.client.consumer.handler_signals import HandlerSignal
from nsqext.client.middleware import CallNext, Handling, Middleware, Publishing, SendNext

if TYPE_CHECKING:
    from types import TracebackType

    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.observability")


class Observer(Middleware):
    """Observes publishes and handled messages through context managers, which receive the outcome.

    An observer cannot change the outcome: its errors are logged, and it cannot suppress an error. Otherwise a failing
    metric could make a stored message be published again.
    """

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Return the context manager for a publish, with all its attempts."""
        return nullcontext()

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Return the context manager for a handled message or batch; see also `failure`."""
        return nullcontext()

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Observe a publish."""
        with _Harmless(lambda: self.publishing(publishing)):
            return await send_next(publishing)

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Observe a handler."""
        with _Harmless(lambda: self.handling(handling)):
            return await call_next(handling)


class _Harmless:
    """Wraps a context manager so that it neither raises nor suppresses an error."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._manager: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        try:
            manager = self._make()
            manager.__enter__()
        except Exception:
            logger.exception("an observer failed before the observed operation")
        else:
            self._manager = manager

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        try:
            self._manager.__exit__(kind, error, trace)
        except Exception as own:
            if own is not error:
                logger.exception("an observer failed after the observed operation")


def failure(error: BaseException | None) -> str | None:
    """Return the name of an error's type; None without an error, and for a handler's `nsqext.Requeue` and the like."""
    if error is None or isinstance(error, HandlerSignal):
        return None
    return type(error).__qualname__
