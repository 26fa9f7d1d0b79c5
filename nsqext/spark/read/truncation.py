"""Detects logs that were truncated and have grown again, and topics that were recreated, by the last message read.

The number of messages does not tell: a log may have grown beyond the offset of the query. Therefore a checkpoint has
the id, the byte offset and the time of the message before each offset; no other message has all three.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nsqext.errors import DataLoss
from nsqext.spark.cluster.node_http import MessagePosition
from nsqext.spark.read.offsets import Key, by_partition, by_topic
from nsqext.spark.read.planning import LOST, PartitionState
from nsqext.waits import gather

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Admin
    from nsqext.spark.read.offsets import Offsets

logger: logging.Logger = logging.getLogger("nsqext.spark")

LastMessages = Mapping[Key, MessagePosition]
"""The message before the offset of each partition; those of checkpoints without them are missing."""

_MEMBERS = ("id", "offset", "timestamp")


def dump_last(last: LastMessages) -> dict[str, Any]:
    """Return the member ``last`` of offsets in a checkpoint, in a fixed order; without last messages, an empty one."""
    found = {key: {name: getattr(message, name) for name in _MEMBERS} for key, message in last.items()}
    return {"last": by_topic(found)} if found else {}


def load_last(data: Mapping[str, Any], offsets: Offsets) -> LastMessages:
    """Return the last messages of offsets in a checkpoint, without those of partitions that have no offset.

    Earlier versions wrote the JSON of the checkpoint without last messages.
    """
    return {
        key: MessagePosition(offsets[key] - 1, *(message[name] for name in _MEMBERS))
        for key, message in by_partition(data, "last", _MEMBERS).items()
        if offsets.get(key)
    }


class TruncationCheck:
    """Compares the last messages of a checkpoint with those of the servers."""

    def __init__(self, admin: Admin, *, fail_on_data_loss: bool) -> None:
        self._admin = admin
        self._strict = fail_on_data_loss

    async def last_messages(
        self, end: Offsets, states: Mapping[Key, PartitionState], start: Offsets, known: LastMessages
    ) -> LastMessages:
        """Return the last messages before ``end``; sends a request for each partition whose offset has changed.

        Those before ``start`` are ``known``.
        """
        wanted = {
            key: count
            for key, count in end.items()
            if (key not in known or start.get(key) != count)
            and (state := states.get(key)) is not None
            and state.start < count <= state.end
        }
        found = await gather(wanted, lambda key: self._admin.message(*key, wanted[key] - 1))
        kept = {key: message for key, message in known.items() if end.get(key) == message.count + 1}
        # the server returns the first retained message for one that it has just removed
        return kept | {key: message for key, message in found.items() if message.count == wanted[key] - 1}

    async def divergences(self, known: LastMessages, states: Mapping[Key, PartitionState]) -> dict[Key, int]:
        """Return, for each log that has changed, the number of the first message that was not read.

        Without ``failOnDataLoss`` this is where a changed log has to be read: its earlier messages were read.
        """
        keys = [key for key, message in known.items() if key in states and states[key].start <= message.count]
        found = await gather(keys, lambda key: self._divergence(key, known[key], states[key]))
        return {key: count for key, count in found.items() if count is not None}

    async def _divergence(self, key: Key, known: MessagePosition, state: PartitionState) -> int | None:
        topic, partition = key
        if known.count < state.end:
            found = await self._admin.message(topic, partition, known.count)
            if found == known or found.count != known.count:
                return None
            change = (
                f"message {known.count}, the last one that was read, was {_shown(known)}, and is {_shown(found)} now: "
                "the log was truncated and has grown again, or the topic was recreated"
            )
            if self._strict:
                raise DataLoss(change, topic=topic, partition=partition, hint=LOST)
            logger.warning("topic %s, partition %d: %s", topic, partition, change)
        elif self._strict:
            return None  # its length shows it, see `lags_of`
        return min(known.count + 1, await self._admin.count_since(topic, partition, known.timestamp + 1))


def _shown(message: MessagePosition) -> str:
    time = datetime.fromtimestamp(message.timestamp / 1e9, UTC).isoformat(timespec="milliseconds")
    return f"the one with id {message.id} at byte offset {message.offset}, stored at {time}"
