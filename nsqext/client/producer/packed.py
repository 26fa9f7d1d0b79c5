"""Messages that a caller with columns has encoded for a batch command: an object for each of them costs much more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from struct import Struct
from typing import Literal, overload

import orjson

from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.protocol.client.commands import HEADER_LENGTH, TRACE_SIZE

Verb = Literal["MPUB", "MPUB_TRACE", "MPUB_EXT"]

_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")


class PackedMessages(Sequence[bytes | OutgoingMessage]):
    """Messages as the items of a batch command, for `nsqext.Producer.publish_many`.

    They are sent as they are where the topic and the producer's settings allow it; otherwise they are decoded, and
    published as any messages. Their receipts have neither position nor trace id.

    Args:
        verb: the command: MPUB for bodies, MPUB_TRACE with trace ids, MPUB_EXT with headers, of text, in each item.
        items: each message with its size, in order; bodies are not empty.
        count: number of messages.
        largest: bytes of the largest message, body and header.
    """

    def __init__(self, verb: Verb, items: Sequence[bytes | memoryview], count: int, largest: int) -> None:
        self.verb: Verb = verb
        self.items: list[bytes | memoryview] = list(items)
        self._count = count
        self.largest: int = largest

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes | OutgoingMessage: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes | OutgoingMessage]: ...

    def __getitem__(self, index: int | slice) -> bytes | OutgoingMessage | list[bytes | OutgoingMessage]:
        return self._decoded[index]

    def __add__(self, other: PackedMessages) -> PackedMessages:
        return PackedMessages(
            self.verb, [*self.items, *other.items], len(self) + len(other), max(self.largest, other.largest)
        )

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.items))

    @cached_property
    def _decoded(self) -> list[bytes | OutgoingMessage]:
        data, position = b"".join(self.items), 0
        found: list[bytes | OutgoingMessage] = []
        while position < len(data):
            start = position + _U32.size
            position = start + _U32.unpack_from(data, position)[0]
            found.append(self._message(data[start:position]))
        return found

    def _message(self, item: bytes) -> bytes | OutgoingMessage:
        if self.verb == "MPUB":
            return item
        if self.verb == "MPUB_TRACE":
            return OutgoingMessage(item[TRACE_SIZE:], trace_id=_U64.unpack_from(item)[0])
        stop = HEADER_LENGTH + _U16.unpack_from(item)[0]
        return OutgoingMessage(item[stop:], orjson.loads(item[HEADER_LENGTH:stop]))
