"""Settings of consumers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypedDict

from attrs import field, frozen

from nsqext.client.producer.options import check_groups
from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import (
    DISPATCH_TYPES,
    FILTER_EQUAL,
    FILTER_GLOB,
    FILTER_MULTI,
    FILTER_REGEXP,
    KEY_FAILOVER,
)
from nsqext.protocol.names import check_partition, check_topic
from nsqext.transport.options import ConnectionOptions

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.position import Position
    from nsqext.protocol.identify import ExtFilter

__all__ = ("BackoffOptions", "ConsumerOptions", "DeliveryOptions", "FailureOptions", "KeyOf", "KeyOptions")

_DAYS = 3 * 24 * 3600.0

DeadLetterHook = Callable[["Message", Exception | None], Awaitable[object]]

KeyOf = Callable[["Message"], str | bytes | None]
"""Returns the key of a message, None for a message without one."""


class KeyOptions(TypedDict, total=False):
    """Members of `ConsumerOptions` that a consumer takes directly, too."""

    key: str | KeyOf | None
    dispatch: str | None


def _check_times(settings: object, *names: str, zero: bool = True) -> None:
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value >= 0 if zero else value > 0):
            raise InvalidSetting(f"{name}={value!r} is {'negative' if zero else 'not positive'}, or no time in seconds")


def _check_filter(wanted: ExtFilter) -> None:
    """Raise for a filter that makes no sense: servers would do without it, and say so to nobody but their log."""
    if wanted.type == FILTER_MULTI:
        if wanted.key not in ("any", "all") or not wanted.pairs or not all(map(all, wanted.pairs)):
            raise InvalidSetting(
                f"ext_filter={wanted!r} makes no sense", hint="a filter of type 4 needs key='any' or 'all', and pairs"
            )
    elif wanted.type not in (FILTER_EQUAL, FILTER_REGEXP, FILTER_GLOB) or not wanted.key or not wanted.data:
        raise InvalidSetting(
            f"ext_filter={wanted!r} makes no sense",
            hint="it needs a type from 1 to 4, a key, and data",
        )


@frozen
class BackoffOptions:
    """How a consumer slows down while its handlers fail; times in seconds.

    Attributes:
        mode: ``consumer``: one failure stops all connections, then one message at a time tries whether things are
            better, as the Go clients do; ``connection``: only the connection that the message came over; ``off``:
            never.
        base: the first pause is twice this; each further failure doubles it.
        max_wait: a pause that would be longer is not entered.
        jitter: make each pause a random part of itself.
    """

    mode: Literal["consumer", "connection", "off"] = "consumer"
    base: float = 1.0
    max_wait: float = 120.0
    jitter: bool = False

    def __attrs_post_init__(self) -> None:
        if self.mode not in ("consumer", "connection", "off"):
            raise InvalidSetting(f"mode={self.mode!r} is none of 'consumer', 'connection' and 'off'")
        _check_times(self, "base", "max_wait", zero=False)
        if self.mode != "off" and self.max_wait < 2 * self.base:
            raise InvalidSetting(
                f"max_wait={self.max_wait!r} leaves no room for the first pause of {2 * self.base:g} s",
                hint="raise it, lower base, or choose mode='off'",
            )


@frozen
class FailureOptions:
    """What becomes of messages whose handler raised; times in seconds.

    Attributes:
        requeue_delay: delay of a requeued message, times its attempts.
        max_requeue_delay: longest such delay.
        jitter: share of the delay that it is longer or shorter, at random.
        max_attempts: a message that failed so often is given up: it goes to the dead letters, if there are any, and
            is finished. 0 for never.
        dead_letter: name of a topic that takes such messages, or a coroutine function of message and error (None for
            one that was too often delivered before). When it fails, the message is requeued.
        reject_ordered: do so on ordered channels too, which skips the message; otherwise it blocks its partition.
        report_attempts: an ordered message is reported whenever this number of attempts (or a multiple) is reached; 0
            for never.
    """

    requeue_delay: float = 1.0
    max_requeue_delay: float = 900.0
    jitter: float = 0.1
    max_attempts: int = 0
    dead_letter: str | DeadLetterHook | None = None
    reject_ordered: bool = False
    report_attempts: int = 10

    def __attrs_post_init__(self) -> None:
        _check_times(self, "requeue_delay", "max_requeue_delay")
        if self.max_requeue_delay > _DAYS:
            raise InvalidSetting(f"max_requeue_delay={self.max_requeue_delay!r} is longer than servers take (3 days)")
        if not 0 <= self.jitter < 1:
            raise InvalidSetting(f"jitter={self.jitter!r} is not within 0..1 (1 excluded)")
        for name in ("max_attempts", "report_attempts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidSetting(f"{name}={value!r} is not a number of attempts")
        if isinstance(self.dead_letter, str):
            check_topic(self.dead_letter)
        elif self.dead_letter is not None and not callable(self.dead_letter):
            raise InvalidSetting(f"dead_letter={self.dead_letter!r} is neither a topic nor a function")
        if (self.dead_letter is not None or self.reject_ordered) and not self.max_attempts:
            raise InvalidSetting("nothing is ever given up without max_attempts", hint="set max_attempts")


@frozen
class DeliveryOptions:
    """How messages are kept while they are here; times in seconds.

    Attributes:
        auto_touch: ask for more time for messages that wait here or whose handler runs, as long as the server grants it
            (its ``max_msg_timeout``, 15 minutes by default).
        on_lost: what answering a message does that is no longer ours: ``raise`` gives `MessageNotInFlight`,
            ``ignore`` nothing.
        decompress: restore bodies that the publishing client compressed.
        block_warning: an event loop that is blocked for longer is reported; 0 for never.
    """

    auto_touch: bool = True
    on_lost: Literal["raise", "ignore"] = "raise"
    decompress: bool = True
    block_warning: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.on_lost not in ("raise", "ignore"):
            raise InvalidSetting(f"on_lost={self.on_lost!r} is neither 'raise' nor 'ignore'")
        _check_times(self, "block_warning")


@frozen
class ConsumerOptions:
    """How a consumer consumes; times in seconds.

    Attributes:
        ordered: subscribe in order (SUB_ORDERED); None follows the topic's meta.
        queue_position: subscribe so that messages tell their offset and size (SUB_ADVANCED); ordered ones always do.
        partitions: only these; None for all.
        start: where a channel that is new begins, for all partitions or by partition; servers begin at the end.
        start_existing: move a channel that exists to ``start`` as well, whenever this consumer opens.
        msg_timeout: how long a message may be in flight; None for the server's default (60).
        sample_rate: percentage of the messages that is delivered, 1 to 99; 0 for all.
        output_buffer_timeout: how long the server may keep a message back to send it together with others, up to 1;
            what is shorter than servers take is raised to it (0.01 at the redesigned NSQ, 0.025 at the original). None
            for the server's default (0.05 and 0.25); 0 sends each message at once, which costs throughput.
        output_buffer_size: bytes that the server collects before it sends without waiting, 64 to 65536; None for the
            server's default (4096 and 16384).
        ext_filter: a filter on an extend header, applied by the server.
        key: what the key of a message is: the name of the extend header that carries it (``##key`` is the one that
            ``publish(key=…)`` writes), or a function of the message. `Consumer.run` then keeps the messages of a key in
            their order: its ``concurrency`` handlers are lanes, each for a range of the keys, and a message that is
            requeued waits here, in front of what is behind it of its key, while all other keys go on. Backoff does
            nothing then. Up to as many messages again as ``max_in_flight`` may wait behind those that are held.
        dispatch: ``key_failover`` makes the channel one whose messages of one key go to one consumer, or subscribes to
            it as such, with ``key`` as the header that carries the key (``##key`` where that is a function or not
            given); servers that cannot do this are refused. ``shared`` refuses channels of that type.
        reconnect_wait: first pause before a node is tried again; it doubles up to ``max_reconnect_wait``, with full
            jitter.
        max_reconnect_wait: longest pause before a node is tried again.
        start_timeout: how long opening waits for the subscriptions of all partitions; afterwards they go on in the
            background.
        close_timeout: how long running handlers have to end when the consumer closes; then they are cancelled, and
            their messages are requeued at once (on ordered channels the end of the connection does that).
        delivery: touching, loss, decompression.
        failure: requeues and dead letters.
        backoff: slowing down while handlers fail.
        connection: how to connect to nodes.
        lookup: how to ask the lookup service.
    """

    ordered: bool | None = None
    queue_position: bool = False
    partitions: tuple[int, ...] | None = None
    start: Position | Mapping[int, Position] | None = None
    start_existing: bool = False
    msg_timeout: float | None = None
    sample_rate: int = 0
    output_buffer_timeout: float | None = 0.01
    output_buffer_size: int | None = None
    ext_filter: ExtFilter | None = None
    key: str | KeyOf | None = None
    dispatch: str | None = None
    reconnect_wait: float = 0.05
    max_reconnect_wait: float = 5.0
    start_timeout: float = 5.0
    close_timeout: float = 30.0
    delivery: DeliveryOptions = field(factory=DeliveryOptions)
    failure: FailureOptions = field(factory=FailureOptions)
    backoff: BackoffOptions = field(factory=BackoffOptions)
    connection: ConnectionOptions = field(factory=ConnectionOptions)
    lookup: LookupOptions = field(factory=LookupOptions)

    def __attrs_post_init__(self) -> None:
        rate = self.sample_rate
        if isinstance(rate, bool) or not isinstance(rate, int) or not 0 <= rate <= 99:
            raise InvalidSetting(f"sample_rate={self.sample_rate!r} is not within 0..99")
        if self.ordered and self.sample_rate:
            raise InvalidSetting("ordered and sample_rate contradict each other", hint="servers refuse them together")
        if self.msg_timeout is not None:
            _check_times(self, "msg_timeout")
        if self.msg_timeout is not None and not 1 <= self.msg_timeout <= 900:
            raise InvalidSetting(f"msg_timeout={self.msg_timeout!r} is not within 1..900 seconds")
        self._check_buffer()
        if self.ext_filter is not None:
            _check_filter(self.ext_filter)
        if self.dispatch is not None and self.dispatch not in DISPATCH_TYPES:
            raise InvalidSetting(f"dispatch={self.dispatch!r} is none of {', '.join(DISPATCH_TYPES)}")
        if self.dispatch == KEY_FAILOVER and self.ordered:
            raise InvalidSetting("ordered and dispatch='key_failover' contradict each other")
        if self.key is not None and not callable(self.key) and not (isinstance(self.key, str) and self.key):
            raise InvalidSetting(f"key={self.key!r} is neither the name of a header nor a function")
        if self.partitions is not None:
            if not self.partitions:
                raise InvalidSetting("partitions=() leaves nothing to consume", hint="None stands for all")
            for partition in self.partitions:
                check_partition(partition)
        self._check_start()
        _check_times(self, "reconnect_wait", "max_reconnect_wait", "start_timeout", "close_timeout")
        check_groups(self)

    def _check_start(self) -> None:
        if self.start is None:
            if self.start_existing:
                raise InvalidSetting("start_existing needs start")
            return
        # loads what asks over HTTP, which nobody needs who begins where the server does
        from nsqext.client.consumer.position import Position

        starts = self.start if isinstance(self.start, Mapping) else {0: self.start}
        for partition, position in starts.items():
            check_partition(partition)
            if not isinstance(position, Position):
                raise InvalidSetting(
                    f"start={self.start!r} is no Position, nor one for each partition",
                    hint="Position.earliest(), for example",
                )

    def _check_buffer(self) -> None:
        timeout, size = self.output_buffer_timeout, self.output_buffer_size
        if timeout is not None:
            _check_times(self, "output_buffer_timeout")
            if timeout > 1:
                raise InvalidSetting(f"output_buffer_timeout={timeout!r} is longer than servers take (1 s)")
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or not 64 <= size <= 65536:
            raise InvalidSetting(f"output_buffer_size={size!r} is not within 64..65536 bytes")
        if timeout == 0:
            raise InvalidSetting("output_buffer_timeout=0 and output_buffer_size contradict each other")

    @property
    def lanes(self) -> str | KeyOf | None:
        """What the lanes go by; None where handlers take messages as they come."""
        return KEY_HEADER if self.key is None and self.dispatch == KEY_FAILOVER else self.key

    def start_of(self, partition: int) -> Position | None:
        """Return where a partition is to begin; None leaves it to the server."""
        if isinstance(self.start, Mapping):
            return self.start.get(partition)
        return self.start
