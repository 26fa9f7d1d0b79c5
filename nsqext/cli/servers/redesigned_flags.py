"""Flags of the redesigned programs that differ from the original programs' flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsqext.golang.flags import FlagError

_BOTH = {
    "alsologtostderr": "bool",
    "broadcast-interface": "str",
    "cluster-id": "str",
    "cluster-leadership-addresses": "str",
    "cluster-leadership-password": "str",
    "cluster-leadership-root-dir": "str",
    "cluster-leadership-username": "str",
    "glog_dir": "str",
    "glog_maxsize": "int",
    "glog_rotate_days": "int",
    "gverb": "int",
    "log-dir": "str",
    "log-level": "int",
    "log_backtrace_at": "str",
    "log_max_retention_num": "int",
    "logtostderr": "bool",
    "metric-address": "str",
    "reverse-proxy-port": "str",
    "rpc-port": "str",
    "stderrthreshold": "str",
    "vmodule": "str",
}

NSQLOOKUPD = _BOTH | {
    "allow-write-with-nochannels": "bool",
    "balance-interval": "list",
    "nsqd-ping-timeout": "duration",
}
"""Flags of the redesigned nsqlookupd; see `nsqext.golang.flags.parse_flags`."""

NSQD = _BOTH | {
    "ack-old-than-time": "duration",
    "ack-retry-cnt": "int",
    "allow-ext-compatible": "bool",
    "allow-sub-ext-compatible": "bool",
    "allow-zan-test-skip": "bool",
    "channel-ratelimit-kb": "int",
    "default-commit-buf": "int",
    "kv-block-cache": "int",
    "kv-enabled": "bool",
    "kv-max-write-buffer-number": "int",
    "kv-write-buffer-size": "int",
    "lookup-ping-interval": "fives",
    "max-channel-delayed-qnum": "int",
    "max-commit-buf": "int",
    "max-confirm-win": "int",
    "max-conn-for-client": "int",
    "max-message-size": "int",
    "max-pub-waiting-size": "int",
    "msg-timeout": "minutes",
    "pub-queue-size": "int",
    "queue-read-buffer-size": "int",
    "queue-scan-dirty-percent": "float",
    "queue-scan-refresh-interval": "duration",
    "queue-topic-job-worker-pool-max": "int",
    "queue-write-buffer-size": "int",
    "remote-tracer": "str",
    "req-to-end-threshold": "duration",
    "retention-days": "int",
    "retention-size-per-day": "int",
    "sleepms-between-log-sync-pull": "int",
    "start-as-fix-mode": "bool",
    "statsd-interval": "minutes",
    "statsd-protocol": "str",
    "use-fsync": "bool",
    "worker-id": "int",
}
"""Flags of the redesigned nsqd."""

NODE_OPTIONS = {
    "allow-ext-compatible": "allow_ext_compatible",
    "allow-sub-ext-compatible": "allow_sub_ext_compatible",
    "max-pub-waiting-size": "max_pub_waiting",
}
"""Flags that set members of `nsqext.broker.engine.options.NodeOptions`."""
CHANNEL_RULES = {
    "ack-old-than-time": "ignored_after",
    "ack-retry-cnt": "ignored_attempts",
    "channel-ratelimit-kb": "rate_limit",
    "max-channel-delayed-qnum": "delayed_most",
    "max-confirm-win": "confirm_window",
    "req-to-end-threshold": "delayed_threshold",
}
"""Flags that set members of `nsqext.broker.engine.options.ChannelRules`."""
_READ_ANOTHER_WAY = {"log-level", "lookup-ping-interval", "msg-timeout"}
_EFFECTIVE = NODE_OPTIONS.keys() | CHANNEL_RULES.keys() | _READ_ANOTHER_WAY
_NEW_NAMES = {"max-message-size": "max-msg-size"}
_CLUSTER = ("cluster-leadership-addresses", "rpc-port")

WITHOUT_EFFECT = (NSQD.keys() | NSQLOOKUPD.keys()) - _EFFECTIVE - _NEW_NAMES.keys() - set(_CLUSTER)
"""Accepted flags without effect in this server."""


def check_alone(flags: Mapping[str, Any]) -> None:
    """Refuse flags that would make the program join a cluster."""
    for name in _CLUSTER:
        if flags.get(name):
            raise FlagError(f"-{name}: this program runs without a cluster: nsqext broker starts a cluster")


def with_new_names(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags with deprecated names replaced; new names win."""
    found = dict(flags)
    for old, new in _NEW_NAMES.items():
        if old in found:
            found.setdefault(new, found[old])
            del found[old]
    return found


def without_old_names(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of flags for configuration files: all except deprecated flags."""
    return {name: kind for name, kind in kinds.items() if name not in _NEW_NAMES}


def given_without_effect(flags: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of given flags without effect."""
    return sorted(WITHOUT_EFFECT & flags.keys())
