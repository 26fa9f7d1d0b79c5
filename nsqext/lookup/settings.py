"""What the settings of the lookup client mean; see `nsqext.transport.settings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import ssl


class LookupSettings(TypedDict, total=False):
    """Settings of the lookup client, refused with ``nsqd=``; times in seconds, sizes in bytes."""

    lookup_poll_interval: float
    """Time between two polls of a topic whose partitions all have a leader."""
    lookup_max_poll_interval: float
    """Longest interval for topics without consumers. Intervals double up to this while the topic does not change;
    errors refresh it earlier. Topics with consumers are polled every ``lookup_poll_interval``.
    """
    lookup_poll_jitter: float
    """Share by which intervals vary at random, so that clients do not poll at the same time."""
    lookup_request_timeout: float
    """Timeout of a request to a lookup node, without the wait for other requests of this client."""
    lookup_straggler_timeout: float
    """Timeout of the remaining lookup nodes after the first has returned the topic."""
    lookup_max_pause: float
    """Longest pause between two refreshes while the lookup service keeps returning a node that is not the leader."""
    lookup_max_failures: int
    """Consecutive failures after which a lookup node is queried only if the others do not find the topic."""
    lookup_retry_failed: float
    """Time after which a failed node is queried like the others again."""
    lookup_max_answer_size: int
    """Largest accepted response; concurrent responses together may have four times as many bytes."""
    lookup_max_lookup_nodes: int
    """Largest number of listed lookup nodes that are used."""
    lookup_max_nodes: int
    """Most nodes of the original NSQ used for a topic, and most nodes read from a list of all nodes."""
    lookup_max_topics: int
    """Topics that a lookup node may list; a longer list is refused."""
    lookup_max_concurrent: int
    """Topics that are looked up at the same time; others wait."""
    lookup_auth_secret: str | None
    """Bearer token of every request; never shown."""
    lookup_auth_over_http: bool
    """Send ``lookup_auth_secret`` over plain HTTP to other hosts than loopback, where it can be intercepted."""
    address_map: str | Mapping[str, str] | Callable[[str], str] | None
    """Where listed addresses are reached, for containers and tunnels. Maps ``host:port`` or ``host`` to the same, as a
    mapping or as text ``nsqd-0:4150=127.0.0.1:14150,nsqd-1=10.0.0.7``; or a function of ``host:port``. For nodes and
    lookup nodes, TCP and HTTP; other addresses stay.
    """
    node_filter: Callable[[str], bool] | None
    """Decides whether a discovered nsqd is used; called with its TCP address ``host:port``, after ``address_map``, at
    each look-up of a topic. A producer does not publish to partitions with an excluded leader: a publish to such a
    partition, by number or by key, raises `InvalidSetting`. A consumer does not receive from them; a warning names
    them. If the function raises, the error is logged and the node is used. Not for `Admin` and not with ``nsqd=``.
    """
    lookup_ca: str | ssl.SSLContext | None
    """For ``https://`` addresses, the path of a PEM file of CA certificates, or a context; None for the system's
    certificates.
    """
