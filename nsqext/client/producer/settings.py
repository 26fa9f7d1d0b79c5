"""What the settings of producers mean; see `nsqext.transport.settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from nsqext.lookup.settings import LookupSettings
from nsqext.transport.settings import ConnectionSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenacity.wait import wait_base

    from nsqext.protocol.client.body_compression import Codec
    from nsqext.protocol.hashing import KeyHash


class ProducerSettings(ConnectionSettings, LookupSettings, total=False):
    """Settings of producers; times in seconds, sizes in bytes."""

    transport: Literal["tcp", "http"]
    """How messages are sent. ``http`` is for places where TCP does not pass. It sends to the HTTP side of the nodes
    from lookup (after ``address_map``), or with ``nsqd`` to these HTTP addresses, also ``https://gateway/path``.
    Messages with headers or trace ids are sent one by one instead of in batches.
    """
    timeout: float
    """For one publish with all its attempts; in a call with many messages, for each batch of a partition in turn."""
    on_unknown: Literal["retry", "raise", "settle"]
    """What follows a sent publish without response. ``retry`` sends it again, which may store it twice; ``raise``
    raises `DeliveryUnknown`. ``settle`` looks for it in the partition's log, and sends it again only if it is not
    stored; only for topics of the redesigned NSQ with ``lookupd``. Every message then has a trace id: a given trace id
    must be unique.
    """
    settle_timeout: float
    """How long the log is searched for a publish, beyond ``timeout``, before `DeliveryUnknown` is raised."""
    balance: Literal["round_robin", "least_pending"]
    """Partition of messages without key. ``round_robin``, or ``least_pending`` (of the next two
    partitions, the partition whose node has fewer pending requests).
    """
    key_hash: str | KeyHash
    """Maps keys to partitions. ``murmur3`` (as users of the Go client), ``java_string`` and ``java_long`` (as the Java
    client with ``setTopicShardingIDString`` and ``setTopicShardingIDLong``; for numbers, ``key`` is an int), or a
    function of key and number of partitions.
    """
    key_tags: int | None
    """Write the bucket of a message's key, of this number of buckets (at most 1024), as its tag, so that consumers with
    ``dispatch="key_failover"`` share the keys on any redesigned NSQ; topics must support extend headers. All producers
    and consumers of a topic need the same number; consumers use 16 by default. None and 0 write no tags.
    """
    compression: Codec | Mapping[str, Codec]
    """``gzip``, ``snappy`` or ``lz4`` compress bodies for topics with extend support, as the Go client does; consumers
    of this package decompress them. Or codecs by topic or pattern, in text ``logs=snappy,events.*=gzip``; other topics
    are not compressed, and named topics must have extend support.
    """
    compression_min: int
    """Smallest body that is compressed."""
    max_message_size: int
    """Largest message that the servers accept, with trace id and headers."""
    max_batch_size: int
    """Largest batch that the servers accept."""
    max_batch_count: int
    """Messages in a batch."""
    retry_wait: float | wait_base
    """First pause before another attempt; it doubles up to ``max_retry_wait``, with full jitter. Or a wait strategy of
    tenacity.
    """
    max_retry_wait: float
    """Longest pause before another attempt."""
    forget_after: float
    """A topic without a publish for this time (up to twice) is not polled until the next publish; connections to nodes
    that lead no other topic are closed.
    """
    lookup_timeout: float
    """How long publishes wait for a lookup service that has not answered since the producer was opened; an address
    without a lookup service fails at once.
    """
    delay_via: Literal["consumer", "relay"]
    """Who delays a message. With ``consumer`` it is published to its topic at once; the original NSQ keeps it, and
    consumers of the redesigned NSQ requeue it until it is due. With ``relay`` it is published to ``delay_topic``, and
    ``nsqext delay run`` publishes it when due.
    """
    max_delay: float
    """Longest ``delay`` that servers of the original NSQ accept (their ``-max-req-timeout``)."""
    delay_topic: str
    """Topic of the delayed messages for relays."""
    close_timeout: float
    """How long closing waits for publishes in flight."""
    connect: bool
    """Connect to all nodes when the producer is opened, which fails if none can be reached."""
