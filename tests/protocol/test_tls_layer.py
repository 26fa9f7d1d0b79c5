"""The TLS layer: both roles, any chunking, refused certificates, broken peers."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable

import pytest
import trustme

from nsqext.errors import ConnectionFailed, InvalidSetting, InvalidState, ProtocolError
from nsqext.protocol.layers import DeflateLayer, Layer, SnappyLayer
from nsqext.protocol.tls_layer import TlsLayer

OK = bytes.fromhex("00000006000000004f4b")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority."""
    return trustme.CA()


@pytest.fixture(scope="module")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    """A server's context with a certificate for nsqd.test."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("nsqd.test").configure_cert(context)
    return context


@pytest.fixture
def client_context(authority: trustme.CA) -> ssl.SSLContext:
    """A client's context which trusts the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def handshake(client: TlsLayer, server: TlsLayer, step: int = 1 << 20) -> None:
    """Exchange bytes in steps of ``step`` bytes until both sides are ready."""
    for _ in range(10):
        if client.ready and server.ready:
            return
        for source, target in ((client, server), (server, client)):
            data = source.pending()
            for start in range(0, len(data), step):
                assert target.decode(data[start : start + step]) == b""
    raise AssertionError("no end of the handshake")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_tls_carries_data_both_ways(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext, version: ssl.TLSVersion, step: int
) -> None:
    client_context.maximum_version = version
    client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(server_context, server_side=True)
    assert (client.ready, server.ready, client.version) == (False, False, None)
    handshake(client, server, step)
    assert client.version == server.version == version.name.replace("_", ".")
    big = os.urandom(300_000)
    assert server.decode(client.encode(big)) == big
    assert client.decode(server.pending() + server.encode(OK)) == OK
    assert client.encode(b"") == b""


def test_data_received_with_the_last_step_of_the_handshake_is_kept(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(server_context, server_side=True)
    server.decode(client.pending())
    client.decode(server.pending())
    assert client.ready
    assert not server.ready
    assert server.decode(client.encode(b"PUB")) == b"PUB"
    assert server.ready


@pytest.mark.parametrize("inner", [DeflateLayer, SnappyLayer])
def test_compression_inside_of_tls(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext, inner: Callable[[], Layer]
) -> None:
    client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(server_context, server_side=True)
    handshake(client, server)
    packer, unpacker = inner(), inner()
    assert unpacker.decode(server.decode(client.encode(packer.encode(b"through the layers")))) == b"through the layers"


def test_a_certificate_for_another_name_is_refused(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    client, server = TlsLayer(client_context, "other.test"), TlsLayer(server_context, server_side=True)
    server.decode(client.pending())
    with pytest.raises(ConnectionFailed, match=r"Hostname mismatch.*other\.test"):
        client.decode(server.pending())
    with pytest.raises(ConnectionFailed, match="ALERT"):
        server.decode(client.pending())


def test_an_unknown_authority_is_refused(server_context: ssl.SSLContext) -> None:
    client, server = TlsLayer(ssl.create_default_context(), "nsqd.test"), TlsLayer(server_context, server_side=True)
    server.decode(client.pending())
    with pytest.raises(ConnectionFailed, match="unable to get local issuer certificate"):
        client.decode(server.pending())


def test_a_client_without_the_required_certificate_gets_an_error(
    authority: trustme.CA, client_context: ssl.SSLContext
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("nsqd.test").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(context, server_side=True)
    server.decode(client.pending())
    client.decode(server.pending())
    with pytest.raises(ConnectionFailed, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        server.decode(client.pending())
    with pytest.raises(ProtocolError, match=r"CERTIFICATE_REQUIRED.*refuses"):
        client.decode(server.pending())


def test_the_common_name_of_a_verified_certificate(authority: trustme.CA, client_context: ssl.SSLContext) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("nsqd.test").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    anonymous = TlsLayer(client_context, "nsqd.test"), TlsLayer(context, server_side=True)
    handshake(*anonymous)
    authority.issue_cert("client.test", common_name="billing").configure_cert(client_context)
    known = TlsLayer(client_context, "nsqd.test"), TlsLayer(context, server_side=True)
    handshake(*known)
    assert [server.peer_common_name for _, server in (anonymous, known)] == ["", "billing"]


def test_a_peer_without_tls_gets_an_error(client_context: ssl.SSLContext) -> None:
    client = TlsLayer(client_context, "nsqd.test")
    with pytest.raises(ConnectionFailed, match="TLS handshake failed"):
        client.decode(OK)


def test_broken_records_are_a_protocol_error(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> None:
    client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(server_context, server_side=True)
    handshake(client, server)
    record = bytearray(client.encode(b"x" * 100))
    record[-1] ^= 1
    with pytest.raises(ProtocolError, match="TLS layer cannot be read"):
        server.decode(bytes(record))


def test_close_notifies_the_peer(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> None:
    client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(server_context, server_side=True)
    assert TlsLayer(client_context, "nsqd.test").close() != b""
    handshake(client, server)
    client.decode(server.pending())
    assert server.decode(client.encode(b"last") + client.close()) == b"last"
    assert server.closed
    assert server.decode(b"more") == b""
    with pytest.raises(ProtocolError, match="TLS layer cannot be written"):
        client.encode(b"after closing")
    assert client.decode(server.close()) == b""
    assert client.closed


def test_data_and_the_end_in_any_chunks_are_read(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    data = bytes(range(256)) * 1000  # several records, and more than one read
    for step in (7, 100, 16_384, 70_000, 1 << 20):
        client, server = TlsLayer(client_context, "nsqd.test"), TlsLayer(server_context, server_side=True)
        handshake(client, server)
        sent = client.encode(data[:10]) + client.encode(data[10:])
        sent += client.close()
        received = b"".join(server.decode(sent[at : at + step]) for at in range(0, len(sent), step))
        assert received == data, step
        assert server.closed, step


def test_nothing_is_encoded_before_the_handshake(client_context: ssl.SSLContext) -> None:
    with pytest.raises(InvalidState, match="not complete"):
        TlsLayer(client_context, "nsqd.test").encode(b"PUB")


def test_a_context_without_a_name_is_an_error(client_context: ssl.SSLContext) -> None:
    with pytest.raises(InvalidSetting, match=r"no name is given: give tls_hostname"):
        TlsLayer(client_context)
    with pytest.raises(InvalidSetting, match=r"no name is given: give tls_hostname"):
        TlsLayer(client_context, "")
    with pytest.raises(InvalidSetting, match="TLS cannot be set up"):
        TlsLayer(client_context, ".bad")
