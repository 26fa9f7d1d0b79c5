"""Settings of consumers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from attrs import field, frozen

from nsqext.arguments import check_counts, check_groups, check_kinds, check_number, check_times, is_number
from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions, LookupSettings
from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import (
    DISPATCH_TYPES,
    FILTER_EQUAL,
    FILTER_GLOB,
    FILTER_MULTI,
    FILTER_REGEXP,
    KEY_FAILOVER,
    ExtFilter,
)
from nsqext.protocol.names import check_partition, check_tag, check_topic
from nsqext.transport.options import ConnectionOptions, ConnectionSettings
from nsqext.waits import check_wait

if TYPE_CHECKING:
    from tenacity.wait import wait_base

    from nsqext.client.consumer.message import KeyOf, Message
    from nsqext.client.consumer.position import Position, StartPositions

_MAX_RECONNECT_WAIT = 5.0

DeadLetterHook = Callable[["Message", Exception | None], Awaitable[object]]


def _position_of(
    given: Position | str | Mapping[int, Position] | StartPositions | None,
) -> Position | Mapping[int, Position] | StartPositions | None:
    if not isinstance(given, str):
        return given
    from nsqext.client.consumer.position import read_position

    try:
        return read_position(given)
    except ValueError as error:
        raise InvalidSetting(f"start={given!r} is not a position", hint=str(error)) from None


def _check_filter(wanted: ExtFilter) -> None:
    """Raise for an invalid filter, which servers would ignore and only log."""
    if not isinstance(wanted, ExtFilter):
        valid, hint = False, "give nsqext.ExtFilter(...)"
    elif wanted.type == FILTER_MULTI:
        valid = wanted.key in ("any", "all") and bool(wanted.pairs) and all(map(all, wanted.pairs))
        hint = "a filter of type 4 needs key='any' or 'all', and pairs"
    else:
        valid = wanted.type in (FILTER_EQUAL, FILTER_REGEXP, FILTER_GLOB) and bool(wanted.key and wanted.data)
        hint = "it needs a type from 1 to 4, a key, and data"
    if not valid:
        raise InvalidSetting(f"ext_filter={wanted!r} is not a filter", hint=hint)


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
    """How long a message may be in flight; None for the server's default (60)."""
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
    """Number of buckets by which ``dispatch="key_failover"`` shares the keys where the server does not. Producers write
    them as tags (their ``key_tags``). None stands for 16.

    Each bucket is a connection to each partition, and has one consumer at a time; messages without a key go to any
    consumer. Needs the redesigned NSQ and topics with extend support. With a number, tags are used on servers with this
    dispatch too; 0 never uses tags: a server without this dispatch is an error.
    """
    initial_ready: int
    """The RDY count of a connection that is new or was idle for 10 s. It doubles, up to its share of ``max_in_flight``,
    while handlers wait for messages, so that consumers of a channel share its messages when handlers are slow.
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
    requeue_delay: float
    """Delay of a requeued message, times its attempts."""
    max_requeue_delay: float
    """Longest such delay. A running consumer keeps to delays beyond what servers accept."""
    requeue_jitter: float
    """Largest random change of the delay, as a share of it."""
    max_attempts: int
    """A message that has failed this many times is sent to the dead letters and finished; without ``dead_letter`` it is
    dropped, of which the starting consumer warns. 0 for never.
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
    """Longest pause."""
    backoff_jitter: bool
    """Make each pause a random part of itself."""


class ConsumerSettings(HandlerSettings, ConnectionSettings, LookupSettings, total=False):
    """Settings of consumers; times in seconds, sizes in bytes."""


@frozen(kw_only=True)
class BackoffOptions:
    """How a consumer slows down while its handlers fail: the values of `HandlerSettings`."""

    mode: Literal["consumer", "connection", "off"] = "consumer"
    base: float = 1.0
    max_wait: float = 120.0
    jitter: bool = False

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_times(self, "base", "max_wait", zero=False)
        if self.mode != "off" and self.max_wait < 2 * self.base:
            raise InvalidSetting(
                f"max_wait={self.max_wait!r} is shorter than the first pause of {2 * self.base:g} s",
                hint="raise it, lower backoff_base, or choose backoff='off'",
            )


@frozen(kw_only=True)
class FailureOptions:
    """What happens to messages whose handler raised: the values of `HandlerSettings`."""

    requeue_delay: float = 1.0
    max_requeue_delay: float = 900.0
    requeue_jitter: float = 0.1
    max_attempts: int = 0
    dead_letter: str | DeadLetterHook | None = None
    reject_ordered: bool = False
    report_attempts: int = 10

    @property
    def drops(self) -> bool:
        """Whether messages that failed ``max_attempts`` times are dropped."""
        return bool(self.max_attempts) and self.dead_letter is None

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_times(self, "requeue_delay", "max_requeue_delay")
        if not is_number(self.requeue_jitter) or self.requeue_jitter >= 1:
            raise InvalidSetting(f"requeue_jitter={self.requeue_jitter!r} is not within 0..1 (1 excluded)")
        check_number("max_attempts", self.max_attempts)
        check_number("report_attempts", self.report_attempts)
        if isinstance(self.dead_letter, str):
            check_topic(self.dead_letter)
        elif self.dead_letter is not None and not callable(self.dead_letter):
            raise InvalidSetting(f"dead_letter={self.dead_letter!r} is neither a topic nor a function")
        if (self.dead_letter is not None or self.reject_ordered) and not self.max_attempts:
            raise InvalidSetting(
                "dead_letter and reject_ordered have no effect without max_attempts", hint="set max_attempts"
            )


@frozen(kw_only=True)
class DeliveryOptions:
    """How received messages are kept in flight: the values of `HandlerSettings`."""

    auto_touch: bool = True
    on_lost: Literal["raise", "ignore"] = "raise"
    decompress: bool = True
    max_unpacked_bytes: int = 128 << 20
    block_warning: float = 1.0
    redelivery_wait: float = 60.0
    gap_wait: float = 5.0

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_times(self, "block_warning", "redelivery_wait", "gap_wait")
        check_number("max_unpacked_bytes", self.max_unpacked_bytes)


@frozen(kw_only=True)
class ConsumerOptions:
    """The values of `ConsumerSettings`."""

    tag: str | None = None
    max_in_flight: int = 200
    concurrency: int = 1
    ordered: bool | None = None
    queue_position: bool = False
    partitions: tuple[int, ...] | None = None
    start: Position | Mapping[int, Position] | StartPositions | None = field(default=None, converter=_position_of)
    start_existing: bool = False
    msg_timeout: float | None = None
    sample_rate: int = 0
    output_buffer_timeout: float | None = 0.01
    output_buffer_size: int | None = None
    ext_filter: ExtFilter | None = None
    key: str | KeyOf | None = None
    dispatch: str | None = None
    key_tags: int | None = None
    initial_ready: int = 1
    max_in_flight_bytes: int = 64 << 20
    reconnect_wait: float | wait_base = 0.05
    max_reconnect_wait: float = _MAX_RECONNECT_WAIT
    lookup_timeout: float = 60.0
    start_timeout: float = 5.0
    close_timeout: float = 30.0
    delivery: DeliveryOptions = field(factory=DeliveryOptions)
    failure: FailureOptions = field(factory=FailureOptions)
    backoff: BackoffOptions = field(factory=BackoffOptions)
    connection: ConnectionOptions = field(factory=ConnectionOptions)
    lookup: LookupOptions = field(factory=LookupOptions)

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        if self.tag is not None:
            check_tag(self.tag)
        check_counts(self, "max_in_flight", "concurrency", "initial_ready")
        check_number("sample_rate", self.sample_rate, 0, 99)
        if self.ordered and self.sample_rate:
            raise InvalidSetting("ordered and sample_rate contradict each other", hint="servers refuse them together")
        if self.msg_timeout is not None:
            check_times(self, "msg_timeout")
        if self.msg_timeout is not None and not 1 <= self.msg_timeout <= 900:
            raise InvalidSetting(f"msg_timeout={self.msg_timeout!r} is not within 1..900 seconds")
        self._check_buffer()
        if self.ext_filter is not None:
            _check_filter(self.ext_filter)
        if self.dispatch is not None and self.dispatch not in DISPATCH_TYPES:
            raise InvalidSetting(f"dispatch={self.dispatch!r} is none of {', '.join(DISPATCH_TYPES)}")
        if self.dispatch == KEY_FAILOVER and self.ordered:
            raise InvalidSetting("ordered and dispatch='key_failover' contradict each other")
        self._check_key_tags()
        if self.key is not None and not callable(self.key) and not (isinstance(self.key, str) and self.key):
            raise InvalidSetting(f"key={self.key!r} is neither the name of a header nor a function")
        if self.partitions is not None:
            if not self.partitions:
                raise InvalidSetting("partitions=() leaves nothing to consume", hint="None stands for all")
            if isinstance(self.partitions, str) or not isinstance(self.partitions, Collection):
                raise InvalidSetting(f"partitions={self.partitions!r} are no numbers", hint="give a tuple as (0, 3)")
            for partition in self.partitions:
                check_partition(partition)
        check_number("max_in_flight_bytes", self.max_in_flight_bytes)
        self._check_start()
        check_times(self, "max_reconnect_wait", "lookup_timeout", "start_timeout", "close_timeout")
        bound = self.max_reconnect_wait
        check_wait("reconnect_wait", self.reconnect_wait, "max_reconnect_wait", bound, _MAX_RECONNECT_WAIT)
        check_groups(self)

    def _check_key_tags(self) -> None:
        if self.key_tags is None:
            return
        from nsqext.key_ranges import check_key_tags

        check_key_tags(self.key_tags)
        if self.dispatch != KEY_FAILOVER:
            raise InvalidSetting("key_tags has no effect without dispatch='key_failover'")
        if self.key_tags and (self.tag is not None or self.ext_filter is not None):
            name = "tag" if self.tag is not None else "ext_filter"
            raise InvalidSetting(f"{name} and key_tags contradict each other", hint="the tags are those of the keys")

    def _check_start(self) -> None:
        if self.start is None:
            if self.start_existing:
                raise InvalidSetting("start_existing needs start")
            return
        from nsqext.client.consumer.position import Position, StartPositions

        if isinstance(self.start, StartPositions):
            if self.start_existing:
                raise InvalidSetting("start_existing has no effect on positions that are looked up")
            return
        starts = self.start if isinstance(self.start, Mapping) else {0: self.start}
        for partition, position in starts.items():
            check_partition(partition)
            if not isinstance(position, Position):
                raise InvalidSetting(
                    f"start={self.start!r} is neither a Position nor a mapping of partitions to them",
                    hint="Position.earliest(), for example",
                )

    def _check_buffer(self) -> None:
        timeout, size = self.output_buffer_timeout, self.output_buffer_size
        if timeout is not None:
            check_times(self, "output_buffer_timeout")
            if timeout > 1:
                raise InvalidSetting(f"output_buffer_timeout={timeout!r} is longer than servers accept (1 s)")
        if size is None:
            return
        check_number("output_buffer_size", size, 64, 65536)
        if timeout == 0:
            raise InvalidSetting("output_buffer_timeout=0 and output_buffer_size contradict each other")

    @property
    def lanes(self) -> str | KeyOf | None:
        """The key of the lanes; None to handle messages in the order received."""
        return KEY_HEADER if self.key is None and self.dispatch == KEY_FAILOVER else self.key

    @property
    def keeps_keys_alone(self) -> bool:
        """Whether lanes keep the order of keys without the server's help."""
        return self.key is not None and self.dispatch != KEY_FAILOVER

    @property
    def bucket_count(self) -> int:
        """Number of key buckets where a server does not share the keys itself; 0 if tags are not used."""
        if self.dispatch != KEY_FAILOVER or self.tag is not None or self.ext_filter is not None:
            return 0
        from nsqext.key_ranges import DEFAULT_KEY_TAGS

        return DEFAULT_KEY_TAGS if self.key_tags is None else self.key_tags

    def start_of(self, partition: int | None) -> Position | None:
        """Return the start position of a partition; None leaves it to the server, or to `start_positions`."""
        if isinstance(self.start, Mapping):
            return None if partition is None else self.start.get(partition)
        return None if self.start is None or self.start_positions is not None else cast("Position", self.start)

    @property
    def start_positions(self) -> StartPositions | None:
        """Asked for the start before each subscription; may be None."""
        if self.start is None:
            return None
        from nsqext.client.consumer.position import StartPositions

        return self.start if isinstance(self.start, StartPositions) else None
