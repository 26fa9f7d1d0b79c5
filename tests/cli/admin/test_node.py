"""`nsqext node`, and the commands that move partitions, as programs."""

from __future__ import annotations

from collections.abc import Iterator
from secrets import token_hex

import pytest

from nsqext.broker import Cluster
from tests.support.command_line import lines, run


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """A redesigned cluster of two nodes of its own."""
    with Cluster(nodes=2) as cluster:
        yield cluster


def test_a_partition_is_moved_and_a_node_is_removed(pair: Cluster) -> None:
    topic, where = f"t_{token_hex(4)}", ("--lookupd", pair.lookupd[0])
    pair.create_topic(topic, channels=["c"])
    listed = lines("node", "list", *where)
    assert [(one["reachable"], one["generation"]) for one in listed] == [(True, "redesigned")] * 2
    source = pair.nodes[pair.leader(topic, 0)].tcp
    target = next(one["node"] for one in listed if one["node"] != source)
    assert lines("topic", "move", topic, "0", source, target, "--yes", *where) == [{"topic": topic, "moved": True}]
    (shown,) = lines("topic", "show", topic, *where)
    assert shown["leaders"] == {"0": target}
    assert lines("node", "remove", target, "--yes", *where) == [{"node": target, "removing": True}]


def test_an_option_is_shown_and_changed(pair: Cluster) -> None:
    where = ("--lookupd", pair.lookupd[0])
    node = lines("node", "list", *where)[0]["node"]
    assert lines("node", "option", node, "verbose", "--set", "true", "--yes", *where) == [
        {"node": node, "option": "verbose", "value": True}
    ]
    assert lines("node", "option", node, "verbose", *where)[0]["value"] is True
    unconfirmed = run("node", "option", node, "verbose", "--set", "", *where)
    assert (unconfirmed.returncode, b"not done without a confirmation" in unconfirmed.stderr) == (2, True)
    refused = run("node", "option", node, "no_such_option", *where)
    assert (refused.returncode, b"has no option" in refused.stderr) == (2, True)


def test_a_topic_is_created_with_retention(pair: Cluster) -> None:
    topic, where = f"t_{token_hex(4)}", ("--lookupd", pair.lookupd[0])
    options = ("--retention-days", "3", "--sync-every", "100", "--registered-channels-only")
    assert lines("topic", "create", topic, *options, "--channel", "c", *where)[-1]["channel"] == "c"
    (shown,) = lines("topic", "show", topic, *where)
    assert shown["channels"] == ["c"]
