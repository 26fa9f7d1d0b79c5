"""TLS and AUTH by transport options, on both generations."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
import trustme

from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import InvalidState, NsqError
from nsqext.errors.server import AuthFailed
from tests.support.auth_server import SECRET, auth_server

_SECONDS = 25.0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The issuer of the servers' certificate."""
    return trustme.CA()


@pytest.fixture(scope="module", params=["redesigned", "original"])
def cluster(request: pytest.FixtureRequest, authority: trustme.CA) -> Iterator[Cluster]:
    """A node that requires AUTH, and grants TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with (
        auth_server() as address,
        Cluster(1, generation=request.param, options=ClusterOptions(tls=context, auth_addresses=(address,))) as cluster,
    ):
        yield cluster


@pytest.fixture
def options(authority: trustme.CA, tmp_path: Path) -> dict[str, Any]:
    """Transport options that the servers accept."""
    certificate = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(certificate))
    return {"tls": str(certificate), "tls_hostname": "localhost", "auth_secret": SECRET}


def test_a_queue_is_consumed_through_tls_and_auth(cluster: Cluster, options: dict[str, Any], name: str) -> None:
    with kombu.Connection(f"nsq://{cluster.lookupd[0]}", transport_options=options) as connection:
        queue = connection.SimpleQueue(name)
        queue.put({"number": 1})
        message = queue.get(timeout=_SECONDS)
        assert message.payload == {"number": 1}
        message.ack()
        queue.close()


def test_a_certificate_that_is_not_trusted_is_not_tried_again(
    cluster: Cluster, options: dict[str, Any], tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    with (
        kombu.Connection(f"nsq://{cluster.lookupd[0]}", transport_options=options | {"tls": str(other)}) as connection,
        pytest.raises(InvalidState, match="certificate"),
    ):
        connection.ensure_connection(errback=lambda error, _: pytest.fail(f"tried again after {error}"))


@pytest.mark.parametrize("secret", [{"auth_secret": "wrong"}, {"auth_secret": None}], ids=["wrong", "none"])
def test_a_refused_secret_is_not_tried_again(
    cluster: Cluster, options: dict[str, Any], secret: dict[str, str | None]
) -> None:
    with kombu.Connection(f"nsq://{cluster.lookupd[0]}", transport_options=options | secret) as connection:
        tried: list[BaseException] = []
        began = time.monotonic()
        with pytest.raises(NsqError, match=r"AUTH|auth") as caught:
            connection.ensure_connection(errback=lambda error, _: tried.append(error), timeout=_SECONDS)
        assert not caught.value.retryable
        assert not tried
        assert time.monotonic() - began < _SECONDS / 2
        if secret["auth_secret"]:
            assert isinstance(caught.value, AuthFailed)
