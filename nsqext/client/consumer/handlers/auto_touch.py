"""Extend the timeouts of messages in flight: one timer for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.errors import MessageNotInFlight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.client.consumer.message import Message

__all__ = ("touch_due",)


def touch_due(messages: Iterable[Message], now: float) -> int:
    """Touch the messages of which half the timeout has passed; returns how many.

    To be called several times within half of the shortest timeout (a second). A message is touched until the longest
    time that its server grants (``max_msg_timeout``) is used up.

    Args:
        messages: messages in flight; answered ones are skipped.
        now: the time.
    """
    count = 0
    for message in messages:
        if message.answered:
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
