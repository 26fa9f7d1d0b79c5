"""What a consumer reports about itself: its connections and its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.lookup.metadata import MetadataCache


@frozen
class ConsumerConnection:
    """An open connection of a consumer."""

    topic: str  #: name of the topic
    partition: int  #: the partition; -1 at the original NSQ
    node: str  #: ``host:port`` of the node
    ready: int  #: the RDY count, the messages that it may have in flight
    in_flight: int  #: messages that were received and neither answered nor timed out
    backoff: int  #: level of its backoff; 0 while handlers succeed


@frozen
class ConsumerStatistics:
    """The state and the counters of a consumer since it was opened."""

    connections: tuple[ConsumerConnection, ...]  #: the open connections
    reconnects: int  #: subscriptions that were made again after a connection had ended
    received: int  #: messages received, redeliveries included
    finished: int  #: messages finished (FIN)
    requeued: int  #: messages requeued (REQ)
    lost: int  #: messages that timed out, or were in flight when their connection ended; the server delivers them again
    in_flight: int  #: messages received that were neither answered nor timed out
    bytes_received: int  #: bytes of the messages received, headers included
    lookup_age: float | None  #: seconds since the lookup service answered last; None if it has not, or is not used
    lookup_failures: int  #: rounds in a row in which no lookup node gave a usable answer


def connections_of(group: SubscriptionGroup) -> tuple[ConsumerConnection, ...]:
    """Return the open connections of a consumer."""
    return tuple(
        ConsumerConnection(one.topic, one.partition, one.node, one.ready, one.in_flight, one.backoff.level)
        for one in group.subscriptions
    )


def statistics_of(group: SubscriptionGroup, metadata: MetadataCache) -> ConsumerStatistics:
    """Return the counters of a consumer, of the subscriptions that ended too."""
    received, requeued, lost, size = group.closed_counts
    in_flight = 0
    for subscription in tuple(group.live):
        received += subscription.received
        requeued += subscription.requeued
        lost += subscription.timed_out
        in_flight += subscription.in_flight
        size += subscription.received_bytes
    return ConsumerStatistics(
        connections=connections_of(group),
        reconnects=group.reconnects,
        received=received,
        # every received message is in one of these states: counted without work per message
        finished=received - requeued - lost - in_flight,
        requeued=requeued,
        lost=lost,
        in_flight=in_flight,
        bytes_received=size,
        lookup_age=metadata.answer_age,
        lookup_failures=metadata.failures,
    )
