"""Options that ``/config`` of the original nsqd reports, but that have no effect in this program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ("reported",)

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
        flags: the given flags.
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
