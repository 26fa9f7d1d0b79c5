"""Sorting many messages into batches, one for each partition concerned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nsqext.client.options import ProducerOptions
from nsqext.client.publication import Batch, Draft, key_bytes
from nsqext.client.routes import Route
from nsqext.errors import InvalidBody
from nsqext.protocol.commands import check_body
from nsqext.protocol.hashing import KeyHash
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.names import check_trace_id

__all__ = ("Sorter",)

_COUNT_WORD = 4
_ITEM_WORD = 4


class Sorter:
    """Sorts the messages of one call; all of them are checked before anything is sent.

    Args:
        route: where the topic's messages go.
        options: limits.
        key_hash: chooses the partition of a key.
        key: for messages that have none of their own.
        partition: for all messages.

    Attributes:
        batches: what came out.
        keys: keys that occurred, whose turns have to be taken.
        count: number of messages.
    """

    def __init__(
        self, route: Route, options: ProducerOptions, key_hash: KeyHash, key: bytes | None, partition: int | None
    ) -> None:
        self.batches: list[Batch] = []
        self.keys: set[bytes] = set()
        self.count = 0
        self._route = route
        self._options = options
        self._key_hash = key_hash
        self._key = key
        self._partition = partition
        self._filling: dict[int | None, tuple[Batch, int]] = {}

    def add(self, messages: Iterable[bytes | Draft]) -> None:
        """Sort messages in.

        Raises:
            InvalidInput: a message cannot be right.
        """
        if isinstance(messages, (bytes, bytearray, str)):
            raise InvalidBody("publish_many takes a list of bodies, not one", hint="use publish")
        given = messages if isinstance(messages, Sequence) else list(messages)
        self.count = len(given)
        if not self._add_plain(given):
            for index, message in enumerate(given):
                self._add_one(index, message if isinstance(message, Draft) else Draft(message))

    def _add_plain(self, given: Sequence[bytes | Draft]) -> bool:
        """Take the short way when all are bodies of acceptable size that fit one batch; returns whether they are."""
        options = self._options
        limit = options.max_message_size
        total = _COUNT_WORD + _ITEM_WORD * len(given)
        for body in given:
            if type(body) is not bytes or not 0 < len(body) <= limit:
                return False
            total += len(body)
        if total > options.max_batch_size or len(given) > options.max_batch_count:
            return False
        if given:
            batch = self._new_batch(self._place(self._key))
            batch.add_plain(0, given)  # type: ignore[arg-type]
        return True

    def _add_one(self, index: int, message: Draft) -> None:
        header = b""
        overhead = 0
        if message.trace_id is not None:
            check_trace_id(message.trace_id)
            overhead = 8
        if message.headers or message.tag is not None:
            header = encode_headers(message.headers, tag=message.tag, trace_id=message.trace_id)
            overhead = 2 + len(header)
        check_body(message.body, self._options.max_message_size, overhead)
        place = self._place(self._key if message.key is None else key_bytes(message.key))
        size = _ITEM_WORD + 8 + 2 + len(header) + len(message.body)
        self._batch(place, size).add(index, message.body, header, message.trace_id)

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
        self.batches.append(batch)
        return batch
