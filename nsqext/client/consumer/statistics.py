"""What a consumer reports about itself: its connections and its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.lookup.metadata import MetadataCache


@frozen
class ConsumerConnection:
    """An open connection of a consumer.

    Attributes:
        topic: name of the topic.
        partition: the partition; -1 at the original NSQ.
        node: ``host:port`` of the node.
        ready: the RDY count: messages that it may have in flight.
        in_flight: messages that were received and neither answered nor timed out.
        backoff: level of its backoff; 0 while handlers succeed.
    """

    topic: str
    partition: int
    node: str
    ready: int
    in_flight: int
    backoff: int


@frozen
class ConsumerStatistics:
    """The state and the counters of a consumer since it was opened.

    Attributes:
        connections: the open connections.
        reconnects: subscriptions that were made again after a connection had ended.
        received: messages received, redeliveries included.
        finished: messages finished (FIN).
        requeued: messages requeued (REQ).
        lost: messages that timed out, or were in flight when their connection ended; the server delivers them again.
        in_flight: messages received that were neither answered nor timed out.
        bytes_received: bytes of the messages received, headers included.
        lookup_age: seconds since the lookup service answered last; None if it has not, or is not used.
        lookup_failures: rounds in a row in which no lookup node gave a usable answer.
    """

    connections: tuple[ConsumerConnection, ...]
    reconnects: int
    received: int
    finished: int
    requeued: int
    lost: int
    in_flight: int
    bytes_received: int
    lookup_age: float | None
    lookup_failures: int


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
