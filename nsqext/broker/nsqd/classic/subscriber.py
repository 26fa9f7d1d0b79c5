"""A session's place in a channel of the original generation, whose ids are 16 hexadecimal characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.nsqd.subscriber import MESSAGE_HEAD, MESSAGE_TYPE, Subscription

if TYPE_CHECKING:
    from nsqext.broker.engine.channel import Channel
    from nsqext.broker.nsqd.session import Session
    from nsqext.protocol.messages import RawMessage

__all__ = ("ClassicSubscriber",)


class ClassicSubscriber(Subscription):
    """What the engine knows of a consumer.

    Args:
        session: the consumer.
        channel: where it subscribes.
        deliveries: counts of deliveries by channel.
    """

    __slots__ = ("_deliveries", "_id_base", "_name")

    def __init__(self, session: Session, channel: Channel, deliveries: dict[str, int]) -> None:
        super().__init__(session, channel, detail=False, extend=False)
        self._id_base = session.node.id_base
        self._name = channel.name
        self._deliveries = deliveries
        deliveries.setdefault(channel.name, 0)

    def deliver(self, message: RawMessage) -> None:
        """Send a message."""
        body = message.body
        wire_id = b"%016x" % (self._id_base + message.internal_id)
        head = MESSAGE_HEAD.pack(30 + len(body), MESSAGE_TYPE, message.timestamp, message.attempts, wire_id)
        self._deliveries[self._name] += 1
        client = self.client
        self.session.hold(head + body, full=client is None or client.in_flight >= client.window)
