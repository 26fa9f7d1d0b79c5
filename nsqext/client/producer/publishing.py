"""What callers publish: messages, and a publish with all of its messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from attrs import define, field, frozen

if TYPE_CHECKING:
    from nsqext.types import Receipt, TopicMeta

TopicKey = tuple[str, bytes]
"""A topic and a key, the unit of order."""


@frozen
class OutgoingMessage:
    """A message with more than a body, for `Producer.publish_many` and batchers.

    Middleware reads and replaces it.
    """

    body: bytes  #: not empty
    headers: Mapping[str, str] | None = None  #: extend headers; the topic must support them
    tag: str | None = None  #: for dispatch; the topic must support extend headers
    trace_id: int | None = None  #: 0 to 2**64 - 1
    #: messages with the same key are stored in one partition, in order; on extend topics consumers receive it
    key: str | bytes | int | None = None
    #: bytes of the extend header, stored as they are, in place of headers and tag; see `nsqext.Producer.publish`
    header: bytes | None = field(default=None, kw_only=True)


@define(eq=False, kw_only=True)
class Publishing:
    """A publish in progress, with what concerns all its messages; middleware and the parts of a producer receive it."""

    topic: str
    #: messages as given; `messages` has objects only
    given: Sequence[bytes | OutgoingMessage] = field(alias="messages")
    batch: bool  #: whether `nsqext.Producer.publish_many` was called
    key: str | bytes | int | None = None  #: for messages of a batch without their own key
    partition: int | None = None  #: chosen by the caller
    delay: float | None = None  #: seconds until handlers receive the message
    via: Literal["consumer", "relay"] | None = None  #: see `nsqext.Producer.publish`
    identity: str | None = None  #: see `nsqext.Producer.publish`
    receipts: Sequence[Receipt] = ()  #: empty until the messages are stored
    max_message_size: int = 0  #: bytes of body and headers that the topic accepts; known when `on_topic` is called
    #: called with the topic's meta before messages are encoded; may replace them
    on_topic: list[Callable[[TopicMeta], object]] = field(factory=list)
    #: topics and keys whose lock the caller has
    entered: Collection[TopicKey] = field(default=(), repr=False)
    #: publishes a message without this object, by topic, body, headers, tag, trace id, key and partition
    at_once: Callable[..., Awaitable[Receipt]] | None = field(default=None, repr=False)
    #: of messages given as bodies
    trace_ids: Sequence[int] = field(default=(), repr=False)
    #: headers of messages given as bodies; by name, a text per message
    header_columns: Mapping[str, Sequence[str]] = field(factory=dict, repr=False)

    @property
    def messages(self) -> list[OutgoingMessage]:
        """The messages, which middleware may replace, for example to add headers."""
        if type(self.given) is not list or self.trace_ids or self.header_columns or bytes in map(type, self.given):
            given = with_columns(self.given, self.trace_ids, self.header_columns)
            self.trace_ids, self.header_columns = (), {}
            self.given = [
                message if isinstance(message, OutgoingMessage) else OutgoingMessage(message) for message in given
            ]
        return self.given  # type: ignore[return-value]

    @messages.setter
    def messages(self, messages: list[OutgoingMessage]) -> None:
        self.given, self.trace_ids, self.header_columns = messages, (), {}


def with_columns(
    messages: Sequence[bytes | OutgoingMessage],
    trace_ids: Sequence[int],
    headers: Mapping[str, Sequence[str]],
    keys: Sequence[bytes | None] = (),
) -> Sequence[bytes | OutgoingMessage]:
    """Return bodies as messages with trace ids, headers and keys; unchanged without all of them."""
    if not (trace_ids or headers or keys):
        return messages
    absent = [None] * len(messages)
    rows: Sequence[Mapping[str, str] | None] = absent
    if headers:
        rows = [dict(zip(headers, values, strict=True)) for values in zip(*headers.values(), strict=True)]
    return [
        OutgoingMessage(body, named, None, trace_id, key)  # type: ignore[arg-type]
        for body, named, trace_id, key in zip(messages, rows, trace_ids or absent, keys or absent, strict=True)
    ]


class PublishOptions(TypedDict, total=False):
    """Arguments of `nsqext.Producer.publish` besides topic and body."""

    headers: Mapping[str, str] | None
    tag: str | None
    trace_id: int | None
    key: str | bytes | int | None
    partition: int | None
    delay: float | None
    via: Literal["consumer", "relay"] | None
    identity: str | None
    header: bytes | None
