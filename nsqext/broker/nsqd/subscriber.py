"""A session as a subscriber of a channel: writes messages as frames."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.channel.client import Client
    from nsqext.broker.nsqd.session import Session
    from nsqext.protocol.messages import RawMessage

__all__ = ("MESSAGE_HEAD", "MESSAGE_TYPE", "SessionSubscriber")

MESSAGE_HEAD: Struct = Struct(">IIqH16s")
"""Size and type of the frame, time stamp, attempts, id."""
MESSAGE_TYPE: int = 2
_EXT = Struct(">BH")
_DETAIL = Struct(">QI")


class SessionSubscriber:
    """A consumer, as the engine sees it.

    Attributes:
        id: number of its session.
        name: ``host:port`` of the client.
        ready: messages that may be in flight; the engine sets it.
        tag: desired tag, empty without one.
        extend: it reads extend headers.
        detail: its messages carry queue offset and size.
        sample_rate: percentage of the messages that it receives; 0 for all.
        ext_filter: filter on headers, from IDENTIFY.
        msg_timeout: seconds until a message in flight is requeued.
        touch_timeout: seconds until a message that it touched is requeued.
        channel: the channel.
        client: its counters in the engine; None until it has subscribed.
    """

    __slots__ = (
        "channel",
        "client",
        "detail",
        "ext_filter",
        "extend",
        "id",
        "msg_timeout",
        "name",
        "ready",
        "sample_rate",
        "session",
        "tag",
        "touch_timeout",
    )

    def __init__(self, session: Session, channel: Channel, *, detail: bool, extend: bool) -> None:
        settings, sending = session.settings, session.sending
        self.session: Session = session
        self.channel: Channel = channel
        self.id: int = session.id
        self.name: str = session.peer
        self.ready: int = 0
        self.tag: str = settings.desired_tag
        self.extend: bool = extend
        self.detail: bool = detail
        self.sample_rate: int = sending.sample_rate
        self.ext_filter: Mapping[str, Any] = sending.ext_filter
        self.msg_timeout: float = sending.msg_timeout
        self.touch_timeout: float = settings.msg_timeout
        self.client: Client | None = None

    def deliver(self, message: RawMessage) -> None:
        """Send a message."""
        body = message.body
        size = 30 + len(body)
        middle = b""
        if self.extend:
            header = message.header
            middle = _EXT.pack(message.version, len(header)) + header if message.version else b"\0"
        if self.detail:
            middle += _DETAIL.pack(message.offset, message.size)
        if middle:
            size += len(middle)
            body = middle + body
        frame = MESSAGE_HEAD.pack(size, MESSAGE_TYPE, message.timestamp, message.attempts, message.id) + body
        client = self.client
        # the real server does not buffer the messages of an ordered channel
        full = client is None or client.in_flight >= client.window or self.channel.ordered
        self.session.hold(frame, full=full)

    def closed(self) -> None:
        """Close the connection, because the channel was deleted."""
        self.session.close()
