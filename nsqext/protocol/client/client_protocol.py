"""The client role of a connection, without I/O: bytes in; responses, messages, notices and bytes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from nsqext.errors import ConnectionLost, FrameTooLarge, NotSent, NsqError, ProtocolError, RequestTimeout, ServerError
from nsqext.errors.server import FinishFailed, RequeueFailed, TouchFailed, server_error
from nsqext.protocol.client.commands import NOP
from nsqext.protocol.frames import (
    DEFAULT_MAX_FRAME_SIZE,
    FRAME_HEAD,
    HEARTBEAT,
    TRACE_REPLY_SIZE,
    Frame,
    FrameType,
    LargeFrame,
    MessageData,
    encode_frame,
)

__all__ = ("MAX_NOTICES", "ClientProtocol", "FrameParser", "Reply")

MAX_NOTICES = 10_000
"""Most unread rejections of FIN, REQ and TOUCH; the next ends the connection."""

# plain numbers, compared in the loop over frames
_RESPONSE = int(FrameType.RESPONSE)
_ERROR = int(FrameType.ERROR)
_MESSAGE = int(FrameType.MESSAGE)
_LONE_OK = encode_frame(_RESPONSE, b"OK")
_LONE_TRACE_HEAD = encode_frame(_RESPONSE, bytes(TRACE_REPLY_SIZE))[:-TRACE_REPLY_SIZE]
_LONE_TRACE_SIZE = len(_LONE_TRACE_HEAD) + TRACE_REPLY_SIZE
_LARGE = 65536  # bytes of a frame that is read alone; below, further frames of the same read save more than copies cost
_SMALL = 4096  # bytes of a piece that is appended to another: an object would take more memory


class FrameParser:
    """Split received bytes into frames.

    Memory grows with received bytes, never with an announced size. A frame in many pieces is joined once.

    Args:
        max_frame_size: largest accepted size word, in bytes.
    """

    __slots__ = ("_max", "_need", "_pieces", "buffered", "error", "single", "splits", "wanted")

    def __init__(self, max_frame_size: int = DEFAULT_MAX_FRAME_SIZE) -> None:
        self.buffered: int = 0  #: bytes of an unfinished frame
        #: most bytes for the next read, of a large frame alone, at most twice its received bytes; 0 for any number
        self.wanted: int = 0
        self._pieces: list[bytes | bytearray] = []
        self._need = 8
        self._max = max_frame_size
        #: return a single frame per call of `feed`, because the following bytes may belong to another layer
        self.single: bool = False
        self.splits: bool = False  #: return the data of large message frames as `LargeFrame`
        #: why the stream cannot be parsed further; frames before the error have been returned
        self.error: ProtocolError | None = None

    def feed(self, data: bytes, messages: list[MessageData] | None = None) -> list[Frame]:
        """Add received bytes; return the frames that they complete.

        Never raises: invalid bytes set ``error``, and all further bytes are discarded.

        Args:
            messages: takes the data of message frames, which are then not returned: the garbage collector visits
                tuples, but not bytes.
        """
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        position, need, single = 0, 8, self.single
        if self.buffered:
            held = self.buffered + len(data)
            if held < self._need:
                self._keep(data, held)
                return frames
            if self._need > 8 and not single:
                position = self._finish(data, frames, messages)
            else:
                data = b"".join((*self._pieces, data))
                self._forget()
        end, most = len(data), self._max
        short = min(most, _LARGE) if self.splits else most
        last, unpack = end - 8, FRAME_HEAD.unpack_from
        take = None if messages is None else messages.append
        while position <= last:
            size, kind = unpack(data, position)
            stop = position + 4 + size
            if kind == _MESSAGE and take is not None and 4 <= size <= short and stop <= end:
                take(data[position + 8 : stop])
            else:
                if not (4 <= size <= most and _RESPONSE <= kind <= _MESSAGE):
                    self._fail(data[position : position + 16], size, kind)
                    return frames
                if stop > end:
                    need = stop - position
                    break
                if kind == _MESSAGE and take is not None:
                    take(LargeFrame([memoryview(data)[position + 8 : stop]], size - 4))
                else:
                    frames.append((kind, data[position + 8 : stop]))
            position = stop
            if single:
                break
        if position < end:
            self._need = need
            self._keep(data[position:] if position else data, end - position)
        return frames

    def _keep(self, data: bytes, held: int) -> None:
        """Keep bytes of an unfinished frame, of which ``held`` were received."""
        pieces = self._pieces
        if len(data) < _SMALL and pieces and type(pieces[-1]) is bytearray:
            pieces[-1] += data
        else:
            pieces.append(bytearray(data) if len(data) < _SMALL and pieces else data)
        self.buffered = held
        if self._need > _LARGE:
            self.wanted = min(self._need - held, max(held, _LARGE))

    def _forget(self) -> None:
        self._pieces.clear()
        self.buffered = self.wanted = 0

    def _finish(self, data: bytes, frames: list[Frame], messages: list[MessageData] | None) -> int:
        """Add the frame that ``data`` completes, without a copy of what follows; return where that begins."""
        pieces, end = self._pieces, self._need - self.buffered
        kind = FRAME_HEAD.unpack_from(pieces[0])[1]
        parts = [memoryview(pieces[0])[8:], *(memoryview(piece) for piece in pieces[1:]), memoryview(data)[:end]]
        if kind != _MESSAGE or messages is None:
            frames.append((kind, b"".join(parts)))
        elif self.splits and self._need - 4 > _LARGE:
            messages.append(LargeFrame(parts, self._need - 8))
        else:
            messages.append(b"".join(parts))
        self._forget()
        return end

    def take_rest(self) -> bytes:
        """Remove and return the bytes behind the last frame, for a new layer."""
        rest = b"".join(self._pieces)
        self._forget()
        return rest

    def _fail(self, start: bytes, size: int, kind: int) -> None:
        if start.startswith(b"HTTP"):
            self.error = ProtocolError(
                "the peer responds with HTTP", hint="this is an HTTP port; give the TCP address of nsqd"
            )
        elif size > self._max and kind in (_RESPONSE, _ERROR, _MESSAGE):
            self.error = FrameTooLarge(
                f"a frame of {size} bytes is larger than max_frame_size, {self._max}",
                hint="raise max_frame_size: the connection is closed, and the server sends such a message again and "
                "again; if the peer is not nsqd, correct the address",
            )
        elif not 4 <= size <= self._max:
            self.error = ProtocolError(
                f"frame size {size} is not within 4..{self._max} (the next bytes are {start!r})",
                hint="the peer may not be nsqd",
            )
        else:
            self.error = ProtocolError(f"frame type {kind} is unknown", hint="the peer may not be nsqd")


class Reply:
    """The response to a command, once received.

    Args:
        deadline: when the caller stops waiting, see `ClientProtocol.expire`.
        breaks: after an error response, the server takes the rest of a batch for commands (captured: pub_ext_on_plain).
    """

    __slots__ = ("breaks", "data", "deadline", "error", "wake")

    def __init__(self, deadline: float = inf, breaks: bool = False) -> None:
        self.deadline: float = deadline
        self.breaks: bool = breaks
        self.data: bytes | None = None  #: of the response frame
        self.error: NsqError | None = None  #: the error response, or why no response came
        self.wake: Callable[[], None] | None = None  #: called when ``data`` or ``error`` is set

    @property
    def done(self) -> bool:
        return self.data is not None or self.error is not None


class ClientProtocol:
    """Client role of a connection.

    Responses arrive in the order of commands: a queue of `Reply` objects matches them. The reply of a caller that
    stopped waiting stays in the queue, for the late response.

    Args:
        node: ``host:port``, for errors.
        max_frame_size: largest accepted frame, in bytes.
    """

    __slots__ = ("_parser", "error", "heartbeats", "node", "notices", "out", "pending")

    def __init__(self, node: str = "", max_frame_size: int = DEFAULT_MAX_FRAME_SIZE) -> None:
        self.node: str = node
        self.out: list[bytes] = []  #: bytes to send, oldest first; the transport clears them
        #: rejections of FIN, REQ and TOUCH, which are no responses; the user clears them
        self.notices: list[ServerError] = []
        self.error: NsqError | None = None  #: why the connection is unusable
        self.heartbeats: int = 0  #: received and answered
        #: of commands without response, oldest first; always the same deque
        self.pending: deque[Reply] = deque()
        self._parser = FrameParser(max_frame_size)

    @property
    def waiting(self) -> int:
        return len(self.pending)

    @property
    def wanted(self) -> int:
        """See `FrameParser.wanted`."""
        return self._parser.wanted

    def expect(self, reply: Reply) -> None:
        self.pending.append(reply)

    def split_large(self) -> None:
        """Return the data of large messages as `LargeFrame` from now on."""
        self._parser.splits = True

    def receive_data(self, data: bytes) -> list[MessageData]:
        """Parse received bytes; return the data of their messages, oldest first.

        Sets the replies, and answers heartbeats through ``out``. Never raises: check ``error``.
        """
        messages: list[MessageData] = []
        pending = self.pending
        parser = self._parser
        if (
            pending
            and not parser.buffered
            and (data == _LONE_OK or (len(data) == _LONE_TRACE_SIZE and data.startswith(_LONE_TRACE_HEAD)))
        ):
            # the response to a lone publish, without the parser's cost
            reply = pending.popleft()
            reply.data = data[8:]
            if reply.wake is not None:
                reply.wake()
            return messages
        frames = parser.feed(data, messages)
        if parser.single:
            frames = self._skip_heartbeats(frames, messages)
        for kind, payload in frames:
            if kind == _ERROR:
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

    def _skip_heartbeats(self, frames: list[Frame], messages: list[MessageData]) -> list[Frame]:
        """Answer heartbeats between frames of the handshake, which are parsed singly."""
        while frames == [(_RESPONSE, HEARTBEAT)]:
            self.heartbeats += 1
            self.out.append(NOP)
            frames = self._parser.feed(b"", messages)
        return frames

    def wake_next(self) -> None:
        """Wake the oldest pending request, whose task then reads."""
        for reply in self.pending:
            if reply.wake is not None and not reply.done:
                reply.wake()
                return

    def read_ahead(self, on: bool = True) -> None:
        """Parse all received frames; if switched off, a single frame, because a layer may follow."""
        self._parser.single = not on

    def take_rest(self) -> bytes:
        """See `FrameParser.take_rest`."""
        return self._parser.take_rest()

    def expire(self, now: float) -> int:
        """Fail expired requests; return their number."""
        expired = 0
        for reply in self.pending:
            if reply.deadline < now and not reply.done:
                expired += 1
                reply.error = RequestTimeout("no response before the deadline", node=self.node)
                if reply.wake is not None:
                    reply.wake()
        return expired

    def fail(self, error: NsqError, unsent: int = 0) -> None:
        """End the connection: all pending and further requests fail.

        With an error by which the server closes the connection, it has not read the commands behind the refused
        command: they fail with `NotSent`, as the last ``unsent`` commands do.
        """
        if self.error is None:
            self.error = error.at(node=self.node)
        unread = isinstance(self.error, ServerError)
        pending = tuple(self.pending)
        self.pending.clear()  # the same deque: further responses of this read match no request
        sent = len(pending) - unsent
        for number, reply in enumerate(pending):
            if reply.done:
                continue
            reply.error = self.loss(unread or number >= sent)
            if reply.wake is not None:
                reply.wake()

    def loss(self, unsent: bool = True) -> NsqError:
        """Return an error for a request, with the reason for the connection's end."""
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
