"""The client role of one connection, without I/O: bytes in; responses, messages, notices and bytes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from nsqext.errors import ConnectionLost, NotSent, NsqError, ProtocolError, RequestTimeout, ServerError
from nsqext.errors.server import FinishFailed, RequeueFailed, TouchFailed, server_error
from nsqext.protocol.client.commands import NOP
from nsqext.protocol.frames import DEFAULT_MAX_FRAME_SIZE, HEARTBEAT, Frame, FrameParser, encode_frame
from nsqext.protocol.trace_reply import TRACE_REPLY_SIZE

__all__ = ("MAX_NOTICES", "ClientProtocol", "Reply")

MAX_NOTICES = 10_000
"""Most rejections of FIN, REQ and TOUCH that are kept until they are read; one more ends the connection."""

_LONE_OK = encode_frame(0, b"OK")
_LONE_TRACE_HEAD = encode_frame(0, bytes(TRACE_REPLY_SIZE))[:-TRACE_REPLY_SIZE]
_LONE_TRACE_SIZE = len(_LONE_TRACE_HEAD) + TRACE_REPLY_SIZE


class Reply:
    """The response to one command, once it is received.

    Args:
        deadline: when the caller stops waiting, see `ClientProtocol.expire`.
        breaks: an error response leaves the stream out of step (captured: pub_ext_on_plain, where the server takes the
            rest of a batch for commands).

    Attributes:
        data: data of the response frame.
        error: the error response, or why there is no response.
        wake: called when ``data`` or ``error`` is set.
    """

    __slots__ = ("breaks", "data", "deadline", "error", "wake")

    def __init__(self, deadline: float = inf, breaks: bool = False) -> None:
        self.deadline: float = deadline
        self.breaks: bool = breaks
        self.data: bytes | None = None
        self.error: NsqError | None = None
        self.wake: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Whether ``data`` or ``error`` is set."""
        return self.data is not None or self.error is not None


class ClientProtocol:
    """Client role of one connection.

    Responses are received in the order of the commands, so a queue of `Reply` objects matches them. A caller that stops
    waiting leaves its reply in the queue, and the late response is discarded.

    Args:
        node: ``host:port``, for errors.
        max_frame_size: largest frame that is accepted, in bytes.

    Attributes:
        out: bytes to be sent, oldest first; the transport sends and clears them.
        notices: rejected FIN, REQ and TOUCH, which are not responses; the user reads and clears them.
        error: why the connection cannot be used any more.
        heartbeats: number of heartbeats that were received and answered.
    """

    __slots__ = ("_parser", "error", "heartbeats", "node", "notices", "out", "pending")

    def __init__(self, node: str = "", max_frame_size: int = DEFAULT_MAX_FRAME_SIZE) -> None:
        self.node: str = node
        self.out: list[bytes] = []
        self.notices: list[ServerError] = []
        self.error: NsqError | None = None
        self.heartbeats: int = 0
        self.pending: deque[Reply] = deque()
        """Replies to the commands without a response so far, oldest first; always the same deque."""
        self._parser = FrameParser(max_frame_size)

    @property
    def waiting(self) -> int:
        """Number of commands without a response so far."""
        return len(self.pending)

    @property
    def wanted(self) -> int:
        """Bytes that the next read should take at most, because they belong to one large frame; 0 for any number."""
        return self._parser.wanted

    def expect(self, reply: Reply) -> None:
        """Append the reply to the command that is written next."""
        self.pending.append(reply)

    def receive_data(self, data: bytes) -> list[bytes]:
        """Parse received bytes; return the data of the messages in them, oldest first.

        Sets the replies, and answers heartbeats through ``out``. Never raises: check ``error``.
        """
        messages: list[bytes] = []
        pending = self.pending
        parser = self._parser
        if (
            pending
            and not parser.buffered
            and (data == _LONE_OK or (len(data) == _LONE_TRACE_SIZE and data.startswith(_LONE_TRACE_HEAD)))
        ):
            # the response to a lone publish, without the cost of the parser
            reply = pending.popleft()
            reply.data = data[8:]
            if reply.wake is not None:
                reply.wake()
            return messages
        frames = parser.feed(data, messages)
        if parser.single:
            frames = self._skip_heartbeats(frames, messages)
        for kind, payload in frames:
            if kind == 1:
                self._receive_error(server_error(payload, node=self.node))
            elif payload == HEARTBEAT:
                self.heartbeats += 1
                self.out.append(NOP)
            elif pending:
                reply = pending.popleft()
                reply.data = payload
                if reply.wake is not None:
                    reply.wake()
            else:
                self.fail(ProtocolError(f"received a response without a request: {payload[:80]!r}", node=self.node))
        if parser.error is not None and self.error is None:
            self.fail(parser.error)
        return messages

    def _skip_heartbeats(self, frames: list[Frame], messages: list[bytes]) -> list[Frame]:
        """Answer heartbeats between two frames of the handshake, which are parsed one at a time."""
        while frames == [(0, HEARTBEAT)]:
            self.heartbeats += 1
            self.out.append(NOP)
            frames = self._parser.feed(b"", messages)
        return frames

    def wake_next(self) -> None:
        """Wake the oldest pending request, so that its task reads."""
        for reply in self.pending:
            if reply.wake is not None and not reply.done:
                reply.wake()
                return

    def read_ahead(self, on: bool = True) -> None:
        """Parse all received frames; if switched off, one at a time, because a layer may begin after it."""
        self._parser.single = not on

    def take_rest(self) -> bytes:
        """Return and forget the bytes after the last frame, for a layer that was just negotiated."""
        return self._parser.take_rest()

    def expire(self, now: float) -> int:
        """Fail expired requests and return their number; late responses are discarded."""
        expired = 0
        for reply in self.pending:
            if reply.deadline < now and not reply.done:
                expired += 1
                reply.error = RequestTimeout("no response before the deadline", node=self.node)
                if reply.wake is not None:
                    reply.wake()
        return expired

    def fail(self, error: NsqError, unsent: int = 0) -> None:
        """End the connection: all pending and all further requests fail.

        Servers read one command after the other, so after an error that makes the server close the connection, the
        commands sent after the refused one were not read: they fail with `NotSent`, as the last ``unsent`` ones do.
        """
        if self.error is None:
            self.error = error.at(node=self.node)
        unread = isinstance(self.error, ServerError)
        pending = tuple(self.pending)
        self.pending.clear()  # the same deque: further responses of the same read match no request
        sent = len(pending) - unsent
        for number, reply in enumerate(pending):
            if reply.done:
                continue
            reply.error = self.loss(unread or number >= sent)
            if reply.wake is not None:
                reply.wake()

    def loss(self, unsent: bool = True) -> NsqError:
        """Return a new error for a request, with the reason why the connection ended."""
        cause = self.error
        kind: type[NsqError] = ConnectionLost
        if unsent:
            kind = NotSent
        elif isinstance(cause, (ConnectionLost, RequestTimeout)):
            kind = type(cause)
        error = kind("the connection is closed", node=self.node)
        if cause is not None:
            error = kind(cause.message, node=self.node, hint=cause.hint)
        error.__cause__ = cause
        return error

    def _receive_error(self, error: ServerError) -> None:
        if isinstance(error, (FinishFailed, RequeueFailed, TouchFailed)):
            if self.error is None:
                self.notices.append(error)
            if len(self.notices) > MAX_NOTICES:
                self.notices.clear()
                self.fail(ProtocolError(f"received more than {MAX_NOTICES} rejections of FIN, REQ or TOUCH at once"))
        elif self.pending:
            reply = self.pending.popleft()
            reply.error = error
            if reply.wake is not None:
                reply.wake()
            if error.closes_connection:
                self.fail(error)
            elif reply.breaks:
                self.fail(ProtocolError("the server stopped reading in the middle of a batch"))
        else:
            self.fail(error)
