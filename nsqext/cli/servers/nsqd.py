"""``nsqext nsqd``: replaces the original nsqd, or a redesigned one without a cluster, with its flags."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsqext.broker.listeners import listen_early
from nsqext.cli.servers import redesigned_flags
from nsqext.cli.servers.program import read_program, run_program
from nsqext.cli.servers.startup_checks import check_nsqd, check_values

__all__ = ("FLAGS", "main", "reported")

FLAGS = {
    "version": "bool",
    "config": "str",
    "log-level": "str",
    "log-prefix": "str",
    "verbose": "bool",
    "node-id": "int",
    "worker-id": "switch",
    "generation": "str",
    "http-guard": "bool",
    "http-host": "list",
    "https-address": "str",
    "http-address": "str",
    "tcp-address": "str",
    "auth-http-address": "list",
    "auth-http-request-method": "str",
    "broadcast-address": "str",
    "broadcast-tcp-port": "int",
    "broadcast-http-port": "int",
    "lookupd-tcp-address": "list",
    "lookup-ping-interval": "duration",
    "http-client-connect-timeout": "duration",
    "http-client-request-timeout": "duration",
    "topology-region": "str",
    "topology-zone": "str",
    "data-path": "str",
    "mem-queue-size": "int",
    "max-bytes-per-file": "int",
    "sync-every": "int",
    "sync-timeout": "duration",
    "queue-scan-worker-pool-max": "int",
    "queue-scan-selection-count": "int",
    "queue-scan-interval": "duration",
    "msg-timeout": "duration",
    "max-msg-timeout": "duration",
    "max-msg-size": "int",
    "max-req-timeout": "duration",
    "max-body-size": "int",
    "max-heartbeat-interval": "duration",
    "max-rdy-count": "int",
    "max-output-buffer-size": "int",
    "max-output-buffer-timeout": "duration",
    "min-output-buffer-timeout": "duration",
    "output-buffer-timeout": "duration",
    "max-channel-consumers": "int",
    "statsd-address": "str",
    "statsd-interval": "duration",
    "statsd-mem-stats": "bool",
    "statsd-prefix": "str",
    "statsd-udp-packet-size": "int",
    "statsd-exclude-ephemeral": "bool",
    "e2e-processing-latency-percentile": "list",
    "e2e-processing-latency-window-time": "duration",
    "tls-cert": "str",
    "tls-key": "str",
    "tls-client-auth-policy": "str",
    "tls-root-ca-file": "str",
    "tls-required": "switch",
    "tls-min-version": "str",
    "deflate": "bool",
    "max-deflate-level": "int",
    "snappy": "bool",
    "enable-experiment": "list",
}
"""Flags of the original nsqd; the redesigned one has more, see `nsqext.cli.servers.redesigned_flags.NSQD`.

``-generation``, ``-http-guard`` and ``-http-host`` exist only in this program.
"""

_LIMITS = {
    "msg-timeout": "msg_timeout",
    "max-msg-timeout": "max_msg_timeout",
    "max-msg-size": "max_msg_size",
    "max-req-timeout": "max_req_timeout",
    "max-body-size": "max_body_size",
    "max-heartbeat-interval": "max_heartbeat_interval",
    "max-rdy-count": "max_rdy_count",
    "max-output-buffer-size": "max_output_buffer_size",
    "max-output-buffer-timeout": "max_output_buffer_timeout",
    "min-output-buffer-timeout": "min_output_buffer_timeout",
    "output-buffer-timeout": "output_buffer_timeout",
    "max-channel-consumers": "max_channel_consumers",
    "topology-region": "topology_region",
    "topology-zone": "topology_zone",
    "deflate": "deflate",
    "max-deflate-level": "max_deflate_level",
    "snappy": "snappy",
}

_NODE = {"max-pub-waiting-size": "max_pub_waiting"}
_RULES = {
    "ack-old-than-time": "ignored_after",
    "ack-retry-cnt": "ignored_attempts",
    "channel-ratelimit-kb": "rate_limit",
    "max-channel-delayed-qnum": "delayed_most",
    "max-confirm-win": "confirm_window",
    "req-to-end-threshold": "delayed_threshold",
}

_FLUSHES_EVERY = 4
"""The redesigned nsqd flushes every fourth ``-sync-timeout``."""


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    defaults = {"tcp-address": "0.0.0.0:4150", "http-address": "0.0.0.0:4151", "https-address": "0.0.0.0:4152"}
    flags = read_program("nsqd", arguments, FLAGS, check_nsqd, defaults, redesigned_flags.NSQD)
    encrypted = flags.get("tls-cert") and flags.get("tls-key")
    listen_early(flags[name] for name in ("tcp-address", "http-address", "https-address")[: 3 if encrypted else 2])
    run_program("nsqd", flags, lambda: _serve(flags))


async def _serve(flags: dict[str, Any]) -> None:
    from nsqext.broker.engine.options import ChannelRules
    from nsqext.broker.nsqd.options import NodeOptions
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
        reported=reported(flags, FLAGS),
        allow_ext_compatible=flags.get("allow-ext-compatible", False),
        allow_sub_ext_compatible=flags.get("allow-sub-ext-compatible", False),
        **{_NODE[name]: value for name, value in flags.items() if name in _NODE},
        rules=ChannelRules(**{_RULES[name]: value for name, value in flags.items() if name in _RULES}),
    )
    settings = NsqdSettings(
        node,
        generation=flags.get("generation", "nsq"),
        tcp=flags["tcp-address"],
        http=flags["http-address"],
        https=flags["https-address"],
        broadcast_ports=(flags.get("broadcast-tcp-port", 0), flags.get("broadcast-http-port", 0)),
        lookupd_addresses=tuple(flags.get("lookupd-tcp-address", ())),
        lookup_ping=flags.get("lookup-ping-interval", 15.0),
        limits={_LIMITS[name]: value for name, value in flags.items() if name in _LIMITS},
        tls=tls,
        tls_required=flags.get("tls-required", "false"),
        http_guard=flags.get("http-guard", False),
        http_hosts=tuple(flags.get("http-host", ())),
    )
    await run_nsqd(settings)


_NAMES = {
    "node-id": "id",
    "e2e-processing-latency-percentile": "e2e_processing_latency_percentiles",
}
_PLAIN = (
    "node-id",
    "log-prefix",
    "tcp-address",
    "http-address",
    "https-address",
    "broadcast-tcp-port",
    "broadcast-http-port",
    "http-client-connect-timeout",
    "http-client-request-timeout",
    "topology-region",
    "topology-zone",
    "max-bytes-per-file",
    "sync-every",
    "sync-timeout",
    "queue-scan-worker-pool-max",
    "queue-scan-selection-count",
    "statsd-address",
    "statsd-interval",
    "statsd-mem-stats",
    "statsd-prefix",
    "statsd-udp-packet-size",
    "statsd-exclude-ephemeral",
    "e2e-processing-latency-percentile",
    "e2e-processing-latency-window-time",
    "enable-experiment",
    "tls-cert",
    "tls-key",
    "tls-client-auth-policy",
    "tls-root-ca-file",
)
_REQUIRED = {"false": 0, "tcp-https": 1, "true": 2}
_VERSIONS = {"tls1.0": 769, "tls1.1": 770, "tls1.2": 771, "tls1.3": 772}


def reported(flags: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return options with the names and values of ``/config``; durations are in nanoseconds.

    Args:
        kinds: see `nsqext.cli.servers.flags.parse_flags`.
    """
    found: dict[str, Any] = {}
    for name in _PLAIN:
        value = flags.get(name)
        if value is None or (name.startswith("broadcast-") and value == 0):
            continue
        if kinds[name] == "duration":
            value = round(value * 1_000_000_000)  # durations are written in nanoseconds
        if name == "e2e-processing-latency-percentile":
            value = [float(text) for text in value]
        found[_NAMES.get(name, name.replace("-", "_"))] = value
    required = flags.get("tls-required", "false")
    if required == "false" and flags.get("tls-client-auth-policy"):
        required = "true"  # a client authentication policy requires TLS
    found["tls_required"] = _REQUIRED[required]
    found["tls_min_version"] = _VERSIONS.get(flags.get("tls-min-version", "").lower(), 769)
    return found
