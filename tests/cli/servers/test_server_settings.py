"""Each flag of a server reaches the setting that it is for; the servers are not started."""

from __future__ import annotations

import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme
from attrs import evolve

from nsqext.broker import ClusterOptions
from nsqext.broker.engine.options import ChannelRules
from nsqext.broker.standalone import LookupdSettings, NsqdSettings, TlsFiles
from nsqext.cli import main
from nsqext.cli.servers import nsqlookupd, redesigned_flags
from nsqext.cli.servers.nsqd import FLAGS, check_nsqd, serve
from nsqext.cli.servers.program import read_program
from nsqext.errors import InvalidSetting


def nsqd_settings(monkeypatch: pytest.MonkeyPatch, *words: str) -> NsqdSettings:
    found: list[NsqdSettings] = []

    async def run(settings: NsqdSettings) -> None:
        found.append(settings)

    monkeypatch.setattr("nsqext.broker.standalone.run_nsqd", run)
    addresses = {"tcp-address": "h:1", "http-address": "h:2", "https-address": "h:3"}
    anyio.run(serve, read_program("nsqd", words, FLAGS, check_nsqd, addresses, redesigned_flags.NSQD))
    return found[0]


def test_the_flags_of_nsqd_are_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = "-tls-cert=c -tls-key=k -tls-root-ca-file=r -tls-client-auth-policy=require -tls-min-version=TLS1.2"
    lookup = "-broadcast-address= -broadcast-tcp-port=5 -broadcast-http-port=6 -lookup-ping-interval=7s"
    others = "-mem-queue-size=8 -auth-http-address=a:9 -auth-http-request-method=post -http-guard -http-host=x"
    found = nsqd_settings(monkeypatch, *tls.split(), *lookup.split(), *others.split(), "-lookupd-tcp-address=l:4")
    expected = NsqdSettings(
        node=found.node,
        tcp="h:1",
        http="h:2",
        https="h:3",
        broadcast_ports=(5, 6),
        lookupd_addresses=("l:4",),
        lookup_ping=7.0,
        tls=TlsFiles(Path("c"), Path("k"), Path("r"), "require", "tls1.2"),
        http_guard=True,
        http_hosts=("x",),
    )
    assert found == expected
    node = found.node
    assert (node.broadcast_address, node.mem_queue_size) == (socket.gethostname(), 8)
    assert (node.auth_addresses, node.auth_method) == (("a:9",), "post")
    with pytest.raises(InvalidSetting, match="--max-deflate-level must be"):
        nsqd_settings(monkeypatch, "-max-deflate-level=10")


def test_the_flags_of_the_redesigned_nsqd_that_change_what_clients_see(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (
        "-max-confirm-win=3",
        "-max-channel-delayed-qnum=4",
        "-max-pub-waiting-size=5",
        "-channel-ratelimit-kb=6",
    )
    times = ("-req-to-end-threshold=7s", "-ack-old-than-time=8s", "-ack-retry-cnt=9", "-msg-timeout=2")
    found = nsqd_settings(
        monkeypatch,
        "-generation=redesigned",
        *numbers,
        *times,
        "-max-message-size=10",
        "-max-output-buffer-timeout=20ms",
    )
    assert found.node.rules == ChannelRules(
        confirm_window=3, delayed_most=4, rate_limit=6, delayed_threshold=7.0, ignored_after=8.0, ignored_attempts=9
    )
    assert found.node.max_pub_waiting == 5
    assert dict(found.limits) == {"msg_timeout": 120.0, "max_msg_size": 10, "max_output_buffer_timeout": 0.02}


def test_the_limits_of_nsqd_are_those_of_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "max-msg-size max-body-size max-rdy-count max-output-buffer-size max-channel-consumers max-deflate-level"
    times = "msg-timeout max-msg-timeout max-req-timeout max-heartbeat-interval max-output-buffer-timeout"
    times += " min-output-buffer-timeout output-buffer-timeout"
    expected: dict[str, object] = {name.replace("-", "_"): number + 1 for number, name in enumerate(sizes.split())}
    words = [f"-{name}={number + 1}" for number, name in enumerate(sizes.split())]
    expected |= {name.replace("-", "_"): number + 1.0 for number, name in enumerate(times.split())}
    words += [f"-{name}={number + 1}s" for number, name in enumerate(times.split())]
    others = {"topology_region": "r", "topology_zone": "z", "deflate": False, "snappy": False}
    words += ["-topology-region=r", "-topology-zone=z", "-deflate=false", "-snappy=false"]
    assert dict(nsqd_settings(monkeypatch, *words).limits) == {**expected, **others}


def test_the_redesigned_nsqd_flushes_every_fourth_sync_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [nsqd_settings(monkeypatch, "-generation=redesigned", *words) for words in ((), ("-sync-timeout=500ms",))]
    assert [settings.node.flush_interval for settings in found] == [8.0, 2.0]


def test_the_flags_of_nsqlookupd_are_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LookupdSettings] = []
    monkeypatch.setattr("nsqext.broker.standalone.run_lookupd", found.append)
    monkeypatch.setattr(nsqlookupd, "listen_early", lambda addresses: None)
    monkeypatch.setattr(nsqlookupd, "run_program", lambda name, flags, serve: serve())
    words = "-tcp-address=h:1 -http-address=h:2 -broadcast-address=b -tombstone-lifetime=3s -http-guard -http-host=x"
    for arguments in (words.split(), ["-generation=redesigned"], ["-inactive-producer-timeout=4s"]):
        nsqlookupd.main(arguments)
    default = LookupdSettings(tcp="0.0.0.0:4160", http="0.0.0.0:4161", broadcast_address=socket.gethostname())
    assert found == [
        LookupdSettings("original", "h:1", "h:2", "b", 300.0, 3.0, True, ("x",)),
        evolve(default, generation="redesigned", inactive_producer_timeout=60.0),
        evolve(default, inactive_producer_timeout=4.0),
    ]


class _Recorded:
    """A cluster that keeps what it is given; the command ends with its last topic."""

    made: list[_Recorded]

    def __init__(self, nodes: int, **given: Any) -> None:
        self.given = {"nodes": nodes, **given}
        self.topics: dict[str, dict[str, Any]] = {}
        self.made.append(self)

    def __enter__(self) -> _Recorded:
        return self

    def __exit__(self, *_: object) -> None: ...

    def create_topic(self, name: str, **given: Any) -> None:
        if name == "end":
            raise InvalidSetting("recorded")
        self.topics[name] = given


def broker(monkeypatch: pytest.MonkeyPatch, words: str) -> _Recorded:
    _Recorded.made = []
    monkeypatch.setattr("nsqext.broker.Cluster", _Recorded)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            main(["broker", *words.split(), "--topic", "end"])
    finally:
        signal.signal(signal.SIGINT, handler)
    return _Recorded.made[0]


def test_the_options_of_the_broker_are_those_of_its_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pem = tmp_path / "both.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    lookup = "--lookupd-tcp-address h:1 --lookupd-http-address h:2 --tcp-address h:3 --http-address h:4"
    access = f"--host h --broadcast-address b --http-host x --tls-cert {pem} --tls-key {pem} --no-http-guard"
    found = broker(monkeypatch, f"--nodes 5 --lookupds 6 --lease 7 --data-path d {lookup} {access}").given
    options = found.pop("options")
    assert isinstance(options.tls, ssl.SSLContext)
    assert evolve(options, tls=None) == ClusterOptions(
        host="h",
        broadcast_address="b",
        lookupd_tcp=("h:1",),
        lookupd_http=("h:2",),
        nsqd_tcp=("h:3",),
        nsqd_http=("h:4",),
        lease=7.0,
        http_guard=False,
        http_hosts=("x",),
    )
    assert found == {"nodes": 5, "lookupds": 6, "generation": "redesigned", "data_path": Path("d")}


@pytest.mark.parametrize(("generation", "default"), [("redesigned", {"channels": ["default"]}), ("original", {})])
def test_the_broker_creates_topics_with_their_options(
    monkeypatch: pytest.MonkeyPatch, generation: str, default: dict[str, Any]
) -> None:
    words = f"--generation {generation} --topic a --topic b:channel=c,channel=d,replicas=2,partitions=3,extend,ordered"
    assert broker(monkeypatch, words).topics == {
        "a": default,
        "b": {"channels": ["c", "d"], "replicas": 2, "partitions": 3, "extend": True, "ordered": True},
    }
