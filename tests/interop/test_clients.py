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
CASES = [
    *[(client, layers, False) for client in ("pynsq", "gnsq", "nsqjs") for layers in LAYERS],
    ("ansq", "", False),
    *[(client, "", True) for client in ("pynsq", "gnsq", "ansq", "nsqjs")],
]


def _program(client: str, given: dict[str, object]) -> list[str]:
    if client == "nsqjs":
        modules = node_modules_of(client)
        return ["node", str(CLIENTS / "use_nsqjs.js"), json.dumps({**given, "modules": modules})]
    return [python_of(client), "-W", "ignore", str(CLIENTS / f"use_{client}.py"), json.dumps(given)]


@pytest.mark.parametrize(("client", "layers", "lookup"), CASES)
def test_publish_consume_and_requeue(servers: Servers, client: str, layers: str, lookup: bool) -> None:
    given = {
        "nsqd": servers.nsqd,
        "lookupd": f"http://{servers.lookupd}" if client != "ansq" else servers.lookupd,
        "ca": servers.ca,
        "layers": layers.split(),
        "lookup": lookup,
        "topic": "_".join((client, *layers.split(), "lookup" if lookup else "direct")),
    }
    done = subprocess.run(_program(client, given), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert sorted(body for body, _, _ in seen) == ["again", "again", "one", "three", "two"]
    first, second = [(attempts, moment) for body, attempts, moment in seen if body == "again"]
    assert (first[0], second[0]) == (1, 2)
    assert second[1] - first[1] >= 0.29
