"""Flags of the redesigned programs: which are accepted without effect, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nsqext.cli.servers import nsqd, nsqlookupd, redesigned_flags
from nsqext.cli.servers.nsqd import check_nsqd
from nsqext.cli.servers.program import check_nsqlookupd, read_program

# `nsqd --help` and `nsqlookupd --help` of the redesigned NSQ
_NSQD = """
ack-old-than-time ack-retry-cnt allow-ext-compatible allow-sub-ext-compatible allow-zan-test-skip alsologtostderr
auth-http-address broadcast-address broadcast-interface channel-ratelimit-kb cluster-id cluster-leadership-addresses
cluster-leadership-password cluster-leadership-root-dir cluster-leadership-username config data-path
default-commit-buf deflate e2e-processing-latency-percentile e2e-processing-latency-window-time glog_dir glog_maxsize
glog_rotate_days gverb http-address https-address kv-block-cache kv-enabled kv-max-write-buffer-number
kv-write-buffer-size log-dir log-level log_backtrace_at log_max_retention_num logtostderr lookup-ping-interval
lookupd-tcp-address max-body-size max-bytes-per-file max-channel-delayed-qnum max-commit-buf max-confirm-win
max-conn-for-client max-deflate-level max-heartbeat-interval max-message-size max-msg-size max-msg-timeout
max-output-buffer-size max-output-buffer-timeout max-pub-waiting-size max-rdy-count max-req-timeout mem-queue-size
metric-address msg-timeout pub-queue-size queue-read-buffer-size queue-scan-dirty-percent queue-scan-interval
queue-scan-refresh-interval queue-scan-selection-count queue-scan-worker-pool-max queue-topic-job-worker-pool-max
queue-write-buffer-size remote-tracer req-to-end-threshold retention-days retention-size-per-day reverse-proxy-port
rpc-port sleepms-between-log-sync-pull snappy start-as-fix-mode statsd-address statsd-interval statsd-mem-stats
statsd-prefix statsd-protocol stderrthreshold sync-every sync-timeout tcp-address tls-cert tls-client-auth-policy
tls-key tls-min-version tls-required tls-root-ca-file use-fsync verbose version vmodule worker-id
"""
_NSQLOOKUPD = """
allow-write-with-nochannels alsologtostderr balance-interval broadcast-address broadcast-interface cluster-id
cluster-leadership-addresses cluster-leadership-password cluster-leadership-root-dir cluster-leadership-username
config glog_dir glog_maxsize glog_rotate_days gverb http-address inactive-producer-timeout log-dir log-level
log_backtrace_at log_max_retention_num logtostderr metric-address nsqd-ping-timeout reverse-proxy-port rpc-port
stderrthreshold tcp-address tombstone-lifetime verbose version vmodule
"""


def _read(*arguments: str, kinds: Mapping[str, str] = nsqd.FLAGS) -> dict[str, Any]:
    check, own = (check_nsqd, redesigned_flags.NSQD)
    if kinds is nsqlookupd.FLAGS:
        check, own = (check_nsqlookupd, redesigned_flags.NSQLOOKUPD)
    return read_program("program", arguments, kinds, check, {}, own)


def test_every_flag_of_the_real_programs_is_known() -> None:
    assert set(_NSQD.split()) <= nsqd.FLAGS.keys() | redesigned_flags.NSQD.keys()
    assert set(_NSQLOOKUPD.split()) <= nsqlookupd.FLAGS.keys() | redesigned_flags.NSQLOOKUPD.keys()


@pytest.mark.parametrize("kinds", [nsqd.FLAGS, nsqlookupd.FLAGS])
def test_the_original_programs_do_not_know_them(kinds: Mapping[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _read("-metric-address=:1", kinds=kinds)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("flag provided but not defined: -metric-address\n")
    assert _read("-generation", "redesigned", "-metric-address=:1", kinds=kinds)["metric-address"] == ":1"
    assert _read("-log-level=DEBUG", kinds=kinds)["log-level"] == "DEBUG", "in capitals too"


@pytest.mark.parametrize("flag", ["-rpc-port=1", "-cluster-leadership-addresses=http://h:1"])
def test_a_flag_for_a_cluster_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _read("-generation=redesigned", flag)
    assert ended.value.code == 2
    text = "this program runs without a cluster: nsqext broker starts a cluster"
    assert capsys.readouterr().err.startswith(f"{flag.partition('=')[0]}: {text}\n")
    assert _read("-generation=redesigned", "-rpc-port=")["rpc-port"] == ""


def test_the_new_name_of_a_flag_counts(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.cfg"
    path.write_text('max_message_size = 5\nmax_msg_size = 6\nmax_confirm_win = 7\nreq_to_end_threshold = "20s"\n')
    old, new = "-max-message-size=1", "-max-msg-size=2"
    assert _read("-generation=redesigned", old, new)["max-msg-size"] == 2
    assert _read("-generation=redesigned", old, f"-config={path}")["max-msg-size"] == 1
    found = _read("-generation=redesigned", f"-config={path}")
    assert (found["max-msg-size"], found["max-confirm-win"], found["req-to-end-threshold"]) == (6, 7, 20.0)
    assert "max-confirm-win" not in _read(f"-config={path}"), "the original nsqd ignores names that it does not know"


def test_flags_without_effect_are_named() -> None:
    flags = _read("-generation=redesigned", "-use-fsync", "-kv-enabled", "-max-confirm-win=3", "-max-conn-for-client=1")
    assert redesigned_flags.given_without_effect(flags) == ["kv-enabled", "max-conn-for-client", "use-fsync"]
