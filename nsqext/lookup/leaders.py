"""The leaders of partitions, for requests over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.errors import PartitionUnavailable

if TYPE_CHECKING:
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address


@frozen
class Leader:
    """Addresses of the node that leads a partition."""

    tcp: Address
    http: Address


def leader_of(view: PartitionMap, partition: int) -> Leader:
    """Return the leader of a partition; raises PartitionUnavailable."""
    tcp = view.leaders.get(partition)
    if tcp is None:
        raise PartitionUnavailable.without_leader(view.topic, partition)
    http = view.http.get(tcp)
    if http is None:
        text = "lookup did not return the leader's HTTP address"
        raise PartitionUnavailable(text, topic=view.topic, partition=partition)
    return Leader(tcp, http)
