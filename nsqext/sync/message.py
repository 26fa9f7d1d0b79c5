"""Messages and batches of a blocking consumer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nsqext.client.consumer.handlers.batches import MessageSequence
from nsqext.errors import InvalidInput
from nsqext.sync.loop import call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.client.consumer.handlers.batches import MessageBatch as AsyncMessageBatch
    from nsqext.client.consumer.message import Message as AsyncMessage
    from nsqext.sync.answers import AnswerQueue

__all__ = ("Message", "MessageBatch")


class Message:
    """A received message; see `nsqext.Message`.

    Each message is answered once, by `finish` or `requeue`, or by the return or exception of its handler.
    """

    __slots__ = ("_answers", "_message")

    def __init__(self, message: AsyncMessage, answers: AnswerQueue) -> None:
        self._message = message
        self._answers = answers

    @property
    def topic(self) -> str:
        """Topic of the message."""
        return self._message.topic

    @property
    def partition(self) -> int:
        """Partition of the message; -1 on the original NSQ."""
        return self._message.partition

    @property
    def node(self) -> str:
        """``host:port`` of the node that delivered it."""
        return self._message.node

    @property
    def in_order(self) -> bool:
        """Whether the next message of its partition waits for the answer to this one."""
        return self._message.in_order

    @property
    def body(self) -> bytes:
        """The published bytes."""
        return self._message.body

    @property
    def headers(self) -> Mapping[str, Any]:
        """Extend headers without the reserved ones; empty if it has no headers."""
        return self._message.headers

    @property
    def reserved_headers(self) -> Mapping[str, Any]:
        """Extend headers whose names begin with ``##``."""
        return self._message.reserved_headers

    def header_value(self, name: str) -> str | None:
        """Return an extend header, a reserved one too; None unless it is text or a whole number."""
        return self._message.header_value(name)

    @property
    def key(self) -> str | None:
        """Key of the publish; None on topics without extend support."""
        return self._message.key

    @property
    def tag(self) -> str | None:
        """Tag of the publish."""
        return self._message.tag

    @property
    def attempts(self) -> int:
        """Number of deliveries, including this one."""
        return self._message.attempts

    @property
    def timestamp(self) -> int:
        """Time when the server stored it, in nanoseconds since 1970."""
        return self._message.timestamp

    @property
    def id(self) -> bytes:
        """The 16 bytes of its id."""
        return self._message.id

    @property
    def internal_id(self) -> int:
        """The first half of its id as a number; grows within a partition."""
        return self._message.internal_id

    @property
    def trace_id(self) -> int:
        """Trace id of the publish; 0 without one."""
        return self._message.trace_id

    @property
    def offset(self) -> int:
        """Byte offset in the partition's queue; -1 if the subscription does not report it."""
        return self._message.offset

    @property
    def size(self) -> int:
        """Bytes of its record in the queue; 0 if the subscription does not report it."""
        return self._message.size

    @property
    def answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._message.answered

    @property
    def expired(self) -> bool:
        """Whether it timed out or lost its connection, so that the server redelivers it."""
        return self._message.expired

    def finish(self) -> None:
        """Acknowledge the message, so that it is not redelivered; raises the errors of `nsqext.Message.finish`."""
        self._answers.finish(self._message)

    def requeue(self, delay: float = 0.0, *, backoff: bool = False) -> None:
        """Return the message to the channel, which redelivers it.

        Args:
            delay: seconds until the redelivery; 0 on ordered channels.
            backoff: slow the consumer down, as after an exception of a handler.

        Raises the errors of `nsqext.Message.requeue`.
        """
        requeue = functools.partial(self._message.requeue, backoff=backoff)
        call(self._answers.portal, "consumer", requeue, delay)

    def touch(self) -> None:
        """Restart the message's timeout; raises the errors of `nsqext.Message.touch`."""
        call(self._answers.portal, "consumer", self._message.touch)

    def __repr__(self) -> str:
        return repr(self._message)


class MessageBatch(MessageSequence[Message]):
    """Messages that are handled together, in the order received; see `nsqext.MessageBatch`."""

    __slots__ = ("_batch", "_portal")

    def __init__(self, batch: AsyncMessageBatch, answers: AnswerQueue) -> None:
        super().__init__([Message(message, answers) for message in batch])
        self._batch = batch
        self._portal = answers.portal

    def finish(self) -> None:
        """Acknowledge all unanswered messages; raises the errors of `nsqext.MessageBatch.finish`."""
        call(self._portal, "consumer", self._batch.finish)

    def finish_up_to(self, last: Message | int) -> None:
        """Acknowledge the messages up to and including one, see `nsqext.MessageBatch.finish_up_to`."""
        call(self._portal, "consumer", self._batch.finish_up_to, last._message if isinstance(last, Message) else last)

    def requeue(self, messages: Iterable[Message] | None = None, delay: float = 0.0, *, backoff: bool = False) -> None:
        """Requeue messages, by default all unanswered ones; see `nsqext.MessageBatch.requeue`."""
        chosen = None if messages is None else [_asynchronous(message) for message in messages]
        call(self._portal, "consumer", functools.partial(self._batch.requeue, backoff=backoff), chosen, delay)

    def __repr__(self) -> str:
        return repr(self._batch)


def _asynchronous(message: object) -> AsyncMessage:
    """Return the asynchronous message of a blocking one."""
    if not isinstance(message, Message):
        raise InvalidInput(f"{message!r} is not a message of the batch")
    return message._message
