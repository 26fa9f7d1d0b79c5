"""Other clients, from PyPI and npm, against `nsqext nsqd` and `nsqext nsqlookupd`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from attrs import frozen

from tests.support.interop_clients import node_modules_of, python_of
from tests.support.server_program import LOCAL, running

pytestmark = pytest.mark.timeout(300)  # the first test of a client installs it
CLIENTS = Path(__file__).parent / "clients"


@frozen
class Servers:
    """Addresses of the programs, and the CA of nsqd's certificate."""

    nsqd: str
    lookupd: str
    ca: str


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """An nsqlookupd, and an nsqd with TLS that registers with it."""
    folder = tmp_path_factory.mktemp("interop")
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    own.private_key_pem.write_to_path(str(folder / "key.pem"))
    with (folder / "cert.pem").open("wb") as file:
        for pem in own.cert_chain_pems:
            file.write(pem.bytes())
    tls = (f"--tls-cert={folder / 'cert.pem'}", f"--tls-key={folder / 'key.pem'}")
    with running("nsqlookupd", *LOCAL) as lookupd:
        register = (f"-lookupd-tcp-address={lookupd.address('TCP')}", "-https-address", "127.0.0.1:0")
        with running("nsqd", *LOCAL, *register, *tls, "-data-path", str(folder)) as nsqd:
            yield Servers(nsqd.address("TCP"), lookupd.address("HTTP"), str(folder / "ca.pem"))


LAYERS = ("", "tls_v1", "snappy", "deflate", "tls_v1 snappy")
MODULES = {"pynsq": "nsq", "gnsq": "gnsq", "ansq": "ansq"}


def _programs(client: str, cases: list[dict[str, object]]) -> list[list[str]]:
    """Return the programs that print a line for each case together."""
    if client == "nsqjs":
        modules = node_modules_of(client)
        return [["node", str(CLIENTS / "use_nsqjs.js"), json.dumps({**case, "modules": modules})] for case in cases]
    words = (str(CLIENTS / "each_case.py"), str(CLIENTS / f"use_{client}.py"), MODULES[client], json.dumps(cases))
    return [[python_of(client), "-W", "ignore", *words]]


@pytest.mark.parametrize("client", ["pynsq", "gnsq", "ansq", "nsqjs"])
def test_publish_consume_and_requeue(servers: Servers, client: str) -> None:
    lookupd = f"http://{servers.lookupd}" if client != "ansq" else servers.lookupd
    cases: list[dict[str, object]] = [
        {
            **{"nsqd": servers.nsqd, "lookupd": lookupd, "ca": servers.ca, "layers": layers.split(), "lookup": lookup},
            "topic": "_".join((client, *layers.split(), "lookup" if lookup else "direct")),
        }
        for layers, lookup in [*((layers, False) for layers in LAYERS if client != "ansq" or not layers), ("", True)]
    ]
    printed: list[str] = []
    for program in _programs(client, cases):
        done = subprocess.run(program, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        printed += done.stdout.splitlines()
    for case, line in zip(cases, printed, strict=True):
        seen = json.loads(line)
        assert sorted(body for body, _, _ in seen) == ["again", "again", "one", "three", "two"], case
        first, second = [(attempts, moment) for body, attempts, moment in seen if body == "again"]
        assert (first[0], second[0]) == (1, 2), case
        assert second[1] - first[1] >= 0.29, case
