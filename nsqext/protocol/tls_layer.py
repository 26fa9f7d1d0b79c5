"""TLS between socket and frames, without I/O, for both roles.

A separate module: loading ``ssl`` takes longer than the rest of the protocol.
"""

from __future__ import annotations

import ssl
from typing import Any

from nsqext.errors import ConnectionFailed, InvalidSetting, InvalidState, ProtocolError

_READ_SIZE = 64 * 1024  # bytes per read from the TLS connection


class TlsLayer:
    """TLS on memory buffers; raises InvalidSetting if the context checks names and no name is given.

    For the handshake, send what `pending` returns and pass received bytes to `decode`, until `ready`; its last step may
    return data.
    """

    __slots__ = ("_in", "_object", "_out", "closed", "ready")

    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None, server_side: bool = False) -> None:
        if context.check_hostname and not (server_side or server_hostname):
            # memory buffers would skip the check
            raise InvalidSetting("TLS checks the server's name, and no name is given", hint="give tls_hostname")
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        try:
            self._object = context.wrap_bio(self._in, self._out, server_side, server_hostname)
        except (ssl.SSLError, ValueError, TypeError) as error:
            raise InvalidSetting(f"TLS cannot be set up: {error}", hint="check tls and tls_hostname") from error
        self.ready: bool = False  #: the handshake is complete
        self.closed: bool = False  #: the peer announced the end
        self._handshake()

    @property
    def version(self) -> str | None:
        """For example ``TLSv1.3``; None before the handshake."""
        return self._object.version()

    @property
    def peer_common_name(self) -> str:
        """The common name in the peer's verified certificate, known after the handshake; else empty."""
        certificate: dict[str, Any] = self._object.getpeercert() or {}
        # a tuple of names, each a tuple of pairs
        names = [value for name in certificate.get("subject", ()) for key, value in name if key == "commonName"]
        return str(names[-1]) if names else ""

    def pending(self) -> bytes:
        """Remove and return the bytes to send now: handshake, key updates, or an alert after an error."""
        return self._out.read()

    def encode(self, data: bytes) -> bytes:
        """Return the pending bytes and the records for ``data``; raises `ProtocolError` if TLS failed."""
        if not self.ready:
            raise InvalidState("the TLS handshake is not complete")
        try:
            if data:
                self._object.write(data)  # a memory buffer takes all
        except ssl.SSLError as error:
            raise ProtocolError(f"the TLS layer cannot be written: {_reason(error)}") from error
        return self._out.read()

    def decode(self, data: bytes) -> bytes:
        """Return the data of complete records, or perform the next step of the handshake.

        Raises ConnectionFailed (the handshake failed, `pending` has the alert for the peer) or ProtocolError.
        """
        self._in.write(data)
        if not self.ready:
            self._handshake()
        if not self.ready or self.closed:
            return b""
        parts: list[bytes] = []
        try:
            while part := self._object.read(_READ_SIZE):
                parts.append(part)
                if not (self._in.pending or self._object.pending()):
                    return b"".join(parts)  # another read would raise SSLWantReadError, at the cost of the first one
            self.closed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.closed = True
        except ssl.SSLError as error:
            raise ProtocolError(
                f"the TLS layer cannot be read: {_reason(error)}", hint="an alert means that the peer refuses"
            ) from error
        return b"".join(parts)

    def close(self) -> bytes:
        """Return the bytes that announce the end to the peer, without waiting for its announcement."""
        if self.ready:
            try:
                self._object.unwrap()
            except ssl.SSLError:
                return self._out.read()
        return self._out.read()

    def _handshake(self) -> None:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise ConnectionFailed(
                f"the TLS handshake failed: {_reason(error)}", hint="check certificates, tls and tls_hostname"
            ) from error
        self.ready = True


def _reason(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or error.reason or str(error)
