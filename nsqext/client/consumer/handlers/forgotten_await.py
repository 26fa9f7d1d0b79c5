"""The failure of a handler that forgot to await an answer, or its result."""

from __future__ import annotations

import inspect

from nsqext.errors import InvalidState


def requeue_not_awaited() -> InvalidState:
    """Return the failure of a handler that returned while `Message.requeue` was called and not awaited."""
    return InvalidState(
        "the handler called requeue() and did not await it",
        hint="write 'await message.requeue(…)', or raise Requeue(…), as handlers that are declared with 'def' have to",
    )


def check_awaited(result: object) -> None:
    """Raise InvalidState for a coroutine or generator that has not run: what the handler should do has not happened."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidState(
            f"the handler returned the coroutine {result.__qualname__}, and did not await it",
            hint="write 'return await …'",
        )
    idle = inspect.isgenerator(result) and inspect.getgeneratorstate(result) == inspect.GEN_CREATED
    if idle or inspect.isasyncgen(result):
        raise InvalidState(
            f"the handler returned the generator {getattr(result, '__qualname__', '')}, which has not run",
            hint="remove 'yield' from it, or read what it yields in the handler",
        )
