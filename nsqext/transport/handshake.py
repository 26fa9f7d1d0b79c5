"""From nothing to a connection that takes commands: TCP, magic, IDENTIFY, TLS, compression, AUTH."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    InvalidSetting,
    NegotiationFailed,
    NsqError,
    ProtocolError,
)
from nsqext.errors.server import AuthRequired
from nsqext.protocol.client.commands import auth, identify
from nsqext.protocol.frames import MAGIC_V2
from nsqext.protocol.identify import IdentifyRequest, Negotiated
from nsqext.protocol.layers import DeflateLayer, Layer, SnappyLayer, TlsLayer
from nsqext.transport.connection import Connection
from nsqext.transport.sockets import connect

if TYPE_CHECKING:
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address

__all__ = ("open_connection", "subscribe")


async def open_connection(
    address: Address, options: ConnectionOptions, request: IdentifyRequest | None = None
) -> tuple[Connection, Negotiated]:
    """Connect to a node and identify; returns the connection and what the server granted.

    Args:
        address: the node's TCP address.
        options: how to connect.
        request: what to ask for; what ``options`` say of heartbeats, TLS and compression is put into it.

    Raises:
        ConnectionFailed: not reachable within the connect timeout.
        NegotiationFailed: a layer that was asked for is not offered, or the TLS handshake failed.
        ProtocolError: something that is not nsqd answers.
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
            reason = _reason(error)
            raise reason.at(node=str(address)) from reason.__cause__
        except BaseException:
            connection.close()
            raise
        connection.heartbeat_interval = options.heartbeat_interval
        return connection, negotiated
    raise ConnectionFailed(
        f"the node took the connection and was silent for {options.connect_timeout:g} s",
        node=str(address),
        hint="is this nsqd's TCP port?",
    )


async def subscribe(connection: Connection, command: bytes, timeout: float) -> None:
    """Send a subscribe command and wait until it is granted, while nobody looks after the connection yet.

    Args:
        connection: as `open_connection` returned it.
        command: the command.
        timeout: seconds after which a node that does not answer is given up.

    Raises:
        ServerError: the server refuses the subscription.
        ConnectionLost: the connection broke, or no answer came in time.

    Cancellation leaves the connection open.
    """
    try:
        with anyio.fail_after(timeout):
            await connection.request(command)
    except TimeoutError as error:
        verb = command.split(b" ", 1)[0].decode()
        raise ConnectionLost(f"no answer to {verb} within {timeout:g} s") from error


def _reason(error: NsqError) -> NsqError:
    """Return why a handshake failed; on a connection that was lost in it nothing was ever published."""
    if not isinstance(error, ConnectionLost):
        return error
    if isinstance(error.__cause__, ProtocolError):
        return error.__cause__
    return ConnectionFailed(f"{error.message}, before it could be used", hint="is this nsqd's TCP port?")


async def _negotiate(connection: Connection, options: ConnectionOptions, request: IdentifyRequest) -> Negotiated:
    context = options.tls_context()
    request = evolve(
        request,
        heartbeat_interval=options.heartbeat_interval,
        tls=context is not None,
        snappy=options.snappy,
        deflate_level=options.deflate_level,
    )
    negotiated = Negotiated.decode(await connection.request(MAGIC_V2 + identify(request.encode())))
    _check_granted(connection, request, negotiated)
    if context is not None:
        hostname = options.tls_hostname or connection.address.host
        await _start_tls(connection, TlsLayer(context, server_hostname=hostname))
    if negotiated.snappy:
        await _start_layer(connection, SnappyLayer())
    if negotiated.deflate_level:
        await _start_layer(connection, DeflateLayer(negotiated.deflate_level))
    connection.finish_handshake()
    await _authenticate(connection, options, negotiated)
    return negotiated


async def _start_tls(connection: Connection, layer: TlsLayer) -> None:
    """Go through the TLS handshake, and wait for the OK that the server sends inside it."""
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
    await connection.receive_answer(decoded)


async def _start_layer(connection: Connection, layer: Layer) -> None:
    """Begin with compression, and wait for the OK that the server sends inside it."""
    data = connection.protocol.take_rest()
    connection.add_layer(layer)
    await connection.receive_answer(layer.decode(data))


def _check_granted(connection: Connection, request: IdentifyRequest, negotiated: Negotiated) -> None:
    node = str(connection.address)
    for name, asked, granted in (
        ("TLS", request.tls, negotiated.tls),
        ("snappy", request.snappy, negotiated.snappy),
        ("deflate", bool(request.deflate_level), bool(negotiated.deflate_level)),
    ):
        if asked and not granted:
            raise NegotiationFailed(
                f"the node does not offer {name}", node=node, hint=f"switch {name} on there, or off here"
            )


async def _authenticate(connection: Connection, options: ConnectionOptions, negotiated: Negotiated) -> None:
    if options.auth_secret is not None:
        if not options.auth_secret:
            raise InvalidSetting("auth_secret is empty")
        await connection.request(auth(options.auth_secret.encode()))
    elif negotiated.auth_required:
        raise AuthRequired("E_AUTH_FIRST", "the node wants AUTH", node=str(connection.address), hint="give auth_secret")
