"""More time for messages that are here: one timer for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.errors import MessageNotInFlight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.client.consumer.message import Message

__all__ = ("AutoTouch",)


class AutoTouch:
    """Touches messages when half of their timeout has passed, until the server's longest time is used up.

    It is told the time, and called a few times for each half of the shortest timeout (which is a second).
    """

    def __init__(self) -> None:
        self._arrived: dict[Message, float] = {}

    def tick(self, held: Iterable[Message], now: float) -> int:
        """Touch what is due; returns how many messages that were.

        Args:
            held: messages that are here; answered ones are left alone.
            now: the time.
        """
        count = 0
        arrived: dict[Message, float] = {}
        for message in held:
            if message.answered:
                continue
            since = self._arrived.get(message)
            owner = message.owner
            if now - message.received >= owner.msg_timeout / 2:
                since = message.received if since is None else since
                if now - since + owner.msg_timeout / 2 < owner.max_msg_timeout:
                    count += self._touch(message)
            if since is not None:
                arrived[message] = since
        self._arrived = arrived
        return count

    def _touch(self, message: Message) -> bool:
        try:
            message.owner.touch(message)
        except MessageNotInFlight:
            return False
        return True
