"""Settings of a connection: what cannot be is refused, and secrets stay secret."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

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
        {"snappy": True, "deflate_level": 6},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        ConnectionOptions(**wrong)


def test_certificates_are_verified_unless_a_given_context_says_otherwise() -> None:
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
