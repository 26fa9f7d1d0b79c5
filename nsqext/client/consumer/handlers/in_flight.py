"""Messages in flight: touch them before they time out, and keep those that the program answers later."""

from __future__ import annotations

import logging
import time
from math import inf
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from nsqext.errors import MessageNotInFlight

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nsqext.client.consumer.message import Message

logger: logging.Logger = logging.getLogger("nsqext.consumer")

TOUCHES = 16
"""Looks at the messages in flight within a timeout. A message is touched when half to 9/16 of it have passed."""

_DRAIN_LOOK = 0.01  # seconds between two looks whether all held messages were answered, while the consumer closes
_SPARE_HOLDINGS = 16
"""Holdings that are kept, beyond twice those with unanswered messages, until the others are forgotten."""


def touch_due(messages: Iterable[Message], now: float, *, requeued: bool = False) -> int:
    """Touch the messages of which half the timeout has passed; return how many.

    Call it `TOUCHES` times within the shortest timeout. A message is not touched beyond the total time that its server
    allows (``max_msg_timeout``). Answered ones are skipped, unless they were ``requeued`` and no REQ was sent.
    """
    count = 0
    for message in messages:
        if message.answered and not requeued:
            continue
        owner = message.owner
        half = owner.msg_timeout / 2
        if now - message.received >= half and now - message.delivered + half < owner.max_msg_timeout:
            try:
                owner.touch(message)
            except MessageNotInFlight:
                continue
            count += 1
    return count


@frozen(eq=False)
class _Holding:
    """Messages that were handed out together, and the task that received them; None for a handler."""

    messages: Sequence[Message]
    task: int | None


class HeldMessages:
    """Messages in flight that the program answers later: batches, and messages that handlers left unanswered.

    The program answers them at any time. They are touched for as long as the server allows; an error is logged when it
    takes one back. A consumer that closes waits for their answers and then requeues the others.
    """

    def __init__(self) -> None:
        self._holdings: list[_Holding] = []
        self._limit = _SPARE_HOLDINGS

    def add(self, messages: Sequence[Message], task: int | None = None) -> None:
        """Add messages that were handed out; ``task`` is the id of the one that received them, None for handlers."""
        self._holdings.append(_Holding(messages, task))
        if len(self._holdings) > self._limit:
            self.unanswered()
            self._limit = 2 * len(self._holdings) + _SPARE_HOLDINGS

    def unanswered(self) -> list[Message]:
        """Return the messages that are in flight and not answered; forget the others."""
        found: list[Message] = []
        holdings: list[_Holding] = []
        for holding in self._holdings:
            left = []
            for message in holding.messages:
                if message.answered:
                    continue
                if message.received >= message.owner.horizon:
                    left.append(message)
                elif message.owner.horizon < inf:  # otherwise its connection ended
                    _log_timeout(message)
            if left:
                found += left
                holdings.append(_Holding(left, holding.task))
        self._holdings = holdings
        return found

    def requeue(self, task: int | None = None) -> None:
        """Requeue the messages that one task holds, or all."""
        holdings, self._holdings = self._holdings, []
        for holding in holdings:
            if task is None or holding.task == task:
                requeue_unanswered(holding.messages)
            else:
                self._holdings.append(holding)

    async def wait(self) -> None:
        """Wait until all are answered, or not in flight any more."""
        while self.unanswered():  # noqa: ASYNC110 - messages do not report their answers, to keep them cheap
            await anyio.sleep(_DRAIN_LOOK)


def _log_timeout(message: Message) -> None:
    logger.error(
        "a message was not answered within %.0f s, and the server delivers it again: it stays in flight for "
        "-max-msg-timeout (%.0f s) at most",
        time.monotonic() - message.delivered,
        message.owner.max_msg_timeout,
        extra={"topic": message.topic, "partition": message.partition, "message_id": message.id.hex()},
    )


def requeue_unanswered(messages: Iterable[Message]) -> None:
    """Requeue the messages that are in flight and not answered."""
    for message in messages:
        if not message.answered and message.received >= message.owner.horizon:
            message.requeue_now(0.0, backoff=False)
