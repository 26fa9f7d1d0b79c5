"""Check the order of an ordered subscription."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import define

from nsqext.errors import OrderViolation

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

logger: logging.Logger = logging.getLogger("nsqext.consumer")


@define(eq=False)
class OrderCheck:
    """Checks an ordered subscription: internal ids and queue offsets must increase; an equal id is a redelivery.

    A new subscription needs a new check (smart client note, ordered consumption).
    """

    _report_attempts: int = 0  # a message that blocks its partition is reported at each multiple; 0 for never
    _id: int = -1
    _offset: int = -1
    _last: Message | None = None

    def accepts(self, message: Message) -> bool:
        """Return whether to handle a received message. Raises OrderViolation.

        A second copy of an unanswered message is not handled: the first ordered subscription of a channel receives its
        first message twice (captured: sub_ordered_first_reset_duplicate), and one answer finishes both.
        """
        number, offset = message.internal_id, message.offset
        if number < self._id or offset < self._offset or (number == self._id) != (offset == self._offset):
            raise OrderViolation(
                f"id {number} at offset {offset} was received after id {self._id} at offset {self._offset}",
                topic=message.topic,
                partition=message.partition,
                node=message.node,
                hint="nothing was skipped: the subscription starts again",
            )
        last, self._last = self._last, message
        if last is not None and number == self._id and message.attempts == last.attempts and not last.answered:
            self._last = last
            return False
        self._id, self._offset = number, offset
        self._report(message)
        return True

    def _report(self, message: Message) -> None:
        every = self._report_attempts
        if every and message.attempts >= every and message.attempts % every == 0:
            logger.warning(
                "an ordered message blocks its partition, delivered %d times: %r",
                message.attempts,
                message,
                extra={"topic": message.topic, "partition": message.partition, "attempts": message.attempts},
            )
