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
    """A consumer, as the engine sees it."""

    def __init__(self, session: Session, channel: Channel, *, detail: bool, extend: bool) -> None:
        settings, sending = session.settings, session.sending
        self.session: Session = session
        self.channel: Channel = channel
        self.id: int = session.id  # number of its session
        self.name: str = session.peer  # ``host:port`` of the client
        self.ready: int = 0  # messages that may be in flight; the engine sets it
        self.tag: str = settings.desired_tag  # desired tag, empty without one
        self.extend: bool = extend  # it reads extend headers
        self.detail: bool = detail  # its messages carry queue offset and size
        self.sample_rate: int = sending.sample_rate  # percentage of the messages that it receives; 0 for all
        self.ext_filter: Mapping[str, Any] = sending.ext_filter  # filter on headers, from IDENTIFY
        self.msg_timeout: float = sending.msg_timeout  # seconds until a message in flight is requeued
        self.touch_timeout: float = settings.msg_timeout  # seconds until a message that it touched is requeued
        self.client: Client | None = None  # its counters in the engine; None until it has subscribed

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
