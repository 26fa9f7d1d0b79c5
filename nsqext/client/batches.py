"""Sorting many messages into batches, one for each partition concerned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nsqext.client.publication import Batch, Draft, key_bytes, pack_body
from nsqext.client.tracelog import trace_log
from nsqext.errors import ExtendNotSupported, InvalidBody, InvalidInput
from nsqext.protocol.commands import check_body
from nsqext.protocol.headers import add_key, encode_headers
from nsqext.protocol.names import check_trace_id

if TYPE_CHECKING:
    from nsqext.client.options import ProducerOptions
    from nsqext.client.routes import Route
    from nsqext.protocol.hashing import KeyHash

__all__ = ("Sorter",)

_COUNT_WORD = 4
_ITEM_WORD = 4
_LONGEST_TRACE = 40
"""Bytes that a trace id takes at most, as a header of its own."""
_BYTES = {bytes}


class Sorter:
    """Sorts the messages of one call; all of them are checked before anything is sent.

    Args:
        route: where the topic's messages go.
        options: limits.
        key_hash: chooses the partition of a key.
        key: for messages that have none of their own.
        partition: for all messages.

    Attributes:
        rows: what came out: the batches of a row go one after the other, rows beside each other.
        keys: keys that occurred, whose turns have to be taken.
        count: number of messages.
    """

    def __init__(
        self, route: Route, options: ProducerOptions, key_hash: KeyHash, key: bytes | None, partition: int | None
    ) -> None:
        self.rows: list[list[Batch]] = []
        self.keys: set[bytes] = set()
        self.count: int = 0
        self._route = route
        self._options = options
        self._key_hash = key_hash
        self._key = key
        self._partition = partition
        self._filling: dict[int | None, tuple[Batch, int]] = {}
        self._row_of: dict[int, list[Batch]] = {}
        self._carries = route.meta.extend_support
        self._plain = route.meta.partition_num > 0 and not route.meta.extend_support
        self._compresses = options.compression != "none" and route.meta.extend_support
        self._traced = trace_log.active and trace_log.wants(route.topic) and route.meta.partition_num > 0

    def add(self, messages: Iterable[bytes | Draft]) -> None:
        """Sort messages in.

        Raises:
            InvalidInput: a message cannot be right; its ``index`` tells which.
        """
        if isinstance(messages, (bytes, bytearray, str)):
            raise InvalidBody("publish_many takes a list of bodies, not one", hint="use publish")
        given = messages if isinstance(messages, Sequence) else list(messages)
        self.count = len(given)
        if not self._add_plain(given):
            index = 0
            try:
                for index, message in enumerate(given):
                    self._add_one(index, message if isinstance(message, Draft) else Draft(message))
            except InvalidInput as error:
                error.index = index
                error.message = f"message {index}: {error.message}"
                raise error.at(topic=self._route.topic) from error.__cause__

    def _add_plain(self, given: Sequence[bytes | Draft]) -> bool:
        """Take the short way when all are bodies of acceptable size that fit one batch; returns whether they are."""
        options = self._options
        count = len(given)
        if self._traced or count > options.max_batch_count or set(map(type, given)) - _BYTES:
            return False
        if not count:
            return True
        sizes = list(map(len, given))  # type: ignore[arg-type]
        largest = max(sizes)
        if not min(sizes) or largest > options.max_message_size:
            return False
        if self._carries and (self._key is not None or (self._compresses and largest >= options.compression_min)):
            return False
        if _COUNT_WORD + _ITEM_WORD * count + sum(sizes) > options.max_batch_size:
            return False
        self._new_batch(self._place(self._key)).add_plain(0, given)  # type: ignore[arg-type]
        return True

    def _add_one(self, index: int, message: Draft) -> None:
        header = b""
        overhead = 0
        body, headers, trace_id = message.body, message.headers, message.trace_id
        if trace_id is not None:
            check_trace_id(trace_id)
            overhead = 8
        elif self._traced:
            trace_id = 0
        if self._compresses and isinstance(body, bytes):
            check_body(body, self._options.max_message_size)
            body, headers = pack_body(self._options, body, headers)
        if headers or message.tag is not None:
            header = encode_headers(headers, tag=message.tag, trace_id=trace_id)
            if self._plain:
                raise ExtendNotSupported(
                    "the topic takes no headers and no tag", hint="create it with extend support, or upgrade it"
                )
        key = self._key if message.key is None else key_bytes(message.key)
        if key is not None and self._carries:
            header = add_key(header or (b"" if trace_id is None else encode_headers(trace_id=trace_id)), key)
        if header:
            overhead = 2 + len(header)
        check_body(body, self._options.max_message_size, overhead)
        place = self._place(key)
        size = _ITEM_WORD + _LONGEST_TRACE + len(header) + len(body)
        self._batch(place, size).add(index, body, header, trace_id)

    def _place(self, key: bytes | None) -> int | None:
        if key is None or self._partition is not None:
            return self._partition
        self.keys.add(key)
        return self._route.keyed(key, self._key_hash)

    def _batch(self, place: int | None, size: int) -> Batch:
        batch, filled = self._filling.get(place, (None, 0))
        full = filled + size > self._options.max_batch_size or (
            batch is not None and len(batch.indexes) >= self._options.max_batch_count
        )
        if batch is None or full:
            batch, filled = self._new_batch(place), _COUNT_WORD
        self._filling[place] = (batch, filled + size)
        return batch

    def _new_batch(self, place: int | None) -> Batch:
        batch = Batch(self._route.topic, place)
        if place is None:
            self.rows.append([batch])
        elif place in self._row_of:
            self._row_of[place].append(batch)
        else:
            row = self._row_of[place] = [batch]
            self.rows.append(row)
        return batch
