"""Settings of standalone servers, and what the servers do with them; their command lines are tested in `tests/cli`."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
import trustme

from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.lookupd.registration_client import RegistrationClient
from nsqext.broker.standalone import LookupdSettings, NsqdSettings, TlsFiles, make_node, run_lookupd, run_nsqd
from nsqext.errors import InvalidSetting
from tests.support import plain_http
from tests.support.blocking_client import BlockingClient, eventually, lookup
from tests.support.tables import table


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    return path


@table(
    ("policy", "demanded"),
    [
        ("require", ssl.CERT_REQUIRED),
        ("require-verify", ssl.CERT_REQUIRED),
        ("request", ssl.CERT_NONE),
        ("", ssl.CERT_NONE),
    ],
)
def test_a_client_certificate_is_demanded_by_two_policies(policy: str, demanded: ssl.VerifyMode, pem: Path) -> None:
    assert TlsFiles(pem, pem, client_auth=policy).context().verify_mode is demanded


def test_the_versions_of_tls(pem: Path) -> None:
    files = TlsFiles(pem, pem)
    assert files.context("redesigned").maximum_version is ssl.TLSVersion.TLSv1_2
    assert files.context("original").maximum_version is ssl.TLSVersion.MAXIMUM_SUPPORTED
    assert TlsFiles(pem, pem, min_version="tls1.3").context().minimum_version is ssl.TLSVersion.TLSv1_3
    with pytest.raises(InvalidSetting, match="tls-min-version='tls9' is unknown: use ssl3"):
        TlsFiles(pem, pem, min_version="tls9").context()


def test_client_certificates_are_those_of_the_given_authority(pem: Path, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    known = [TlsFiles(pem, pem, root_ca).context().get_ca_certs() for root_ca in (None, tmp_path / "ca.pem")]
    assert [len(found) for found in known] == [0, 1]


@table(
    ("required", "policy", "tls", "https_only"),
    [
        ("false", "", False, False),
        ("true", "", True, True),
        ("tcp-https", "", True, False),
        ("false", "require", True, True),
        ("tcp-https", "require", True, False),
    ],
)
def test_what_demands_tls(required: str, policy: str, tls: bool, https_only: bool, pem: Path) -> None:
    settings = NsqdSettings(NodeOptions(), tls=TlsFiles(pem, pem, client_auth=policy), tls_required=required)
    assert (settings.server_limits().tls_required, settings.https_only) == (tls, https_only)
    assert make_node(settings).options.https_only is https_only


def test_the_guard_knows_the_broadcast_address_and_further_hosts() -> None:
    node = make_node(
        NsqdSettings(NodeOptions(broadcast_address="nsqd.test"), http_guard=True, http_hosts=("other.test",))
    )
    guard = node.options.http_guard
    assert guard is not None
    refused = [bool(guard.refusal("GET", host, "", "")) for host in ("nsqd.test:1", "other.test", "evil.test")]
    assert refused == [False, False, True]
    assert make_node(NsqdSettings(NodeOptions())).options.http_guard is None


class _Listening(logging.Handler):
    """Waits for the log of a server's addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: dict[str, str] = {}
        self.complete = anyio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        kind, found, address = record.getMessage().partition(": listening on ")
        if found and not self.complete.is_set():
            self.addresses[kind] = address
            if {"TCP", "HTTP"} <= self.addresses.keys():
                self.complete.set()


@asynccontextmanager
async def _serving(server: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[dict[str, str]]:
    """Run a server; yield its addresses."""
    listening, logger = _Listening(), logging.getLogger("nsqext.broker")
    logger.addHandler(listening)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server)
            with anyio.fail_after(25):
                await listening.complete.wait()
            yield listening.addresses
            tasks.cancel_scope.cancel()
    finally:
        logger.setLevel(before)
        logger.removeHandler(listening)


async def _nodes(http: str, found: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Return the nodes of a lookup node as soon as they are these."""
    return await anyio.to_thread.run_sync(eventually, lambda: lookup(http, "/nodes")["producers"], found)


@pytest.mark.anyio
@pytest.mark.parametrize("ports", [(4150, 0), (0, 4151)])
async def test_lookup_shows_the_broadcast_ports(tmp_path: Path, pem: Path, ports: tuple[int, int]) -> None:
    async with _serving(partial(run_lookupd, LookupdSettings())) as directory:
        settings = NsqdSettings(
            NodeOptions(data_path=tmp_path),
            broadcast_ports=ports,
            lookupd_addresses=(directory["TCP"],),
            tls=TlsFiles(pem, pem),  # for TCP: no https-address
        )
        async with _serving(partial(run_nsqd, settings)) as node:
            (shown,) = await _nodes(directory["HTTP"], bool)
            own = [int(node[kind].rpartition(":")[2]) for kind in ("TCP", "HTTP")]
            assert [shown["tcp_port"], shown["http_port"]] == [port or at for port, at in zip(ports, own, strict=True)]


@pytest.mark.anyio
async def test_an_nsqd_whose_ping_is_late_is_hidden(tmp_path: Path) -> None:
    async with _serving(partial(run_lookupd, LookupdSettings(inactive_producer_timeout=0.5))) as directory:
        settings = NsqdSettings(
            NodeOptions(data_path=tmp_path), lookup_ping=3600.0, lookupd_addresses=(directory["TCP"],)
        )
        async with _serving(partial(run_nsqd, settings)):
            await _nodes(directory["HTTP"], bool)
            await _nodes(directory["HTTP"], lambda nodes: not nodes)


@pytest.mark.anyio
async def test_an_nsqd_pings_as_often_as_its_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    registering = anyio.Event()

    async def run(client: RegistrationClient) -> None:
        seen.append(client.ping_interval)
        registering.set()

    monkeypatch.setattr(RegistrationClient, "run", run)
    async with _serving(partial(run_nsqd, NsqdSettings(NodeOptions(data_path=tmp_path), lookup_ping=7.0))):
        await registering.wait()
    assert seen == [7.0]


@pytest.mark.anyio
async def test_an_nsqd_registers_at_a_lookup_node_that_is_configured_later(tmp_path: Path) -> None:
    async with (
        _serving(partial(run_lookupd, LookupdSettings())) as directory,
        _serving(partial(run_nsqd, NsqdSettings(NodeOptions(data_path=tmp_path)))) as node,
    ):
        url = f"http://{node['HTTP']}/config/nsqlookupd_tcp_addresses"
        content = f'["{directory["TCP"]}"]'.encode()
        await anyio.to_thread.run_sync(partial(httpx.put, url, content=content))
        assert len(await _nodes(directory["HTTP"], bool)) == 1

        def create() -> None:  # nsqd asks the HTTP port of lookup for the channels of a new topic
            plain_http.post(f"http://{directory['HTTP']}/channel/create?topic=topic&channel=ch")
            plain_http.post(f"http://{node['HTTP']}/topic/create?topic=topic")
            eventually(lambda: _depths(node["HTTP"]), lambda depths: depths == {"ch": 0})

        await anyio.to_thread.run_sync(create)


@pytest.mark.anyio
async def test_the_lookup_node_of_the_redesigned_generation_registers_partitions(tmp_path: Path) -> None:
    async with _serving(partial(run_lookupd, LookupdSettings(generation="redesigned"))) as directory:
        settings = NsqdSettings(
            NodeOptions(data_path=tmp_path), generation="redesigned", lookupd_addresses=(directory["TCP"],)
        )
        async with _serving(partial(run_nsqd, settings)) as node:
            await _nodes(directory["HTTP"], bool)

            def create() -> list[str]:
                with BlockingClient(node["TCP"]) as talker:
                    assert talker.ask("INTERNAL_CREATE_TOPIC topic 1") == b"OK"
                return eventually(lambda: list(lookup(directory["HTTP"], "/lookup", topic="topic")["partitions"]))

            assert await anyio.to_thread.run_sync(create) == ["1"]


@pytest.mark.anyio
async def test_an_nsqd_that_ended_has_written_its_positions_and_finds_them_again(tmp_path: Path) -> None:
    settings = NsqdSettings(NodeOptions(data_path=tmp_path))

    def publish(tcp: str) -> None:
        with BlockingClient(tcp) as talker:
            assert talker.ask("SUB topic ch") == b"OK"
            assert [talker.ask("PUB topic", body) for body in (b"one", b"two")] == [b"OK", b"OK"]
            talker.send("RDY 1")
            number, _, body = talker.message()
            assert body == b"one"
            talker.send("RDY 0")
            talker.finish(number)
            assert talker.ask("PUB topic", b"three") == b"OK"  # after the others

    async with _serving(partial(run_nsqd, settings)) as node:
        await anyio.to_thread.run_sync(publish, node["TCP"])
        with pytest.raises(InvalidSetting, match="possibly in use"):
            await run_nsqd(settings)
    async with _serving(partial(run_nsqd, settings)) as node:
        assert await anyio.to_thread.run_sync(_depths, node["HTTP"]) == {"ch": 2}


def _depths(http: str) -> dict[str, int]:
    (topic,) = lookup(http, "/stats", format="json")["topics"]
    return {channel["channel_name"]: channel["depth"] for channel in topic["channels"]}
