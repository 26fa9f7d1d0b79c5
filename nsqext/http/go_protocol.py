"""HTTP connections that answer malformed requests as the real servers do, whose HTTP is that of Go."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from nsqext.http.request_head import (
    BAD_REQUEST,
    MAX_HEAD,
    TOO_LARGE,
    HeadRefused,
    check_first_line,
    checked_head,
    end_of_head,
)

BROKEN_BODY = "nsqext.broken_body"
"""Key in the scope of a request whose body ended early, or had invalid chunks."""
_CLOSE = (b"connection", b"close")
_LINGER = 0.5  # seconds, as in the real servers
_SKIPPED = 256 << 10
"""Bytes of an unread body that the server reads before the next request."""


def _close_after(scope: Any) -> None:
    """Close the connection after the response to a request, and say so in its headers."""
    if _CLOSE not in scope["headers"]:
        scope["headers"].append(_CLOSE)


def closing_after_unread_body(scope: Any, receive: Any, send: Any) -> tuple[Any, Any]:
    """Return ``receive`` and ``send`` of an application; a response ahead of a long body closes the connection."""
    announced = int(dict(scope["headers"]).get(b"content-length", 0))
    if announced <= _SKIPPED:
        return receive, send
    read = False

    async def received() -> Any:
        nonlocal read
        message = await receive()
        read = read or not message.get("more_body", False)
        return message

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start" and not read:
            _close_after(scope)
        await send(message)

    return received, sent


class GoProtocol(H11Protocol):
    """A connection. Heads of requests are judged before h11 reads them, except those that follow in a pipeline."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = bytearray()
        self._line_checked = self._ended = self._refused = False

    def data_received(self, data: bytes) -> None:
        """Read the head of a request, or pass on what follows it."""
        if self._refused:
            return
        if self._head or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            try:
                data = self._read_head(data)
            except HeadRefused as refused:
                self._refuse(refused.answer)
                return
        if data:
            super().data_received(data)

    def _read_head(self, data: bytes) -> bytes:
        """Return what h11 reads, with the checked head; nothing while the head is not complete.

        A head may arrive byte by byte: only what is new is searched for its end.
        """
        seen = len(self._head)
        self._head += data
        end = end_of_head(self._head, seen)
        if (end if end >= 0 else len(self._head)) > MAX_HEAD:
            raise HeadRefused(TOO_LARGE)
        if end < 0:
            if not self._line_checked and b"\n" in data:
                check_first_line(self._head)
                self._line_checked = True
            return b""
        whole = checked_head(bytes(self._head[:end])) + bytes(self._head[end:])
        self._head.clear()
        self._line_checked = False
        return whole

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer what the client has sent, although it sends no more; True keeps the transport open until then."""
        if self._refused:
            return None
        if self._head:
            self._refuse(BAD_REQUEST)
            return None
        if self.cycle is None or self.cycle.response_started:
            return None  # a stream of events would never learn that its reader is gone
        if self.cycle.more_body:
            self._break_body(self.cycle)
        self._ended = True
        return True

    def on_response_complete(self) -> None:
        """Begin with the next request, unless there is none."""
        super().on_response_complete()
        if self._ended:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 does not accept; within a body, the handler of the request answers."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self._break_body(self.cycle)
            _close_after(self.cycle.scope)
        else:
            self._refuse(BAD_REQUEST)

    @staticmethod
    def _break_body(cycle: RequestResponseCycle) -> None:
        scope: Any = cycle.scope
        scope[BROKEN_BODY] = True
        cycle.more_body = False
        cycle.message_event.set()

    def _refuse(self, answer: bytes) -> None:
        """Answer, and close; unread bytes would reset the connection, so they are read for a while."""
        self._head.clear()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self._refused = True
            self.transport.write_eof()
            self.loop.call_later(_LINGER, self.transport.close)
        else:
            self.transport.close()
