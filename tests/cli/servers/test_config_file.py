"""Configuration files of the original programs, and settings that the programs refuse at startup."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqext.cli.servers import nsqd, nsqlookupd
from nsqext.cli.servers.nsqd import check_nsqd, check_values, reported
from nsqext.cli.servers.program import check_nsqlookupd, read_program
from nsqext.errors import InvalidSetting
from nsqext.golang.flags import FlagError, with_config_file

FILE = """
log_level = "info"
id = 7
tcp_address = "127.0.0.1:1"
nsqlookupd_tcp_addresses = ["127.0.0.1:2", "127.0.0.1:3"]
auth_http_addresses = "a:1,b:2"
mem_queue_size = "12"
max_msg_size = 34
msg_timeout = "90s"
max_req_timeout = 1500
e2e_processing_latency_percentiles = [1.0, 0.5]
tls_required = false
deflate = true
lookupd_tcp_address = "not a name of the file"
unknown = 1
"""


def _read(folder: Path, text: str, **flags: Any) -> dict[str, Any]:
    (folder / "nsqd.cfg").write_text(text)
    return with_config_file({"config": str(folder / "nsqd.cfg"), **flags}, nsqd.FLAGS)


def test_a_file_sets_what_the_command_line_does_not(tmp_path: Path) -> None:
    found = _read(tmp_path, FILE, **{"tcp-address": "127.0.0.1:9"})
    assert found.pop("config") == str(tmp_path / "nsqd.cfg")
    assert found == {
        "log-level": "info",
        "node-id": 7,
        "tcp-address": "127.0.0.1:9",
        "lookupd-tcp-address": ["127.0.0.1:2", "127.0.0.1:3"],
        "auth-http-address": ["a:1", "b:2"],
        "mem-queue-size": 12,
        "max-msg-size": 34,
        "msg-timeout": 90.0,
        "max-req-timeout": 1.5,
        "e2e-processing-latency-percentile": [1.0, 0.5],
        "tls-required": "false",
        "deflate": True,
    }


@pytest.mark.parametrize("text", ["msg_timeout = 'x'", "mem_queue_size = 1.5", "deflate = 'perhaps'", "not toml"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidSetting):
        _read(tmp_path, text)


@pytest.fixture
def restored_log() -> Iterator[None]:
    """Restore the broker's logger after a program; otherwise it would write to a closed stream."""
    log = logging.getLogger("nsqext.broker")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.mark.usefixtures("restored_log")
@pytest.mark.parametrize("name", ["nsqd", "nsqlookupd"])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("/none", "failed to load config file /none - open /none: no such file or directory"),
        ("log", "invalid value \"x\" for flag -log-level: invalid log level 'x' (debug, info, warn, error, fatal)"),
    ],
)
def test_a_missing_or_invalid_file_ends_the_program(
    name: str, file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text('log_level = "x"\n')
    module, check = (nsqd, check_nsqd) if name == "nsqd" else (nsqlookupd, check_nsqlookupd)
    with pytest.raises(SystemExit) as ended:
        read_program(name, [f"-config={tmp_path / file}"], module.FLAGS, check, {}, {})
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith(f"FATAL: {text}\n")


def test_nsqlookupd_accepts_a_file_with_a_node_id(tmp_path: Path) -> None:
    (tmp_path / "cfg").write_text('id = 5\ninactive_producer_timeout = "5s"\n')
    found = with_config_file({"config": str(tmp_path / "cfg")}, nsqlookupd.FLAGS)
    assert found["inactive-producer-timeout"] == 5.0
    assert "node-id" not in found


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"log-level": "Nope"},
            "invalid value \"Nope\" for flag -log-level: invalid log level 'Nope' (debug, info, warn, error, fatal)",
        ),
        (
            {"tls-required": "x"},
            'invalid boolean value "x" for -tls-required: strconv.ParseBool: parsing "x": invalid syntax',
        ),
        (
            {"tls-min-version": "SSL3.0"},
            'invalid value "SSL3.0" for flag -tls-min-version: unknown tlsVersionOption "ssl3.0"',
        ),
        ({"worker-id": "3"}, 'invalid boolean value "3" for -worker-id: parse error'),
    ],
)
def test_words_that_nsqd_refuses(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(FlagError) as error:
        check_nsqd(flags)
    assert str(error.value) == text


def test_the_redesigned_programs_take_numbers() -> None:
    flags = {"generation": "redesigned", "log-level": "2", "worker-id": "3", "tls-min-version": "ssl3.0"}
    check_nsqd(flags)
    check_nsqlookupd(flags)
    check_values({"generation": "redesigned", "max-deflate-level": 10})


@pytest.mark.parametrize(("given", "read"), [("1", "true"), ("F", "false"), ("TCP-HTTPS", "tcp-https")])
def test_tls_required_is_a_boolean_or_tcp_https(given: str, read: str) -> None:
    flags = {"tls-required": given}
    check_nsqd(flags)
    assert flags["tls-required"] == read


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"max-deflate-level": 10}, "--max-deflate-level must be [1,9]"),
        ({"node-id": 1024}, "--node-id must be [0,1024)"),
        ({"auth-http-request-method": "POST"}, "--auth-http-request-method must be post or get"),
        ({"e2e-processing-latency-percentile": ["0.5", "100"]}, "invalid E2E processing latency percentile: 100"),
        ({"e2e-processing-latency-percentile": ["x"]}, "Could not parse: x"),
        ({"tls-client-auth-policy": "x"}, "cannot require TLS client connections without TLS key and cert"),
        ({"tls-required": "tcp-https"}, "cannot require TLS client connections without TLS key and cert"),
    ],
)
def test_values_that_nsqd_refuses(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSetting) as error:
        check_values(flags)
    assert str(error.value) == text


def test_config_shows_the_given_flags() -> None:
    assert reported({}) == {"tls_required": 0, "tls_min_version": 769}
    flags = {
        "node-id": 5,
        "sync-timeout": 0.5,
        "broadcast-tcp-port": 0,
        "e2e-processing-latency-percentile": ["0.5"],
        "tls-client-auth-policy": "require",
        "tls-min-version": "TLS1.3",
    }
    assert reported(flags) == {
        "id": 5,
        "sync_timeout": 500_000_000,
        "e2e_processing_latency_percentiles": [0.5],
        "tls_client_auth_policy": "require",
        "tls_required": 2,
        "tls_min_version": 772,
    }
