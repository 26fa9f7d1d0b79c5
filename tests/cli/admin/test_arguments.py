"""What the commands of topics, channels and nodes ask the administration client for, and print of its answers."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from nsqext import Admin
from nsqext.admin import ChannelStats, NodeStatus, TopicInfo, TopicStats
from nsqext.cli import main
from nsqext.cli.admin.channel import stopped_on
from nsqext.cli.admin.node import node_record
from nsqext.client.consumer.position import Position
from nsqext.lookup.node_stats import read_stats
from nsqext.types import Address, TopicMeta
from tests.support.stats import topic_entry
from tests.support.tables import table

_META = TopicMeta(partition_num=4, replica=2, extend_support=True)
_TOPIC = TopicInfo("orders", "redesigned", _META, leaders={}, nodes=(), channels=("billing",))
_NODE = NodeStatus(
    tcp=Address("n1", 4150),
    http=Address("n1", 4151),
    version="1.2.3",
    hostname="first",
    generation="redesigned",
    topics={"orders": (0, 2), "audit": ()},
    tombstoned=("audit",),
    reachable=True,
)

_UNCHANGED = {
    "topic": "orders",
    "replicas": None,
    "retention_days": None,
    "sync_every": None,
    "registered_channels_only": None,
}
_DEFAULTS = {
    "topic": "orders",
    "partitions": 1,
    "replicas": 1,
    "extend": False,
    "ordered": False,
    "multipart": False,
    "retention_days": None,
    "sync_every": None,
    "registered_channels_only": False,
}


def asked(monkeypatch: pytest.MonkeyPatch, line: str, **results: object) -> list[tuple[str, dict[str, Any]]]:
    """Run a command; return the methods of `Admin` that it calls, with arguments that are not the defaults."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        async def note(*arguments: object, **named: object) -> object:
            given = dict(signature.bind(*arguments, **named).arguments)
            del given["self"]
            given |= given.pop("settings", {})
            default = {one.name: one.default for one in signature.parameters.values()}
            calls.append((name, {key: value for key, value in given.items() if default.get(key, ...) != value}))
            return results.get(name)

        return note

    with monkeypatch.context() as patched:
        for name, method in inspect.getmembers(Admin, inspect.iscoroutinefunction):
            if not name.startswith("_") and name != "aclose":
                patched.setattr(Admin, name, noting(name, method))
        with pytest.raises(SystemExit) as end:
            main([*shlex.split(line), "--lookupd", "127.0.0.1:1"])
    assert not end.value.code
    return calls


@table(
    "line, call, arguments",
    [
        ("node remove n1:4150", "remove_node", {"node": "n1:4150"}),
        ("node disable-writes", "disable_writes", {}),
        ("node disable-writes --ordered-only", "disable_writes", {"ordered_only": True}),
        ("node enable-writes", "enable_writes", {}),
        ("node log-level debug", "set_log_level", {"level": "debug"}),
        ("node option n1:4150 verbose", "node_option", {"node": "n1:4150", "name": "verbose"}),
        (
            "node option n1:4150 name --set ''",
            "set_node_option",
            {"node": "n1:4150", "name": "name", "value": ""},
        ),
        ("topic delete orders", "delete_topic", {"topic": "orders"}),
        ("topic delete orders --if-exists", "delete_topic", {"topic": "orders", "missing_ok": True}),
        ("topic expand orders --partitions 8", "expand_topic", {"topic": "orders", "partitions": 8}),
        (
            "topic set orders --replicas 2 --retention-days 7 --sync-every 9 --registered-channels-only",
            "set_topic",
            {
                "topic": "orders",
                "replicas": 2,
                "retention_days": 7,
                "sync_every": 9,
                "registered_channels_only": True,
            },
        ),
        (
            "topic set orders --replicas 2",
            "set_topic",
            _UNCHANGED | {"replicas": 2},
        ),
        (
            "topic set orders --any-channel",
            "set_topic",
            _UNCHANGED | {"registered_channels_only": False},
        ),
        (
            "topic move orders 1 n1:4150 n2:4150",
            "move_partition",
            {"topic": "orders", "partition": 1, "source": "n1:4150", "target": "n2:4150"},
        ),
        ("topic trace orders", "trace_topic", {"topic": "orders"}),
        (
            "topic trace orders --channel billing --off",
            "trace_topic",
            {"topic": "orders", "channel": "billing", "enabled": False},
        ),
        ("topic tombstone orders n1:4151", "tombstone", {"topic": "orders", "node": "n1:4151"}),
        (
            "topic tombstone orders n1:4151 --restore",
            "tombstone",
            {"topic": "orders", "node": "n1:4151", "restore": True},
        ),
        *(
            (f"topic {verb} orders", f"{verb}_topic", {"topic": "orders"})
            for verb in ("empty", "upgrade", "pause", "unpause")
        ),
        *(
            (f"channel {verb} orders billing", f"{verb}_channel", {"topic": "orders", "channel": "billing"})
            for verb in ("delete", "empty", "pause", "unpause", "skip", "unskip")
        ),
        (
            "channel delete orders billing --if-exists",
            "delete_channel",
            {"topic": "orders", "channel": "billing", "missing_ok": True},
        ),
        ("channel redeliver orders billing", "redeliver_unfinished", {"topic": "orders", "channel": "billing"}),
        ("channel empty-delayed orders billing", "empty_delayed", {"topic": "orders", "channel": "billing"}),
        (
            "channel deliver-delayed orders billing --within-hours 24",
            "deliver_delayed",
            {"topic": "orders", "channel": "billing", "within_hours": 24},
        ),
        (
            "channel set orders billing --unordered --rate-limit-kib 64",
            "set_channel",
            {"topic": "orders", "channel": "billing", "ordered": False, "rate_limit_kib": 64},
        ),
        (
            "channel limit-consumers orders billing 10 --address-prefix 10.0.",
            "limit_consumers",
            {"topic": "orders", "channel": "billing", "ready": 10, "address_prefix": "10.0."},
        ),
        (
            "channel finish orders billing 17",
            "finish_message",
            {"topic": "orders", "channel": "billing", "message": 17},
        ),
        (
            "channel seek orders billing message:7 --partition 1 --partition 3",
            "seek_channel",
            {"topic": "orders", "channel": "billing", "position": Position.message(7), "partitions": [1, 3]},
        ),
    ],
)
def test_a_change_passes_its_arguments(
    line: str,
    call: str,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(monkeypatch, f"{line} --yes") == [(call, arguments)]
    assert capsys.readouterr().out


@table(
    "options, wanted, channels",
    [
        ("", {}, []),
        ("--channel a --channel b", {}, ["a", "b"]),
        (
            "--partitions 4 --replicas 2 --extend --ordered --multipart --retention-days 7 --sync-every 9 --wait 3",
            {
                "partitions": 4,
                "replicas": 2,
                "extend": True,
                "ordered": True,
                "multipart": True,
                "retention_days": 7,
                "sync_every": 9,
                "wait": 3.0,
            },
            [],
        ),
        ("--if-not-exists", {"exist_ok": True}, []),
    ],
)
def test_a_topic_is_created_with_its_options(
    options: str, wanted: dict[str, Any], channels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = asked(monkeypatch, f"topic create orders {options}", topic=_TOPIC, nodes=(_NODE,))
    created = [arguments for name, arguments in calls if name == "create_topic"]
    assert created == [_DEFAULTS | wanted]
    assert [one["channel"] for name, one in calls if name == "create_channel"] == channels


def test_a_channel_is_created_with_the_header_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "channel create orders carts other --dispatch key_failover --key-header cart"
    calls = asked(monkeypatch, line, channels=())
    options = {"topic": "orders", "dispatch": "key_failover", "key_header": "cart"}
    assert calls[1:] == [("create_channel", {**options, "channel": name}) for name in ("carts", "other")]


def test_a_node_is_listed_with_what_lookup_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {
        "node": "n1:4150",
        "http": "n1:4151",
        "generation": "redesigned",
        "version": "1.2.3",
        "hostname": "first",
        "reachable": True,
        "topics": 2,
        "tombstoned": ["audit"],
    }
    assert node_record(_NODE) == record
    assert node_record(evolve(_NODE, http=None))["http"] is None
    asked(monkeypatch, "node list --json", nodes=(_NODE,))
    assert json.loads(capsys.readouterr().out) == record


@table("value, shown", [("a text", "a text"), (False, "false"), ([1, 2], "[1,2]")])
def test_an_option_of_a_node_is_shown_as_json_or_text(
    value: object, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    asked(monkeypatch, "node option n1:4150 name", node_option=value)
    assert f"name of n1:4150 is {shown}\n" in capsys.readouterr().out


def test_a_topic_that_could_not_get_its_channels_is_not_created(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        asked(monkeypatch, "topic create orders --wait 0")
    assert "--wait 0: channels are created once the topic accepts publishes" in capsys.readouterr().err


def test_an_access_needs_a_topic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        asked(monkeypatch, "lookup --access w")
    assert "--access without a topic would be ignored" in capsys.readouterr().err


def test_topics_are_listed_with_partitions_without_a_leader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    whole = evolve(_TOPIC, name="audit", leaders=dict.fromkeys(range(4), _NODE.tcp))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for topics, shown in (({"audit": whole}, False), ({"audit": whole, "orders": _TOPIC}, True)):
        asked(monkeypatch, "topic list", topics=topics)
        assert ("leaderless" in capsys.readouterr().out) == shown


def test_a_channel_that_no_node_has_opened_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"depth": 1, "in_flight": 2, "deferred": 3, "messages": 4, "requeued": 5, "timed_out": 6, "lag": 7}
    channel = ChannelStats("billing", **counts, paused=False, skipped=False, clients=())
    stats = TopicStats("orders", "redesigned", (), {"billing": channel})
    asked(monkeypatch, "channel list orders --json", stats=stats, channels=("billing", "later"))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert {name: first[name] for name in ("topic", "channel", *counts)} == {
        "topic": "orders",
        "channel": "billing",
        **counts,
    }
    assert {name: value for name, value in second.items() if value is not None} == {
        "topic": "orders",
        "channel": "later",
    }


@pytest.mark.parametrize(("paused", "expected"), [((), {}), ((1,), {"paused_on": [1]}), ((0, 1), {})])
def test_partitions_are_named_where_a_channel_is_paused_in_part(paused: tuple[int, ...], expected: object) -> None:
    reports = [
        topic_entry("orders", {"channel_name": "billing", "paused": number in paused}, topic_partition=str(number))
        for number in range(2)
    ]
    parts = read_stats({"topics": reports}, _NODE.tcp)["orders"]
    assert stopped_on(TopicStats("orders", "redesigned", tuple(parts)), "billing") == expected
