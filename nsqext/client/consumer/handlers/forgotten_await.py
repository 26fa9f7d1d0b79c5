"""The failure of a handler that forgot to await an answer."""

from __future__ import annotations

from nsqext.errors import InvalidState


def requeue_not_awaited() -> InvalidState:
    """Return the failure of a handler that returned while `Message.requeue` was called and not awaited."""
    return InvalidState(
        "the handler called requeue() and did not await it",
        hint="write 'await message.requeue(…)', or raise Requeue(…), as handlers that are declared with 'def' have to",
    )
