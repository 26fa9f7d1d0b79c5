"""The statistics of a node, as both generations report them."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from nsqext.lookup.node_stats import read_stats
from nsqext.types import Address
from tests.support.stats import NODE, channel_stats, topic_entry


def test_numbers_of_a_channel_of_both_generations() -> None:
    clients = [{"client_id": "a"}, {"client_id": "b", "desired_tag": "canary"}]
    numbers = {"depth": 10, "in_flight_count": 2, "deferred_count": 3, "delayed_queue_count": 4}
    ended = {"requeue_count": 5, "timeout_count": 6}
    topic = {
        "topic_name": "t",
        "message_count": 1,
        "channels": [{"channel_name": "ch", "clients": clients, **numbers, **ended}],
    }
    led = {**topic, "topic_partition": "0", "backend_start": 0, "backend_depth": 0}
    original, redesigned = (
        read_stats({"topics": [one]}, Address("n", 4150))["t"][0].channels["ch"] for one in (topic, led)
    )
    assert (original.lag, redesigned.lag) == (19, 14), "depth of the redesigned NSQ contains messages in flight"
    assert (original.deferred, redesigned.deferred) == (7, 7)
    assert (original.requeued, original.timed_out) == (5, 6)
    assert [client.tag for client in original.clients] == [None, "canary"]


def test_what_a_node_does_not_report_is_zero_or_empty() -> None:
    topic: dict[str, Any] = {
        "topic_name": "t",
        "message_count": 1,
        "channels": [{"channel_name": "ch", "clients": [{}]}],
    }
    (found,) = read_stats({"topics": [topic]}, Address("n", 4150))["t"]
    channel = found.channels["ch"]
    (client,) = channel.clients
    assert (channel.messages, channel.requeued, channel.timed_out, channel.dispatch, channel.replay) == (0, 0, 0, "", 0)
    assert (client.ready, client.in_flight, client.messages, client.finished, client.requeued) == (0, 0, 0, 0, 0)
    topic["channels"] = [{"channel_name": "ch", "dispatch": "key_failover"}]
    (found,) = read_stats({"topics": [topic]}, Address("n", 4150))["t"]
    assert found.channels["ch"].dispatch == "key_failover"


def test_bytes_of_a_partition_are_those_that_its_log_retains() -> None:
    (part,) = read_stats({"topics": [topic_entry("t")]}, NODE)["t"]
    assert (part.start, part.end, part.bytes) == (10, 100, 90)


def test_a_channel_lags_by_messages_that_the_node_has_not_flushed() -> None:
    """They are stored, and no channel may read them yet: what a channel has finished is unknown meanwhile."""
    for readable, lag, unreadable, finished in ((75, 3, 0, 60), (73, 5, 2, None), (80, 3, 0, 60), (None, 3, 0, 60)):
        counted = {} if readable is None else {"message_count": readable}
        channel = {"channel_name": "ch", "depth": 3, "depth_size": 40, **counted}
        (part,) = read_stats({"topics": [topic_entry("t", channel, message_count=75)]}, NODE)["t"]
        found = part.channels["ch"]
        assert (found.lag, found.unreadable, part.finished_to("ch")) == (lag, unreadable, finished)
    assert part.finished_to("other") is None
    topic = {"topic_name": "t", "message_count": 75, "channels": [{**channel, "message_count": 73}]}
    (share,) = read_stats({"topics": [topic]}, NODE)["t"]
    assert (share.channels["ch"].unreadable, share.finished_to("ch")) == (0, None), "of the original generation"


def test_a_channel_that_moved_back_has_no_unconfirmed_messages() -> None:
    assert channel_stats(depth=5, backlogs=3).unconfirmed == 2
    assert channel_stats(depth=5, backlogs=8).unconfirmed == 0


def test_a_consumer_counts_once_whatever_number_of_partitions_it_reads() -> None:
    one, other = {"client_id": "a", "hostname": "h"}, {"client_id": "b", "hostname": "h"}
    first, second = channel_stats(one, other), channel_stats(one, one)
    assert (first.consumers, second.consumers) == (2, 2), "a partition has a connection of each"
    elsewhere = [evolve(client, partition=4) for client in first.clients]
    assert evolve(first, clients=(*first.clients, *elsewhere)).consumers == 2
