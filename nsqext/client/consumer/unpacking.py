"""Decompress bodies of publishing clients, within a bound; loaded when the first such message arrives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.client.body_compression import (
    COMPRESS_HEADER,
    MAX_UNPACKED,
    SIZE_HEADER,
    decompress_body,
    is_compressed,
)
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from nsqext.client.consumer.message import KeyOf, Message

logger: logging.Logger = logging.getLogger("nsqext.consumer")


class UnpackBudget(Waiters):
    """Bounds the unpacked bytes of messages in flight, over all connections of a consumer.

    A message waits while others use up the budget; a message larger than the budget is handed out while no other is
    unpacked. `release` wakes waiting tasks.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.used: int = 0  #: bytes of unpacked messages in flight
        self._limit = limit  # bytes; 0 for no limit
        self._messages: dict[Message, int] = {}

    def reserve(self, message: Message, size: int) -> bool:
        """Reserve bytes for a message, or change its reservation; return False if they are not available."""
        before = self._messages.get(message)
        if before is None and self._limit and self.used and self.used + size > self._limit:
            return False
        self._messages[message] = size
        self.used += size - (before or 0)
        return True

    def release(self, message: Message) -> None:
        """Release the bytes of an answered message."""
        self.used -= self._messages.pop(message, 0)
        self.wake()

    def release_expired(self) -> None:
        """Release the bytes of messages that are not in flight any more."""
        for message in [message for message in self._messages if message.lost]:
            self.release(message)

    def holds(self, message: Message) -> bool:
        return message in self._messages

    def try_unpack(self, message: Message) -> bool:
        """Decompress a body; return False if it must wait for the budget.

        A damaged body keeps its compression headers.
        """
        if message in self._messages:
            return True
        if not _is_compressed(message):
            return self.reserve(message, len(message.body))  # it was handed out before
        if not self.reserve(message, _announced_size(message)):
            return False
        try:
            unpack(message)
        except (InvalidSetting, ProtocolError) as error:
            logger.warning("body stays compressed: %s: %r", error, message, extra={"topic": message.topic})
        self.reserve(message, len(message.body))
        return True

    def pack(self, message: Message) -> None:
        """Keep only the stored body of a message that waits for its next attempt."""
        if message not in self._messages:
            message.restore(message.stored_body)

    def call_unpacked(self, function: KeyOf, message: Message) -> str | bytes | None:
        """Call a function while a body is decompressed; a damaged body stays as it is."""
        body, headers = message.body, message.all_headers()
        try:
            unpack(message)
        except (InvalidSetting, ProtocolError):
            return function(message)
        try:
            return function(message)
        finally:
            message.restore(body, headers)


def _is_compressed(message: Message) -> bool:
    try:
        return is_compressed(message.all_headers())
    except ProtocolError:  # a header that servers refuse to store
        return False


def _announced_size(message: Message) -> int:
    """Return the size announced by the publisher, or the largest size."""
    size = str(message.all_headers().get(SIZE_HEADER, ""))
    return int(size) if size.isascii() and size.isdigit() and len(size) < 20 else MAX_UNPACKED


def unpack(message: Message) -> None:
    """Decompress a body, and remove its compression headers.

    Raises:
        ProtocolError: the body is damaged, or unpacks to too many bytes.
        InvalidSetting: the package for the compression is not installed.
    """
    headers = message.all_headers()
    if is_compressed(headers):
        message.replace_body(decompress_body(headers, message.body), COMPRESS_HEADER, SIZE_HEADER)
