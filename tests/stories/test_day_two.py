"""The second day of a service at the command line: what an operator types when something has gone wrong."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from nsqext import sync
from tests.support.blocking_client import eventually
from tests.support.command_line import lines, run, started

if TYPE_CHECKING:
    from nsqext.broker import Cluster

NODES = 2
COUNT = 200


def bodies(cluster: Cluster, topic: str, channel: str) -> Counter[str]:
    """Return the bodies that a channel still has, which are finished."""
    found = lines("tail", topic, "--channel", channel, "--until-end", "--lookupd", cluster.lookupd[0])
    return Counter(one["body"] for one in found)


def test_a_backlog_is_found_saved_copied_and_mirrored(cluster: Cluster, tmp_path: Path) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    orders, copy, mirror = (f"t_{token_hex(4)}" for _ in range(3))
    cluster.create_topic(orders, partitions=2, extend=True, channels=["billing"])
    sent = Counter(f"order {number}" for number in range(COUNT))
    with sync.Producer(cluster.lookupd) as producer:
        for body in sent:
            producer.publish(orders, body.encode(), key=body)

    # which channel is behind, and a probe for it
    assert run("lag", orders, "--max", "100", *where).returncode == 1
    assert [(one["channel"], one["lag"]) for one in lines("lag", orders, *where)] == [("billing", COUNT)]
    mistyped = run("topics", "list", *where)
    assert (mistyped.returncode, b"did you mean `nsqext topic`?" in mistyped.stderr) == (2, True)
    (finding,) = (one for one in lines("doctor", *where) if one["subject"] == f"channel {orders}/billing")
    assert finding["text"] == f"has no consumer and {COUNT} waiting messages"

    # saved before anything is tried, and published again to another topic
    file = tmp_path / "orders.parquet"
    assert lines("export", orders, str(file), *where)[-1]["messages"] == COUNT
    cluster.create_topic(copy, partitions=2, extend=True, channels=["billing"])
    assert lines("import", str(file), copy, *where)[-1]["messages"] == COUNT
    assert bodies(cluster, copy, "billing") == sent

    # a standing mirror that is killed and started again
    words = ("relay", orders, "--to", mirror, "--start", "earliest", "--report", "0.1", *where)
    with started(*words) as process:
        assert process.stdout is not None
        assert any(json.loads(line).get("relayed", 0) > COUNT // 4 for line in process.stdout)
    with started(*words) as process:  # the end of the block has killed the first one
        assert process.stdout is not None
        assert b"relayed" in process.stdout.readline()
        eventually(lambda: run("lag", orders, "relay", "--max", "0", *where).returncode == 0, seconds=40.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20.0) == 0
    mirrored = bodies(cluster, mirror, "billing")
    assert set(mirrored) == set(sent)

    # the backlog itself is still there, and is handled
    assert bodies(cluster, orders, "billing") == sent
    assert run("lag", orders, "billing", "--max", "0", *where).returncode == 0
