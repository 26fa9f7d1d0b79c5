"""Open a connection: TCP, magic, IDENTIFY, TLS, compression, AUTH; then subscribe."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from nsqext.errors import ConnectionFailed, ConnectionLost, NegotiationFailed, NsqError, ProtocolError, RequestTimeout
from nsqext.errors.server import AuthRequired
from nsqext.protocol.client.commands import auth, identify
from nsqext.protocol.frames import MAGIC_V2, OK
from nsqext.protocol.identify import IdentifyRequest, Negotiated
from nsqext.transport.connection import Connection

if TYPE_CHECKING:
    from nsqext.protocol.layers import Layer
    from nsqext.protocol.tls_layer import TlsLayer
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address


_NO_RESPONSE = "is this nsqd's TCP port? If the node worked before, it is stopping, hangs or is overloaded: see its log"

make_socket = socket.socket
"""The simulation in `nsqext.testing` replaces it."""


async def connect(address: Address, timeout: float, local_host: str | None = None) -> socket.socket:
    """Return a connected, non-blocking socket without Nagle's algorithm; raises ConnectionFailed.

    All addresses of the host's name are tried in turn, each with an equal share of the remaining time.
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
    found: list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]], local_host: str | None
) -> socket.socket:
    last: OSError = OSError("the name has no address")
    for tried, (family, kind, number, _, sockaddr) in enumerate(found):
        sock = make_socket(family, kind, number)
        left = anyio.current_effective_deadline() - anyio.current_time()
        try:
            if local_host is not None:
                sock.bind((local_host, 0))
            # the caller limits the time of the last address
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


async def open_connection(
    address: Address, options: ConnectionOptions, request: IdentifyRequest | None = None
) -> tuple[Connection, Negotiated]:
    """Connect to a node and identify; return the connection and the server's response.

    Args:
        options: replace the corresponding members of ``request``.
        request: further members of IDENTIFY.

    Raises:
        ConnectionFailed: no connection within the connect timeout.
        NegotiationFailed: a requested layer is not offered, or the TLS handshake failed.
        ProtocolError: the peer is not nsqd.
        ServerError: the server refuses IDENTIFY or AUTH.

    Cancellation closes the socket.
    """
    started = anyio.current_time()
    sock = await connect(address, options.connect_timeout, options.local_host)
    with anyio.move_on_after(started + options.connect_timeout - anyio.current_time()):
        connection = Connection(
            sock, address, max_frame_size=options.max_frame_size, request_timeout=options.request_timeout
        )
        try:
            negotiated = await _negotiate(connection, options, request or IdentifyRequest())
        except NsqError as error:
            connection.close()
            reason = _reason(error, _NO_RESPONSE)
            raise reason.at(node=str(address)) from reason.__cause__
        except BaseException:
            connection.close()
            raise
        connection.heartbeat_interval = options.heartbeat_interval
        return connection, negotiated
    raise ConnectionFailed(
        f"the node accepted the connection and sent no response for {options.connect_timeout:g} s",
        node=str(address),
        hint=_NO_RESPONSE,
    )


async def subscribe(connection: Connection, command: bytes, timeout: float) -> None:
    """Subscribe, before the connection's owner calls ``tick``.

    Raises:
        ServerError: the server refuses the subscription.
        RequestTimeout: no response within the timeout.
        ConnectionLost: the connection failed.
        ProtocolError: the response is not OK; the connection is closed.

    Cancellation leaves the connection open.
    """
    verb = command.split(b" ", 1)[0].decode()
    try:
        with anyio.fail_after(timeout):
            response = await connection.request(command)
    except TimeoutError as error:
        raise RequestTimeout(f"no response to {verb} within {timeout:g} s") from error
    if response != OK:
        failure = ProtocolError(f"expected OK in response to {verb}, received {response[:80]!r}")
        connection.fail(failure)
        raise failure


def _reason(error: NsqError, hint: str) -> NsqError:
    """Return the error of a failed handshake; a lost connection becomes `ConnectionFailed`: nothing was published."""
    if not isinstance(error, (ConnectionLost, RequestTimeout)):
        return error
    if isinstance(error.__cause__, ProtocolError):
        return error.__cause__
    return ConnectionFailed(f"{error.message} during the handshake", hint=hint)


async def _negotiate(connection: Connection, options: ConnectionOptions, request: IdentifyRequest) -> Negotiated:
    context = options.tls_context()
    request = evolve(request, **options.identify_members(), tls=context is not None)
    negotiated = Negotiated.decode(await connection.request(MAGIC_V2 + identify(request.encode())))
    _check_granted(connection, request, negotiated)
    if context is not None:
        from nsqext.protocol.tls_layer import TlsLayer

        hostname = options.tls_hostname or connection.address.host
        await _start_tls(connection, TlsLayer(context, server_hostname=hostname))
    if negotiated.snappy or negotiated.deflate_level:
        from nsqext.protocol.layers import DeflateLayer, SnappyLayer

        largest = options.max_decompressed_size
        if negotiated.snappy:
            await _start_layer(connection, SnappyLayer(max_decoded=largest))
        if negotiated.deflate_level:
            await _start_layer(connection, DeflateLayer(negotiated.deflate_level, max_decoded=largest))
    connection.finish_handshake()
    await _authenticate(connection, options, negotiated)
    return negotiated


async def _start_tls(connection: Connection, layer: TlsLayer) -> None:
    """Perform the TLS handshake, and wait for the OK over TLS."""
    data = connection.protocol.take_rest()
    try:
        decoded = layer.decode(data) if data else b""
        while not layer.ready:
            decoded += layer.decode(await connection.exchange(layer.pending()))
    except ConnectionFailed as error:
        connection.write(layer.pending())
        connection.flush()
        raise NegotiationFailed(error.message, node=str(connection.address), hint=error.hint) from error.__cause__
    connection.write(layer.pending())
    connection.flush()
    connection.add_layer(layer)
    await connection.receive_unsolicited(decoded)


async def _start_layer(connection: Connection, layer: Layer) -> None:
    """Start compression, and wait for the compressed OK."""
    data = connection.protocol.take_rest()
    connection.add_layer(layer)
    await connection.receive_unsolicited(layer.decode(data))


def _check_granted(connection: Connection, request: IdentifyRequest, negotiated: Negotiated) -> None:
    node = str(connection.address)
    for name, requested, granted in (
        ("TLS", request.tls, negotiated.tls),
        ("snappy", request.snappy, negotiated.snappy),
        ("deflate", bool(request.deflate_level), bool(negotiated.deflate_level)),
    ):
        if requested and not granted:
            raise NegotiationFailed(
                f"the node does not offer {name}", node=node, hint=f"enable {name} at the node, or disable it"
            )


async def _authenticate(connection: Connection, options: ConnectionOptions, negotiated: Negotiated) -> None:
    if options.auth_secret is not None:
        await connection.request(auth(options.auth_secret.encode()))
    elif negotiated.auth_required:
        raise AuthRequired(
            "E_AUTH_FIRST", "the node requires AUTH", node=str(connection.address), hint="set auth_secret"
        )
