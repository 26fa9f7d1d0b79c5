"""The error that a server sends for a command."""

from __future__ import annotations

from nsqext.protocol.frames import FrameType, encode_frame


class RequestError(Exception):
    """An error that is sent to the client as an error frame."""

    def __init__(self, code: str, text: str | None = "", *, fatal: bool = True) -> None:
        super().__init__(code, text, fatal)
        self.code = code  # ``E_…`` word
        # description; the space before it is sent even if it is empty, as the redesigned server does. None for an error
        # that consists of the code.
        self.text = text
        self.fatal = fatal  # the connection is closed after the frame

    def __str__(self) -> str:
        return self.code if self.text is None or self.code == "E_BAD_PROTOCOL" else f"{self.code} {self.text}"

    def frame(self) -> bytes:
        """Return the bytes of the error frame; surrogate escapes in the text stand for bytes that are not UTF-8."""
        return encode_frame(FrameType.ERROR, str(self).encode("utf-8", "surrogateescape"))
