"""Options of the real servers that stand for nothing here, with the values that they have by default."""

from __future__ import annotations

from typing import Any

__all__ = ("DEFAULTS", "ORIGINAL_DEFAULTS")

_NS = 1_000_000_000

DEFAULTS: dict[str, Any] = {
    "ack_old_than_time": 0,
    "ack_retry_cnt": 0,
    "allow_zan_test_skip": False,
    "broadcast_interface": "",
    "channel_ratelimit_kb": 102_400,
    "cluster_id": "",
    "cluster_leadership_addresses": "",
    "cluster_leadership_password": "",
    "cluster_leadership_root_dir": "",
    "cluster_leadership_username": "",
    "default_commit_buf": 0,
    "e2e_processing_latency_percentiles": None,
    "e2e_processing_latency_window_time": 600 * _NS,
    "id": 0,
    "kv_block_cache": 0,
    "kv_enabled": False,
    "kv_max_write_buffer_number": 0,
    "kv_write_buffer_size": 0,
    "log_dir": "",
    "lookup_ping_interval": 5 * _NS,
    "max_commit_buf": 0,
    "max_confirm_win": 500,
    "metric_address": "",
    "pub_queue_size": 0,
    "queue_read_buffer_size": 0,
    "queue_scan_dirty_percent": 0.25,
    "queue_scan_interval": _NS // 2,
    "queue_scan_refresh_interval": 5 * _NS,
    "queue_scan_selection_count": 20,
    "queue_scan_worker_pool_max": 16,
    "queue_topic_job_worker_pool_max": 100,
    "queue_write_buffer_size": 0,
    "remote_tracer": "",
    "retention_days": 3,
    "retention_size_per_day": 0,
    "reverse_proxy_port": "",
    "rpc_port": "",
    "sleepms_between_log_sync_pull": 0,
    "start_as_fix_mode": False,
    "statsd_address": "",
    "statsd_interval": 60 * _NS,
    "statsd_mem_stats": True,
    "statsd_protocol": "udp",
    "sync_every": 2500,
    "tls_cert": "",
    "tls_client_auth_policy": "",
    "tls_key": "",
    "tls_root_ca_file": "",
    "use_fsync": False,
}
"""Of the redesigned generation."""

ORIGINAL_DEFAULTS: dict[str, Any] = {
    "e2e_processing_latency_percentiles": [],
    "e2e_processing_latency_window_time": 600 * _NS,
    "enable_experiment": [],
    "http_client_connect_timeout": 2 * _NS,
    "http_client_request_timeout": 5 * _NS,
    "https_address": "0.0.0.0:4152",
    "log_prefix": "[nsqd] ",
    "queue_scan_selection_count": 20,
    "queue_scan_worker_pool_max": 4,
    "statsd_address": "",
    "statsd_exclude_ephemeral": False,
    "statsd_interval": 60 * _NS,
    "statsd_mem_stats": True,
    "statsd_prefix": "nsq.%s",
    "statsd_udp_packet_size": 508,
    "sync_every": 2500,
    "sync_timeout": 2 * _NS,
    "tls_cert": "",
    "tls_client_auth_policy": "",
    "tls_key": "",
    "tls_root_ca_file": "",
    "topology_region": "",
    "topology_zone": "",
}
"""Of the original generation."""
