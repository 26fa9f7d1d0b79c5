"""``nsqext nsqd``: replaces nsqd, original or redesigned without a cluster, with its flags."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsqext.broker.listeners import listen_early
from nsqext.cli.servers import redesigned_flags
from nsqext.cli.servers.program import check_nsqlookupd, read_program, run_program
from nsqext.errors import InvalidSetting
from nsqext.golang.flags import FlagError, parse_value

_LIMIT, _REPORTED = "limit", "reported"
# kind of each flag, whether it is a limit for clients, whether ``/config`` has it
_FLAGS: dict[str, tuple[str, ...]] = {
    "version": ("bool",),
    "config": ("str",),
    "log-level": ("str",),
    "log-prefix": ("str", _REPORTED),
    "verbose": ("bool",),
    "node-id": ("int", _REPORTED),
    "worker-id": ("switch",),
    "generation": ("str",),
    "http-guard": ("bool",),
    "http-host": ("list",),
    "https-address": ("str", _REPORTED),
    "http-address": ("str", _REPORTED),
    "tcp-address": ("str", _REPORTED),
    "auth-http-address": ("list",),
    "auth-http-request-method": ("str",),
    "broadcast-address": ("str",),
    "broadcast-tcp-port": ("int", _REPORTED),
    "broadcast-http-port": ("int", _REPORTED),
    "lookupd-tcp-address": ("list",),
    "lookup-ping-interval": ("duration",),
    "http-client-connect-timeout": ("duration", _REPORTED),
    "http-client-request-timeout": ("duration", _REPORTED),
    "topology-region": ("str", _LIMIT, _REPORTED),
    "topology-zone": ("str", _LIMIT, _REPORTED),
    "data-path": ("str",),
    "mem-queue-size": ("int",),
    "max-bytes-per-file": ("int", _REPORTED),
    "sync-every": ("int", _REPORTED),
    "sync-timeout": ("duration", _REPORTED),
    "queue-scan-worker-pool-max": ("int", _REPORTED),
    "queue-scan-selection-count": ("int", _REPORTED),
    "queue-scan-interval": ("duration",),
    "msg-timeout": ("duration", _LIMIT),
    "max-msg-timeout": ("duration", _LIMIT),
    "max-msg-size": ("int", _LIMIT),
    "max-req-timeout": ("duration", _LIMIT),
    "max-body-size": ("int", _LIMIT),
    "max-heartbeat-interval": ("duration", _LIMIT),
    "max-rdy-count": ("int", _LIMIT),
    "max-output-buffer-size": ("int", _LIMIT),
    "max-output-buffer-timeout": ("duration", _LIMIT),
    "min-output-buffer-timeout": ("duration", _LIMIT),
    "output-buffer-timeout": ("duration", _LIMIT),
    "max-channel-consumers": ("int", _LIMIT),
    "statsd-address": ("str", _REPORTED),
    "statsd-interval": ("duration", _REPORTED),
    "statsd-mem-stats": ("bool", _REPORTED),
    "statsd-prefix": ("str", _REPORTED),
    "statsd-udp-packet-size": ("int", _REPORTED),
    "statsd-exclude-ephemeral": ("bool", _REPORTED),
    "e2e-processing-latency-percentile": ("list", _REPORTED),
    "e2e-processing-latency-window-time": ("duration", _REPORTED),
    "tls-cert": ("str", _REPORTED),
    "tls-key": ("str", _REPORTED),
    "tls-client-auth-policy": ("str", _REPORTED),
    "tls-root-ca-file": ("str", _REPORTED),
    "tls-required": ("switch",),
    "tls-min-version": ("str",),
    "deflate": ("bool", _LIMIT),
    "max-deflate-level": ("int", _LIMIT),
    "snappy": ("bool", _LIMIT),
    "enable-experiment": ("list", _REPORTED),
}

FLAGS = {name: kind for name, (kind, *_) in _FLAGS.items()}
"""Flags of the original nsqd; for the redesigned nsqd see `nsqext.cli.servers.redesigned_flags.NSQD`.

``-generation``, ``-http-guard`` and ``-http-host`` exist only in this program.
"""

_NAMES = {"node-id": "id", "e2e-processing-latency-percentile": "e2e_processing_latency_percentiles"}
_TLS_REQUIRED = {"false": 0, "tcp-https": 1, "true": 2}
_TLS_VERSIONS = {"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772}
_FLUSHES_EVERY = 4  # the redesigned nsqd flushes every fourth `-sync-timeout`


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    defaults = {"tcp-address": "0.0.0.0:4150", "http-address": "0.0.0.0:4151", "https-address": "0.0.0.0:4152"}
    flags = read_program("nsqd", arguments, FLAGS, check_nsqd, defaults, redesigned_flags.NSQD)
    encrypted = flags.get("tls-cert") and flags.get("tls-key")
    listen_early(flags[name] for name in ("tcp-address", "http-address", "https-address")[: 3 if encrypted else 2])
    run_program("nsqd", flags, lambda: serve(flags))


def check_nsqd(flags: dict[str, Any]) -> None:
    """Check the command line; normalize ``tls-required``."""
    check_nsqlookupd(flags)
    if "tls-required" in flags:
        flags["tls-required"] = _tls_required(flags["tls-required"])
    if flags.get("generation", "original") != "original":
        return
    version = flags.get("tls-min-version", "")
    if version and version.lower() not in _TLS_VERSIONS:
        reason = f'unknown tlsVersionOption "{version.lower()}"'
        raise FlagError(f'invalid value "{version}" for flag -tls-min-version: {reason}')
    if "worker-id" in flags:  # the redesigned NSQ's is a number
        try:
            parse_value("bool", flags["worker-id"])
        except ValueError as error:
            raise FlagError(f'invalid boolean value "{flags["worker-id"]}" for -worker-id: {error}') from None


def _tls_required(text: str) -> str:
    word = text.lower()
    if word == "tcp-https":
        return word
    try:
        return "true" if parse_value("bool", word) else "false"
    except ValueError:
        reason = f'strconv.ParseBool: parsing "{word}": invalid syntax'
        raise FlagError(f'invalid boolean value "{text}" for -tls-required: {reason}') from None


def check_values(flags: Mapping[str, Any]) -> None:
    """Check the settings of command line and configuration file."""
    encrypted = flags.get("tls-cert") or flags.get("tls-key")
    if not encrypted and (flags.get("tls-client-auth-policy") or flags.get("tls-required", "false") != "false"):
        raise InvalidSetting("cannot require TLS client connections without TLS key and cert")
    if flags.get("generation", "original") != "original":
        return
    if not 1 <= flags.get("max-deflate-level", 6) <= 9:
        raise InvalidSetting("--max-deflate-level must be [1,9]")
    if not 0 <= flags.get("node-id", 0) < 1024:
        raise InvalidSetting("--node-id must be [0,1024)")
    if flags.get("auth-http-request-method", "get") not in ("get", "post"):
        raise InvalidSetting("--auth-http-request-method must be post or get")
    for text in flags.get("e2e-processing-latency-percentile", ()):
        try:
            sound = 0 < float(text) <= 1
        except ValueError:
            raise InvalidSetting(f"Could not parse: {text}") from None
        if not sound:
            raise InvalidSetting(f"invalid E2E processing latency percentile: {text}")


def _chosen(flags: Mapping[str, Any], members: Mapping[str, str]) -> dict[str, Any]:
    return {member: flags[name] for name, member in members.items() if name in flags}


async def serve(flags: dict[str, Any]) -> None:
    """Run nsqd with the flags of its command line until a signal ends it."""
    from nsqext.broker.engine.options import ChannelRules, NodeOptions
    from nsqext.broker.standalone import NsqdSettings, TlsFiles, run_nsqd

    check_values(flags)
    tls = None
    if flags.get("tls-cert") or flags.get("tls-key"):
        tls = TlsFiles(
            Path(flags.get("tls-cert", "")),
            Path(flags.get("tls-key", "")),
            Path(flags["tls-root-ca-file"]) if flags.get("tls-root-ca-file") else None,
            flags.get("tls-client-auth-policy", ""),
            flags.get("tls-min-version", "").lower() or "tls1.0",
        )
    node = NodeOptions(
        broadcast_address=flags.get("broadcast-address") or socket.gethostname(),
        auth_addresses=tuple(flags.get("auth-http-address", ())),
        auth_method=flags.get("auth-http-request-method", "get"),
        data_path=Path(flags.get("data-path") or "."),
        mem_queue_size=flags.get("mem-queue-size", 10_000),
        flush_interval=_FLUSHES_EVERY * flags.get("sync-timeout", 2.0),
        reported=reported(flags),
        **_chosen(flags, redesigned_flags.NODE_OPTIONS),
        rules=ChannelRules(**_chosen(flags, redesigned_flags.CHANNEL_RULES)),
    )
    settings = NsqdSettings(
        node,
        generation=flags.get("generation", "original"),
        tcp=flags["tcp-address"],
        http=flags["http-address"],
        https=flags["https-address"],
        broadcast_ports=(flags.get("broadcast-tcp-port", 0), flags.get("broadcast-http-port", 0)),
        lookupd_addresses=tuple(flags.get("lookupd-tcp-address", ())),
        lookup_ping=flags.get("lookup-ping-interval", 15.0),
        limits={name.replace("-", "_"): value for name, value in flags.items() if _LIMIT in _FLAGS.get(name, ())},
        tls=tls,
        tls_required=flags.get("tls-required", "false"),
        http_guard=flags.get("http-guard", False),
        http_hosts=tuple(flags.get("http-host", ())),
    )
    await run_nsqd(settings)


def reported(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with names and values of ``/config``; durations in nanoseconds."""
    found: dict[str, Any] = {}
    for name, (kind, *uses) in _FLAGS.items():
        value = flags.get(name)
        if _REPORTED not in uses or value is None or (name.startswith("broadcast-") and value == 0):
            continue
        if kind == "duration":
            value = round(value * 1_000_000_000)
        if name == "e2e-processing-latency-percentile":
            value = [float(text) for text in value]
        found[_NAMES.get(name, name.replace("-", "_"))] = value
    required = flags.get("tls-required", "false")
    if required == "false" and flags.get("tls-client-auth-policy"):
        required = "true"  # a client authentication policy requires TLS
    found["tls_required"] = _TLS_REQUIRED[required]
    found["tls_min_version"] = _TLS_VERSIONS.get(flags.get("tls-min-version", "").lower(), 769)
    return found
