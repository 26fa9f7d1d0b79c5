"""Settings of producers and consumers."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.commands import DEFAULT_MAX_BODY_SIZE, DEFAULT_MAX_MESSAGE_SIZE
from nsqext.protocol.hashing import KeyHash, key_hash
from nsqext.protocol.identify import ExtFilter
from nsqext.transport.options import ConnectionOptions

__all__ = ("ConsumerOptions", "ProducerOptions")


@frozen
class ProducerOptions:
    """How a producer publishes; times in seconds, sizes in bytes.

    Attributes:
        timeout: for one publish with all its attempts.
        on_unknown: what happens to a publish that was sent and never answered: ``retry`` sends it again, which may store it twice;
            ``raise`` gives `DeliveryUnknown`.
        key_hash: how keys choose partitions: ``murmur3`` (as the Go client's users do), ``java_string`` (as the Java client does),
            or a function of key and number of partitions.
        max_message_size: largest message that the servers take, trace id and headers included.
        max_batch_size: largest batch that the servers take.
        max_batch_count: messages in one batch.
        retry_wait: first pause before another attempt; it doubles up to ``max_retry_wait``, with full jitter.
        max_retry_wait: longest pause before another attempt.
        connection: how to connect to nodes.
        lookup: how to ask the lookup service.
    """

    timeout: float = 30.0
    on_unknown: Literal["retry", "raise"] = "retry"
    key_hash: str | KeyHash = "murmur3"
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE
    max_batch_size: int = DEFAULT_MAX_BODY_SIZE
    max_batch_count: int = 10_000
    retry_wait: float = 0.02
    max_retry_wait: float = 1.0
    connection: ConnectionOptions = field(factory=ConnectionOptions)
    lookup: LookupOptions = field(factory=LookupOptions)

    def __attrs_post_init__(self) -> None:
        key_hash(self.key_hash)
        if self.on_unknown not in ("retry", "raise"):
            raise InvalidSetting(f"on_unknown={self.on_unknown!r} is neither 'retry' nor 'raise'")
        for name in ("timeout", "max_message_size", "max_batch_size", "max_batch_count", "retry_wait", "max_retry_wait"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is not positive")


@frozen
class ConsumerOptions:
    """How a consumer consumes; times in seconds.

    Attributes:
        ordered: subscribe in order (SUB_ORDERED); None follows the topic's meta.
        queue_position: subscribe so that messages tell their offset and size (SUB_ADVANCED); ordered ones always do.
        msg_timeout: how long a message may be in flight; None for the server's default (60).
        sample_rate: percentage of the messages that is delivered, 1 to 99; 0 for all.
        ext_filter: a filter on an extend header, applied by the server.
        requeue_delay: delay of a message whose handler raised, times its attempts.
        max_requeue_delay: longest such delay.
        reconnect_wait: first pause before a node is tried again; it doubles up to ``max_reconnect_wait``, with full jitter.
        max_reconnect_wait: longest pause before a node is tried again.
        start_timeout: how long opening waits for the subscriptions of all partitions; afterwards they go on in the background.
        grace: how long handlers may go on when the consumer closes.
        connection: how to connect to nodes.
        lookup: how to ask the lookup service.
    """

    ordered: bool | None = None
    queue_position: bool = False
    msg_timeout: float | None = None
    sample_rate: int = 0
    ext_filter: ExtFilter | None = None
    requeue_delay: float = 1.0
    max_requeue_delay: float = 900.0
    reconnect_wait: float = 0.05
    max_reconnect_wait: float = 5.0
    start_timeout: float = 5.0
    grace: float = 30.0
    connection: ConnectionOptions = field(factory=ConnectionOptions)
    lookup: LookupOptions = field(factory=LookupOptions)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 99:
            raise InvalidSetting(f"sample_rate={self.sample_rate!r} is not within 0..99")
        if self.ordered and self.sample_rate:
            raise InvalidSetting("ordered and sample_rate contradict each other", hint="servers refuse them together")
        if self.msg_timeout is not None and not 1 <= self.msg_timeout <= 900:
            raise InvalidSetting(f"msg_timeout={self.msg_timeout!r} is not within 1..900 seconds")
        for name in ("requeue_delay", "max_requeue_delay", "reconnect_wait", "max_reconnect_wait", "start_timeout", "grace"):
            if not getattr(self, name) >= 0:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is negative")
