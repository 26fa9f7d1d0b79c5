"""An nsqd or nsqlookupd as a program."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from attrs import evolve, field, frozen

from nsqext.broker.engine.storage.files import locked
from nsqext.broker.listeners import split_address
from nsqext.errors import InvalidSetting
from nsqext.protocol.server.go_format import build
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.broker.engine.options import NodeOptions
    from nsqext.broker.nsqd.node import Node
    from nsqext.http.uvicorn_server import HttpGuard

_VERSIONS = {
    "ssl3.0": ssl.TLSVersion.MINIMUM_SUPPORTED,
    "tls1.0": ssl.TLSVersion.MINIMUM_SUPPORTED,
    "tls1.1": ssl.TLSVersion.MINIMUM_SUPPORTED,
    "tls1.2": ssl.TLSVersion.TLSv1_2,
    "tls1.3": ssl.TLSVersion.TLSv1_3,
}
logger: logging.Logger = logging.getLogger("nsqext.broker")


def _is_redesigned(generation: str) -> bool:
    if generation not in ("original", "redesigned"):
        raise InvalidSetting(f"generation={generation!r} is unknown", hint='use "original" or "redesigned"')
    return generation == "redesigned"


def _limits(generation: str) -> ServerLimits:
    return ServerLimits() if generation == "redesigned" else ServerLimits.original()


def version_of(generation: str) -> str:
    """Return version and build, for ``--version``."""
    return build(_limits(generation).version)


@frozen
class TlsFiles:
    """Certificates of a server."""

    cert: Path
    key: Path
    root_ca: Path | None = None  #: authorities of client certificates
    #: ``require`` or ``require-verify`` demand a client certificate; any other text, except empty, demands TLS
    client_auth: str = ""
    min_version: str = "tls1.0"  #: for example ``tls1.2``

    def context(self, generation: str = "original") -> ssl.SSLContext:
        """Return the server's TLS context; the redesigned generation has at most TLS 1.2."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.min_version not in _VERSIONS:
            raise InvalidSetting(f"tls-min-version={self.min_version!r} is unknown", hint=f"use {', '.join(_VERSIONS)}")
        try:
            made.load_cert_chain(self.cert, self.key)
            if self.root_ca is not None:
                made.load_verify_locations(self.root_ca)
        except OSError as error:  # and SSLError
            reason = _missing_file((self.cert, self.key, self.root_ca)) or error
            raise InvalidSetting(f"failed to build TLS config - {reason}") from error
        made.minimum_version = _VERSIONS[self.min_version]
        if generation == "redesigned":
            made.maximum_version = ssl.TLSVersion.TLSv1_2
        if self.client_auth in ("require", "require-verify"):
            # Python cannot demand an unverified certificate
            made.verify_mode = ssl.CERT_REQUIRED
        return made


def _missing_file(paths: Iterable[Path | None]) -> str | None:
    """Return the original's text for the first missing file; OpenSSL does not name it."""
    for path in paths:
        if path is not None and not path.is_file():
            return f"open {path if path != Path() else ''}: no such file or directory"
    return None


@frozen
class NsqdSettings:
    """Settings of a standalone nsqd."""

    node: NodeOptions  #: except what the other settings determine
    generation: str = "original"  #: ``original`` or ``redesigned``
    tcp: str = "127.0.0.1:0"  #: ``host:port``; port 0 is a free port
    http: str = "127.0.0.1:0"
    https: str = ""  #: used with a certificate
    broadcast_ports: tuple[int, int] = (0, 0)  #: TCP and HTTP port in lookup responses; 0 for the listening ports
    lookupd_addresses: tuple[str, ...] = ()  #: their TCP side
    lookup_ping: float = 15.0  #: seconds between two PINGs
    limits: Mapping[str, Any] = field(factory=dict)  #: changed members of `ServerLimits`
    tls: TlsFiles | None = None
    tls_required: str = "false"  #: ``true``, ``false`` or ``tcp-https``
    http_guard: bool = False  #: see `nsqext.broker.options.ClusterOptions`
    http_hosts: tuple[str, ...] = ()

    @property
    def https_only(self) -> bool:
        return self.tls_required == "true" or bool(self.tls_required == "false" and self.tls and self.tls.client_auth)

    def server_limits(self) -> ServerLimits:
        _is_redesigned(self.generation)
        base = _limits(self.generation)
        required = self.tls_required != "false" or bool(self.tls and self.tls.client_auth)
        if required and self.tls is None:
            raise InvalidSetting("cannot require TLS client connections without TLS key and cert")
        return evolve(
            base, tls=self.tls is not None, tls_required=required, auth=bool(self.node.auth_addresses), **self.limits
        )


def _guard(broadcast_address: str, settings: NsqdSettings | LookupdSettings) -> HttpGuard | None:
    from nsqext.http.uvicorn_server import HttpGuard

    return HttpGuard((broadcast_address, *settings.http_hosts)) if settings.http_guard else None


def make_node(settings: NsqdSettings) -> Node:
    """Return a node with these settings, without sockets."""
    from nsqext.broker.nsqd.node import Node

    options = evolve(
        settings.node,
        limits=settings.server_limits(),
        clustered=False,
        tls=settings.tls.context(settings.generation) if settings.tls else None,
        https_only=settings.https_only,
        http_guard=_guard(settings.node.broadcast_address, settings),
    )
    node = Node("nsqd", options)
    node.switches.lookupd_addresses = list(settings.lookupd_addresses)
    return node


async def run_nsqd(settings: NsqdSettings) -> None:
    """Serve until cancelled; raises `InvalidSetting`, and `OSError` if an address cannot be bound."""
    from nsqext.broker.nsqd.server import NsqdServer

    with locked(settings.node.data_path):
        node = make_node(settings)
        node.load()
        tls = settings.tls.context(settings.generation) if settings.tls and settings.https else None
        server = NsqdServer(node, settings.tcp, settings.http, https=settings.https if tls else None, https_context=tls)
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(server.serve)
                logger.info("TCP: listening on %s", server.addresses["tcp"])
                logger.info("HTTP: listening on %s", server.addresses["http"])
                if settings.https and tls:
                    logger.info("HTTPS: listening on %s", server.addresses["https"])
                if settings.lookupd_addresses or settings.generation == "original":
                    tasks.start_soon(_register, node, settings, server.addresses["tcp"], server.addresses["http"])
                await anyio.sleep_forever()
        finally:
            for topic, partition in list(node.hosted):
                node.unhost(topic, partition)
            logger.info("NSQ: bye")


async def _register(node: Node, settings: NsqdSettings, tcp: str, http: str) -> None:
    from nsqext.broker.lookupd.registration_client import RegistrationClient

    listening = [split_address(tcp), split_address(http)]
    advertised = [
        Address(at.host, port or at.port) for at, port in zip(listening, settings.broadcast_ports, strict=True)
    ]
    redesigned = _is_redesigned(settings.generation)
    await RegistrationClient(node, advertised[0], advertised[1], settings.lookup_ping, partitions=redesigned).run()


@frozen
class LookupdSettings:
    """Settings of a standalone nsqlookupd; see `NsqdSettings`, and `nsqext.broker.options.ClusterOptions` for times."""

    generation: str = "original"  #: ``original``, or ``redesigned`` without a cluster
    tcp: str = "127.0.0.1:0"
    http: str = "127.0.0.1:0"
    broadcast_address: str = "127.0.0.1"  #: its host in the answer to IDENTIFY
    inactive_producer_timeout: float = 300.0
    tombstone_lifetime: float = 45.0
    http_guard: bool = False
    http_hosts: tuple[str, ...] = ()


async def run_lookupd(settings: LookupdSettings) -> None:
    """Serve until cancelled; raises `InvalidSetting`, and `OSError` if an address cannot be bound."""
    from nsqext.broker.listeners import listen
    from nsqext.broker.lookupd.original import OriginalLookupd, original_app, standalone_app
    from nsqext.broker.lookupd.registry import LookupTcpServer, Registry
    from nsqext.http.uvicorn_server import HttpServer

    redesigned = _is_redesigned(settings.generation)
    with listen(settings.tcp) as tcp, listen(settings.http) as http:
        addresses = [Address(*sock.getsockname()[:2]) for sock in (tcp, http)]
        registry = Registry(time.time_ns, settings.inactive_producer_timeout, settings.tombstone_lifetime)
        version = _limits(settings.generation).version
        lookupd = OriginalLookupd(registry, version, settings.broadcast_address, tcp=addresses[0], http=addresses[1])
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(LookupTcpServer(partial(lookupd.session, partitions=redesigned)).serve, tcp)
                app = standalone_app(lookupd) if redesigned else original_app(lookupd)
                await tasks.start(HttpServer(app, guard=_guard(settings.broadcast_address, settings)).serve, http)
                logger.info("TCP: listening on %s", addresses[0])
                logger.info("HTTP: listening on %s", addresses[1])
        finally:
            logger.info("NSQLOOKUPD: bye")
