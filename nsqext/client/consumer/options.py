"""Settings of consumers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Literal, cast

from attrs import field, frozen

from nsqext.arguments import check_counts, check_groups, check_kinds, check_number, check_times, is_number
from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.identify import (
    DISPATCH_TYPES,
    FILTER_EQUAL,
    FILTER_GLOB,
    FILTER_MULTI,
    FILTER_REGEXP,
    KEY_FAILOVER,
    ExtFilter,
)
from nsqext.protocol.messages import KEY_HEADER
from nsqext.protocol.names import check_partition, check_tag, check_topic
from nsqext.transport.options import ConnectionOptions
from nsqext.waits import check_wait

if TYPE_CHECKING:
    from tenacity.wait import wait_base

    from nsqext.client.consumer.message import KeyOf, Message
    from nsqext.client.consumer.position import Position, StartPositions

_MAX_RECONNECT_WAIT = 5.0

LANE_WAITS = {"redelivery_wait": 60.0, "gap_wait": 5.0, "settle_wait": 0.2}
"""Settings of the order of keys, with their defaults."""

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
    redelivery_wait: float = LANE_WAITS["redelivery_wait"]
    gap_wait: float = LANE_WAITS["gap_wait"]
    settle_wait: float = LANE_WAITS["settle_wait"]

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_times(self, "block_warning", "redelivery_wait", "gap_wait", "settle_wait")
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
        if self.msg_timeout is not None and not is_number(self.msg_timeout, 1, 900):
            raise InvalidSetting(f"msg_timeout={self.msg_timeout!r} is not within 1..900 seconds")
        self._check_buffer()
        if self.ext_filter is not None:
            _check_filter(self.ext_filter)
        if self.dispatch is not None and self.dispatch not in DISPATCH_TYPES:
            raise InvalidSetting(f"dispatch={self.dispatch!r} is none of {', '.join(DISPATCH_TYPES)}")
        if self.dispatch == KEY_FAILOVER and self.ordered:
            raise InvalidSetting("ordered and dispatch='key_failover' contradict each other")
        self._check_key_tags()
        if self.key is not None:
            from nsqext.client.consumer.handlers.message_keys import check_key

            check_key(self.key)
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
        for name, default in LANE_WAITS.items() if self.lanes is None else ():
            if getattr(self.delivery, name) != default:
                raise InvalidSetting(f"{name} has no effect without key or dispatch='key_failover'")

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
        """Number of key buckets where a server does not share the keys; 0 if tags are not used."""
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
