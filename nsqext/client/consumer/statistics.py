"""Statistics of a consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup


def is_starved(ready: int, in_flight: int) -> bool:
    """Return whether a connection has 85 % of its RDY count in flight."""
    return 0.85 * ready <= in_flight > 0


@frozen(kw_only=True)
class ConsumerConnection:
    """An open connection of a consumer."""

    topic: str
    partition: int | None  #: None on the original NSQ
    node: str  #: ``host:port`` of the node
    ready: int  #: the RDY count
    in_flight: int  #: messages received, neither answered nor timed out
    backoff: int  #: level of its backoff; 0 while handlers succeed

    @property
    def is_starved(self) -> bool:
        """Whether 85 % of its RDY count are in flight, as in the Go client."""
        return is_starved(self.ready, self.in_flight)


@frozen(kw_only=True)
class ConsumerStatistics:
    """The state and the counters of a consumer since it was opened."""

    connections: tuple[ConsumerConnection, ...]  #: open now
    reconnects: int  #: subscriptions after the end of an earlier connection
    received: int  #: messages received, redeliveries included
    finished: int  #: messages finished (FIN)
    requeued: int  #: messages requeued (REQ), or unanswered when the consumer ended their connection
    dropped: int  #: messages finished after ``max_attempts`` or `Reject` without ``dead_letter``
    dead_letters: int  #: messages sent to the dead letters
    lost: int  #: messages that timed out, or whose connection failed; the server redelivers them
    in_flight: int  #: messages received, neither answered nor timed out
    bytes_received: int  #: bytes of received messages, with headers
    lookup_age: float | None  #: seconds since lookup's last answer; None before, and without lookup
    lookup_failures: int  #: consecutive rounds without a usable answer of lookup
    #: reasons why partitions cannot be consumed until a setting is changed, such as a message above ``max_frame_size``
    blocked: tuple[str, ...]


def connections_of(group: SubscriptionGroup) -> tuple[ConsumerConnection, ...]:
    """Return the open connections."""
    return tuple(
        ConsumerConnection(
            topic=one.topic,
            partition=one.partition,
            node=one.node,
            ready=one.ready,
            in_flight=one.in_flight,
            backoff=one.backoff.level,
        )
        for one in group.subscriptions
    )


def statistics_of(group: SubscriptionGroup, blocked: tuple[str, ...] = ()) -> ConsumerStatistics:
    """Return the counters, ended subscriptions included."""
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
        # every received message is in one of these states: no work per message
        finished=received - requeued - lost - in_flight,
        requeued=requeued,
        dropped=group.rejected.dropped,
        dead_letters=group.rejected.dead_letters,
        lost=lost,
        in_flight=in_flight,
        bytes_received=size,
        lookup_age=group.metadata.answer_age,
        lookup_failures=group.metadata.failures,
        blocked=blocked,
    )
