"""Connect non-blocking TCP sockets."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import ConnectionFailed

if TYPE_CHECKING:
    from nsqext.types import Address

make_socket = socket.socket
"""Makes sockets; the simulation of `nsqext.testing` replaces it by one of sockets in memory."""


async def connect(address: Address, timeout: float, local_host: str | None = None) -> socket.socket:
    """Return a connected, non-blocking socket with Nagle's algorithm switched off; raises ConnectionFailed.

    All addresses of the host's name are tried in turn. Each gets an equal share of the remaining time, so that one that
    does not respond leaves time for the next. ``local_host`` is the address of this host to connect from.
    """
    try:
        with anyio.fail_after(timeout):
            found = await anyio.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            return await _first(found, local_host)
    except (UnicodeError, OSError) as error:
        raise _failed(address, error, timeout) from error


def _failed(address: Address, error: UnicodeError | OSError, timeout: float) -> ConnectionFailed:
    text = f"no connection: {getattr(error, 'strerror', None) or error}"
    hint = "check that the node runs, and the address"
    if isinstance(error, TimeoutError):
        text = f"no connection within {timeout:g} s"
    elif isinstance(error, socket.gaierror) and address.listed_by is not None:
        text = (
            f"no connection: lookup {address.listed_by} lists the node {address}, whose name is unknown here: "
            f"{error.strerror or error}"
        )
        hint = "start nsqd with a -broadcast-address that this host resolves, or set address_map"
    elif isinstance(error, (UnicodeError, socket.gaierror)):
        hint = "check the host name"
    return ConnectionFailed(text, node=str(address), hint=hint)


async def _first(
    found: list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]],
    local_host: str | None,
) -> socket.socket:
    last: OSError = OSError("the name has no address")
    for tried, (family, kind, number, _, sockaddr) in enumerate(found):
        sock = make_socket(family, kind, number)
        left = anyio.current_effective_deadline() - anyio.current_time()
        try:
            if local_host is not None:
                sock.bind((local_host, 0))
            # the last one has all the remaining time, which the caller limits
            with anyio.fail_after(left / (len(found) - tried) if tried + 1 < len(found) else None):
                await _connect(sock, sockaddr)
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise last


async def _connect(sock: socket.socket, sockaddr: tuple[str, int]) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.connect(sockaddr)
    except (BlockingIOError, InterruptedError):
        await anyio.wait_writable(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None
