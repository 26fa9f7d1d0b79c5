"""Errors of requests, as servers send them."""

from __future__ import annotations

from nsqext.protocol.frames import FrameType, encode_frame

__all__ = ("RequestError",)


class RequestError(Exception):
    """An error for the client."""

    def __init__(self, code: str, text: str | None = "", *, fatal: bool = True) -> None:
        super().__init__(code, text, fatal)
        self.code = code  #: ``E_…`` word
        #: the space before it is sent even without text, as by the redesigned server; None for an error of only a code
        self.text = text
        self.fatal = fatal  #: the connection closes after the frame

    def __str__(self) -> str:
        return self.code if self.text is None or self.code == "E_BAD_PROTOCOL" else f"{self.code} {self.text}"

    def frame(self) -> bytes:
        return encode_frame(FrameType.ERROR, str(self).encode("utf-8", "surrogateescape"))
