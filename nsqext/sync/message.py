"""Messages and batches of a blocking consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from nsqext.client.consumer.handlers.batches import MessageSequence
from nsqext.errors import InvalidInput
from nsqext.sync.loop import call

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.batches import MessageBatch as AsyncMessageBatch
    from nsqext.client.consumer.message import Message as AsyncMessage
    from nsqext.sync.answers import AnswerQueue

__all__ = ("Message", "MessageBatch")

T = TypeVar("T")


class _Same(Generic[T]):
    """A member that has the value and the meaning of the asynchronous message's member of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.__doc__ = f"See `nsqext.Message.{name}`."
        self._read: Callable[[AsyncMessage], T] = attrgetter(name)

    @overload
    def __get__(self, message: None, owner: type) -> Self: ...

    @overload
    def __get__(self, message: Message, owner: type) -> T: ...

    def __get__(self, message: Message | None, owner: type) -> T | Self:
        return self if message is None else self._read(message._message)


class Message:
    """A received message, with the members of `nsqext.Message`.

    Each message is answered once, by `finish` or `requeue`, or by the return or exception of its handler.
    """

    __slots__ = ("_answers", "_message")

    def __init__(self, message: AsyncMessage, answers: AnswerQueue) -> None:
        self._message = message
        self._answers = answers

    topic: _Same[str] = _Same()
    partition: _Same[int] = _Same()
    node: _Same[str] = _Same()
    in_order: _Same[bool] = _Same()
    body: _Same[bytes] = _Same()
    headers: _Same[Mapping[str, Any]] = _Same()
    reserved_headers: _Same[Mapping[str, Any]] = _Same()
    key: _Same[str | None] = _Same()
    tag: _Same[str | None] = _Same()
    attempts: _Same[int] = _Same()
    timestamp: _Same[int] = _Same()
    id: _Same[bytes] = _Same()
    internal_id: _Same[int] = _Same()
    trace_id: _Same[int] = _Same()
    offset: _Same[int] = _Same()
    size: _Same[int] = _Same()
    expired: _Same[bool] = _Same()

    @property
    def answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._message.answered

    def header_value(self, name: str) -> str | None:
        """Return an extend header, a reserved one too; None unless it is text or a whole number."""
        return self._message.header_value(name)

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
        call(self._answers.portal, "consumer", self._message.requeue, delay, backoff=backoff)

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
        call(self._portal, "consumer", self._batch.requeue, chosen, delay, backoff=backoff)

    def __repr__(self) -> str:
        return repr(self._batch)


def _asynchronous(message: object) -> AsyncMessage:
    """Return the asynchronous message of a blocking one."""
    if not isinstance(message, Message):
        raise InvalidInput(f"{message!r} is not a message of the batch")
    return message._message
