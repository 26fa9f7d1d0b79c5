"""Options in ``/config`` that have no effect in this server."""

from __future__ import annotations

from typing import Any

from nsqext.protocol.server.go_format import NANOSECONDS
from nsqext.types import Address

_BOTH: dict[str, Any] = {
    "e2e_processing_latency_window_time": 600 * NANOSECONDS,
    "queue_scan_selection_count": 20,
    "statsd_interval": 60 * NANOSECONDS,
    "statsd_mem_stats": True,
    "statsd_prefix": "nsq.%s",
    "sync_every": 2500,
    **dict.fromkeys(("statsd_address", "tls_cert", "tls_client_auth_policy", "tls_key", "tls_root_ca_file"), ""),
}
_EMPTY = (
    *("broadcast_interface", "cluster_id", "cluster_leadership_addresses", "cluster_leadership_password"),
    *("cluster_leadership_root_dir", "cluster_leadership_username", "log_dir", "metric_address", "remote_tracer"),
    *("reverse_proxy_port", "rpc_port"),
)
_ZERO = (
    *("ack_old_than_time", "ack_retry_cnt", "default_commit_buf", "id", "kv_block_cache", "kv_max_write_buffer_number"),
    *("kv_write_buffer_size", "max_commit_buf", "pub_queue_size", "queue_read_buffer_size", "queue_write_buffer_size"),
    *("retention_size_per_day", "sleepms_between_log_sync_pull"),
)
REDESIGNED: dict[str, Any] = {
    **_BOTH,
    **dict.fromkeys(_EMPTY, ""),
    **dict.fromkeys(_ZERO, 0),
    **dict.fromkeys(("allow_zan_test_skip", "kv_enabled", "start_as_fix_mode", "use_fsync"), False),
    "channel_ratelimit_kb": 102_400,
    "e2e_processing_latency_percentiles": None,
    "lookup_ping_interval": 5 * NANOSECONDS,
    "queue_scan_dirty_percent": 0.25,
    "queue_scan_interval": NANOSECONDS // 2,
    "queue_scan_refresh_interval": 5 * NANOSECONDS,
    "queue_scan_worker_pool_max": 16,
    "queue_topic_job_worker_pool_max": 100,
    "retention_days": 3,
    "statsd_protocol": "udp",
}
"""With the defaults of the redesigned nsqd."""
ORIGINAL: dict[str, Any] = {
    **_BOTH,
    "e2e_processing_latency_percentiles": [],
    "enable_experiment": [],
    "http_client_connect_timeout": 2 * NANOSECONDS,
    "http_client_request_timeout": 5 * NANOSECONDS,
    "https_address": "0.0.0.0:4152",
    "log_prefix": "[nsqd] ",
    "queue_scan_worker_pool_max": 4,
    "statsd_exclude_ephemeral": False,
    "statsd_udp_packet_size": 508,
    "sync_timeout": 2 * NANOSECONDS,
    "topology_region": "",
    "topology_zone": "",
}
"""With the defaults of the original nsqd."""


def statsd_prefix(prefix: str, host: str, port: int) -> str:
    """Return the prefix with address and final dot, as the original program."""
    whole = prefix.replace("%s", str(Address(host, port)).replace(".", "_").replace(":", "_"))
    return whole if whole.endswith(".") else whole + "."
