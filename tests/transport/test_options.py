"""Settings of a connection: invalid values are refused, and secrets are not shown."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from nsqext.errors import InvalidSetting
from nsqext.transport.options import ConnectionOptions


@pytest.mark.parametrize(
    "wrong",
    [
        {"connect_timeout": 0},
        {"request_timeout": -1.0},
        {"connect_timeout": float("nan")},
        {"heartbeat_interval": 0.1},
        {"heartbeat_interval": 61},
        {"deflate_level": 10},
        {"max_frame_size": 0},
        {"max_decompressed_size": 0},
        {"snappy": True, "deflate_level": 6},
        {"auth_secret": ""},
        {"tls": 5},
        {"tls_hostname": "node.example"},
    ],
)
def test_invalid_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        ConnectionOptions(**wrong)


def test_certificates_are_verified_by_default() -> None:
    own = ssl.create_default_context()
    own.check_hostname = False
    assert ConnectionOptions(tls=own).tls_context() is own
    context = ConnectionOptions(tls=True).tls_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert ConnectionOptions().tls_context() is None
    assert ConnectionOptions(tls=False).tls_context() is None


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(ConnectionOptions(auth_secret="hush"))


def test_a_file_of_ca_certificates(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(authority))
    context = ConnectionOptions(tls=str(authority)).tls_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_without_ca_certificates_is_refused_at_once(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidSetting, match=r"c\.pem' is not a file of CA certificates"):
        ConnectionOptions(tls=str(path))
