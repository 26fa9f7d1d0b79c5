"""What the settings of consumers mean; see `nsqext.transport.settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from nsqext.lookup.settings import LookupSettings
from nsqext.transport.settings import ConnectionSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenacity.wait import wait_base

    from nsqext.client.consumer.message import KeyOf
    from nsqext.client.consumer.options import DeadLetterHook
    from nsqext.client.consumer.position import Position, StartPositions
    from nsqext.protocol.identify import ExtFilter


class HandlerSettings(TypedDict, total=False):
    """Settings of consumers, connections excepted; times in seconds, sizes in bytes."""

    tag: str | None
    """Receive only messages with this tag, which other consumers then do not receive; without extend support, all
    messages.
    """
    max_in_flight: int
    """Messages that may be received and not answered, over all connections."""
    concurrency: int
    """Handlers that run at the same time; in threads for blocking handlers."""
    ordered: bool | None
    """Subscribe in order (SUB_ORDERED); None follows the topic's meta."""
    queue_position: bool
    """Subscribe so that messages have offset and size (SUB_ADVANCED); ordered messages always have them."""
    partitions: tuple[int, ...] | None
    """The partitions to consume; None for all."""
    start: Position | str | Mapping[int, Position] | StartPositions | None
    """The position of a new channel, for all partitions or by partition; by default the end. Text such as ``earliest``
    or ``timestamp:1700000000`` is parsed. ``nsqext.transactions.Positions`` moves the channel to the positions in a
    database at each subscription.
    """
    start_existing: bool
    """Move an existing channel to ``start`` too, whenever this consumer opens."""
    msg_timeout: float | None
    """How long a message may be in flight, 1 to 900; None for the server's default (60)."""
    sample_rate: int
    """Percentage of messages that is delivered, 1 to 99; 0 for all."""
    output_buffer_timeout: float | None
    """How long the server may delay a message to send it with others, at most 1; shorter times are raised to the
    server's minimum (0.01 on the redesigned NSQ, 0.025 on the original). None for the server's default (0.05 and
    0.25); 0 sends each message at once, which costs throughput.
    """
    output_buffer_size: int | None
    """Bytes that the server collects before it sends at once, 64 to 65536; None for the server's default (4096 and
    16384).
    """
    ext_filter: ExtFilter | None
    """A filter on an extend header, applied by the server."""
    key: str | KeyOf | None
    """The key of a message, as the name of the extend header that carries it (``##key`` is what ``publish(key=…)``
    writes), or a function of the message. `Consumer.serve` then keeps the messages of a key in order: its
    ``concurrency`` handlers are lanes, each for a share of the keys. A requeued message waits in the consumer, in
    front of later messages of its key, while other keys continue; backoff has no effect. Messages that wait for
    their key, up to ``max_in_flight`` of them, do not count towards it.
    """
    dispatch: str | None
    """Type of the channel. With ``key_failover`` all messages of a key go to one consumer; ``key`` names the header of
    the key (``##key`` if it is a function or not given). A new channel is created with this type; a channel of
    another type is an error. On servers without this type, as all released servers, keys are shared by tags, see
    ``key_tags``; the server of each partition is asked at its subscription. With ``shared`` a channel of type
    ``key_failover`` is an error.
    """
    key_tags: int | None
    """Number of buckets, at most 1024, by which ``dispatch="key_failover"`` shares the keys where the server does not.
    Producers write them as tags (their ``key_tags``). None stands for 16.

    Each bucket is a connection to each partition, and has one consumer at a time; messages without a key go to any
    consumer. Needs the redesigned NSQ and topics with extend support. With a number, tags are used on servers with this
    dispatch too; 0 never uses tags: a server without this dispatch is an error.
    """
    initial_ready: int
    """The least RDY count of a connection. It doubles, up to its share of ``max_in_flight``, while messages wait at the
    server and handlers wait for them, and shrinks again: consumers of a channel share its messages when handlers are
    slow, and the server sends a message at once, because the RDY count is used up.
    """
    max_in_flight_bytes: int
    """Bytes of messages in flight over all connections, estimated from the sizes received so far. With large messages,
    fewer than ``max_in_flight`` are requested. 0 for no limit. Each connection may always have one message.
    """
    reconnect_wait: float | wait_base
    """First pause before a node or lookup is tried again; doubles up to ``max_reconnect_wait``, with full jitter. Or a
    wait strategy of tenacity.
    """
    max_reconnect_wait: float
    """Longest pause before a node is tried again."""
    lookup_timeout: float
    """How long a starting consumer waits for an unreachable lookup service, for example if that starts later; an
    address of something else than nsqlookupd fails at once.
    """
    start_timeout: float
    """How long opening waits for the subscriptions of all partitions; afterwards they continue in the background."""
    close_timeout: float
    """How long running handlers have to end at a close; then they are cancelled, and their messages are requeued at
    once (on ordered channels by the end of the connection).
    """
    auto_touch: bool
    """Touch queued messages and messages whose handler runs before they time out, as long as the server allows it (its
    ``max_msg_timeout``, 15 minutes by default).
    """
    on_lost: Literal["raise", "ignore"]
    """Effect of an answer to a message that is not in flight any more. ``raise`` raises `MessageNotInFlight`,
    ``ignore`` only logs it.
    """
    decompress: bool
    """Restore bodies that the publishing client compressed."""
    max_unpacked_bytes: int
    """Bytes of restored bodies in flight over all connections; a message that does not fit is handed out when others
    are answered. One message may be larger (up to 64 MiB); 0 for no limit.
    """
    block_warning: float
    """Log a warning when the event loop was blocked for longer; 0 for never."""
    redelivery_wait: float
    """With ``key``, how long later messages of a key and partition wait for the redelivery of earlier messages that
    timed out or lost their connection; the time passes only while the server can deliver them. Afterwards a warning
    is logged, and the later messages are handled.
    """
    gap_wait: float
    """With ``key``, how long messages of a partition wait, after a lost connection, for earlier messages that the
    server may have sent and that were never received. Lasting gaps, for example because of a filter or tag, delay a
    partition by this time after each lost connection.
    """
    settle_wait: float
    """With ``key``, how long the first messages of a partition are collected and sorted. The server redelivers what a
    killed consumer had in flight in any order, mixed with new messages, as far as RDY allows (``initial_ready``).
    """
    requeue_delay: float
    """Delay of a requeued message, times its attempts."""
    max_requeue_delay: float
    """Longest such delay. A running consumer keeps to delays beyond what servers accept."""
    requeue_jitter: float
    """Largest random change of the delay, as a share of it, below 1."""
    max_attempts: int
    """A message that has failed this many times is sent to the dead letters and finished; without ``dead_letter`` it is
    dropped, of which the starting consumer warns. 0 for never. Each delivery counts, whatever ended it: `Requeue`, a
    timeout, or a consumer of the original NSQ that closed. A message that was delivered more often is not handled.
    """
    dead_letter: str | DeadLetterHook | None
    """Topic of the dead letters, or a coroutine function of message and error (None if earlier consumers used up the
    attempts). When it fails, the message is requeued.
    """
    reject_ordered: bool
    """Send messages of ordered channels to the dead letters too, which skips them; otherwise a failed message blocks
    its partition.
    """
    report_attempts: int
    """Log an ordered message that blocks its partition at each multiple of this number of attempts; 0 for never."""
    backoff: Literal["consumer", "connection", "off"]
    """With ``consumer`` a failure stops all connections; then one message at a time is requested until handlers succeed
    again, as the Go clients do. With ``connection`` a failure stops only the connection that delivered the message.
    ``off`` is no backoff.
    """
    backoff_base: float
    """The first pause is twice this; each further failure doubles it."""
    backoff_max_wait: float
    """Longest pause, at least twice ``backoff_base``."""
    backoff_jitter: bool
    """Make each pause a random part of itself."""


class ConsumerSettings(HandlerSettings, ConnectionSettings, LookupSettings, total=False):
    """Settings of consumers; times in seconds, sizes in bytes."""
