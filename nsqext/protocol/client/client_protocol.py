"""The client role of one connection, without I/O: bytes in; replies, messages, notices and bytes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from nsqext.errors import ConnectionLost, NotSent, NsqError, ProtocolError, ServerError
from nsqext.errors.server import FinishFailed, RequeueFailed, TouchFailed, server_error
from nsqext.protocol.client.commands import NOP
from nsqext.protocol.frames import DEFAULT_MAX_FRAME_SIZE, HEARTBEAT, Frame, FrameParser, encode_frame

__all__ = ("ClientProtocol", "Reply")

_LONE_OK = encode_frame(0, b"OK")


class Reply:
    """The place for the answer to one command.

    Args:
        deadline: when whoever waits wants to wait no longer, see `ClientProtocol.expire`.
        breaks: an error frame in answer to it leaves the stream out of step (captured: pub_ext_on_plain, where the
            rest of a batch is taken for commands).

    Attributes:
        data: data of the response frame, once it is there.
        error: what came instead.
        wake: called when one of the two is set; for whoever waits.
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
        """Whether the answer is there."""
        return self.data is not None or self.error is not None


class ClientProtocol:
    """Client role of one connection.

    Replies come in the order of the commands, so a queue of `Reply` objects is all the bookkeeping there is. A caller
    that gives up leaves its place in the queue, and the late answer finds nobody.

    Args:
        node: ``host:port``, for errors.
        max_frame_size: largest frame that is accepted, in bytes.

    Attributes:
        out: bytes to be sent, oldest first; the transport takes and clears them.
        notices: errors that answer no command (FIN, REQ and TOUCH of a message that is gone); taken and cleared by the
            user.
        error: why the connection is of no use any more.
    """

    __slots__ = ("_parser", "_pending", "error", "heartbeats", "node", "notices", "out")

    def __init__(self, node: str = "", max_frame_size: int = DEFAULT_MAX_FRAME_SIZE) -> None:
        self.node: str = node
        self.out: list[bytes] = []
        self.notices: list[ServerError] = []
        self.error: NsqError | None = None
        self.heartbeats: int = 0
        self._pending: deque[Reply] = deque()
        self._parser = FrameParser(max_frame_size)

    @property
    def waiting(self) -> int:
        """Number of commands that are not answered yet."""
        return len(self._pending)

    def expect(self, reply: Reply) -> None:
        """Append a place for the answer to the command that is written next."""
        self._pending.append(reply)

    def receive_data(self, data: bytes) -> list[bytes]:
        """Take bytes of the peer; return the data of the messages in them, oldest first.

        Answers are put into their `Reply`, heartbeats are answered through ``out``. Never raises: look at ``error``.
        """
        messages: list[bytes] = []
        pending = self._pending
        parser = self._parser
        if data == _LONE_OK and pending and not parser.buffered:
            # what a producer that waits for each answer gets: nothing is cut up for it
            reply = pending.popleft()
            reply.data = b"OK"
            if reply.wake is not None:
                reply.wake()
            return messages
        frames = parser.feed(data)
        if parser.single:
            frames = self._answer_heartbeats(frames)
        for kind, payload in frames:
            if kind == 2:
                messages.append(payload)
            elif kind == 1:
                self._take_error(server_error(payload, node=self.node))
            elif payload == HEARTBEAT:
                self.heartbeats += 1
                self.out.append(NOP)
            elif pending:
                reply = pending.popleft()
                reply.data = payload
                if reply.wake is not None:
                    reply.wake()
            else:
                self.fail(ProtocolError(f"a response that nobody asked for: {payload[:80]!r}", node=self.node))
        if parser.error is not None and self.error is None:
            self.fail(parser.error)
        return messages

    def _answer_heartbeats(self, frames: list[Frame]) -> list[Frame]:
        """Read on behind heartbeats, which may come between two frames that are read one at a time."""
        while frames == [(0, HEARTBEAT)]:
            self.heartbeats += 1
            self.out.append(NOP)
            frames = self._parser.feed(b"")
        return frames

    def wake_next(self) -> None:
        """Wake the oldest that waits, so that it does the reading."""
        for reply in self._pending:
            if reply.wake is not None and not reply.done:
                reply.wake()
                return

    def read_ahead(self, on: bool = True) -> None:
        """Read all frames that have arrived; switched off, one at a time, because a layer may begin behind it."""
        self._parser.single = not on

    def take_rest(self) -> bytes:
        """Hand over bytes behind the last frame, for a layer that was just negotiated."""
        return self._parser.take_rest()

    def expire(self, now: float) -> int:
        """Let those go whose deadline has passed, and return how many; the late answers find nobody."""
        expired = 0
        for reply in self._pending:
            if reply.deadline < now and not reply.done:
                expired += 1
                reply.error = ConnectionLost("no answer came in time", node=self.node)
                if reply.wake is not None:
                    reply.wake()
        return expired

    def fail(self, error: NsqError, unsent: int = 0) -> None:
        """End the connection: everything that waits, and everything to come, gets an error.

        After an error that makes the server close, what was sent behind it was never looked at (servers read one
        command after the other), which is told apart as `NotSent`; so are the last ``unsent`` commands.
        """
        if self.error is None:
            self.error = error.at(node=self.node)
        unseen = isinstance(self.error, ServerError)
        pending = tuple(self._pending)
        self._pending.clear()  # the same deque: what else has arrived must find nobody, even within one read
        sent = len(pending) - unsent
        for number, reply in enumerate(pending):
            if reply.done:
                continue
            reply.error = self._loss(unseen or number >= sent)
            if reply.wake is not None:
                reply.wake()

    def lost(self, unseen: bool = True) -> ConnectionLost:
        """Return a new error that says why the connection is gone."""
        return self._loss(unseen)

    def _loss(self, unseen: bool) -> ConnectionLost:
        cause = self.error
        kind = NotSent if unseen else (type(cause) if isinstance(cause, ConnectionLost) else ConnectionLost)
        error = kind("the connection is closed", node=self.node)
        if cause is not None:
            error = kind(cause.message, node=self.node, hint=cause.hint)
        error.__cause__ = cause
        return error

    def _take_error(self, error: ServerError) -> None:
        if isinstance(error, (FinishFailed, RequeueFailed, TouchFailed)):
            self.notices.append(error)
        elif self._pending:
            reply = self._pending.popleft()
            reply.error = error
            if reply.wake is not None:
                reply.wake()
            if error.closes_connection:
                self.fail(error)
            elif reply.breaks:
                self.fail(ProtocolError("the server stopped reading in the middle of a batch"))
        else:
            self.fail(error)
