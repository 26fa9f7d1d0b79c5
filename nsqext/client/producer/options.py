"""Settings of producers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, fields, frozen

from nsqext.arguments import check_counts, check_groups, check_kinds, check_number, check_times
from nsqext.errors import ExtendNotSupported, InvalidSetting
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.client.commands import DEFAULT_MAX_BODY_SIZE, DEFAULT_MAX_MESSAGE_SIZE
from nsqext.protocol.names import check_topic, check_topic_pattern, is_topic_pattern
from nsqext.transport.options import ConnectionOptions
from nsqext.waits import check_wait

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from tenacity.wait import wait_base

    from nsqext.protocol.client.body_compression import Codec, Compression
    from nsqext.protocol.hashing import KeyHash
    from nsqext.types import TopicMeta


DELAY_TOPIC = "delayed"
COMPRESSION_MIN = 20_480
_KEY_HASH = "murmur3"
_MAX_RETRY_WAIT = 1.0
_MOST_TOPICS = 4096  # topics whose options are kept
_SETTLE_TIMEOUT = 30.0
_OVER_HTTP = ("connect_timeout", "request_timeout", "tls")  # connection settings that HTTP has, too


@frozen(kw_only=True)
class ProducerOptions:
    """The values of `ProducerSettings`."""

    transport: Literal["tcp", "http"] = "tcp"
    timeout: float = 30.0
    on_unknown: Literal["retry", "raise", "settle"] = "retry"
    settle_timeout: float = _SETTLE_TIMEOUT
    balance: Literal["round_robin", "least_pending"] = "round_robin"
    key_hash: str | KeyHash = _KEY_HASH
    key_tags: int | None = None
    compression: Compression = "none"
    compression_min: int = COMPRESSION_MIN
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE
    max_batch_size: int = DEFAULT_MAX_BODY_SIZE
    max_batch_count: int = 10_000
    retry_wait: float | wait_base = 0.02
    max_retry_wait: float = _MAX_RETRY_WAIT
    forget_after: float = 3600.0
    lookup_timeout: float = 10.0
    delay_via: Literal["consumer", "relay"] = "consumer"
    max_delay: float = 3600.0
    delay_topic: str = DELAY_TOPIC
    close_timeout: float = 5.0
    connect: bool = False
    connection: ConnectionOptions = field(factory=ConnectionOptions)
    lookup: LookupOptions = field(factory=LookupOptions)

    def __attrs_post_init__(self) -> None:
        if self.key_hash != _KEY_HASH:
            self.key_function()
        if self.key_tags:
            from nsqext.key_ranges import check_key_tags

            check_key_tags(self.key_tags)
        if self.compression != "none":
            from nsqext.protocol.client.body_compression import check_compression

            check_compression(self.compression)
        check_topic(self.delay_topic)
        check_kinds(self)
        if self.settle_timeout != _SETTLE_TIMEOUT and self.on_unknown != "settle":
            raise InvalidSetting("settle_timeout has no effect without on_unknown='settle'")
        if self.transport == "http":
            self._check_over_http()
        check_counts(self, "max_message_size", "max_batch_size", "max_batch_count")
        check_number("compression_min", self.compression_min)
        if self.compression_min != COMPRESSION_MIN and not self.compresses:
            raise InvalidSetting("compression_min has no effect without compression")
        check_times(self, "timeout", "settle_timeout", "max_retry_wait", "forget_after", zero=False)
        check_times(self, "lookup_timeout", "close_timeout", "max_delay")
        check_wait("retry_wait", self.retry_wait, "max_retry_wait", self.max_retry_wait, _MAX_RETRY_WAIT)
        check_groups(self)

    def key_function(self) -> KeyHash:
        """Return the function from key and number of partitions to a partition; raises InvalidSetting."""
        from nsqext.protocol.hashing import key_hash

        return key_hash(self.key_hash)

    @property
    def compresses(self) -> bool:
        given = self.compression
        return given != "none" if isinstance(given, str) else any(codec != "none" for codec in given.values())

    def _check_over_http(self) -> None:
        if self.on_unknown == "settle":
            raise InvalidSetting(
                "on_unknown='settle' needs TCP, over which the log is searched",
                hint="use on_unknown='raise' or 'retry'",
            )
        for one in fields(ConnectionOptions):
            if one.name not in _OVER_HTTP and getattr(self.connection, one.name) != one.default:
                raise InvalidSetting(
                    f"{one.name} has no effect with transport='http'", hint="leave it out, or publish over TCP"
                )


class TopicOptions:
    """The options of a producer for single topics."""

    def __init__(self, options: ProducerOptions) -> None:
        self._options = options
        given = options.compression
        self._table: Mapping[str, Codec] | None = None if isinstance(given, str) else dict(given)
        table = self._table or {}
        self._patterns: list[tuple[re.Pattern[str], Codec]] = [
            (check_topic_pattern(topic), codec) for topic, codec in table.items() if is_topic_pattern(topic)
        ]
        self._by_topic: dict[str, ProducerOptions] = {}

    def of(self, topic: str) -> ProducerOptions:
        """Return the options for a topic: a codec of its name precedes the first matching pattern."""
        if self._table is None or not isinstance(topic, str):  # refused later
            return self._options
        found = self._by_topic.get(topic)
        if found is None:
            if len(self._by_topic) >= _MOST_TOPICS:
                self._by_topic.clear()
            matching = (codec for pattern, codec in self._patterns if pattern.fullmatch(topic))
            codec: Codec = self._table[topic] if topic in self._table else next(matching, "none")
            least = COMPRESSION_MIN if codec == "none" else self._options.compression_min
            found = self._by_topic[topic] = evolve(self._options, compression=codec, compression_min=least)
        return found

    def check(self, topic: str, meta: TopicMeta) -> None:
        """Raise ExtendNotSupported if ``compression`` names a topic without headers to declare it."""
        if self._table is not None and self._table.get(topic, "none") != "none" and not meta.extend_support:
            upgrade = "upgrade the topic (Admin.upgrade_topic), or " if meta.partition_num else ""
            raise ExtendNotSupported(
                "compression has no effect: the topic does not support extend headers",
                topic=topic,
                hint=f"{upgrade}leave it out of compression",
            )
