"""The output buffer settings that a subscription requests."""

from __future__ import annotations

import pytest

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, TopicMeta

REDESIGNED, ORIGINAL = 0, -1


def asked(options: ConsumerOptions, partition: int) -> tuple[int | None, float | None]:
    """Return size and timeout in IDENTIFY."""
    plan = SubscribeRequest("orders", "ch", partition, Address("127.0.0.1", 4150), TopicMeta(), None, options)
    request = plan.identify()
    return request.output_buffer_size, request.output_buffer_timeout


@pytest.mark.parametrize(
    ("timeout", "partition", "wanted"),
    [
        (None, REDESIGNED, (None, None)),
        (None, ORIGINAL, (None, None)),
        (0, REDESIGNED, (-1, None)),
        (0, ORIGINAL, (-1, None)),
        (0.001, REDESIGNED, (None, 0.01)),
        (0.001, ORIGINAL, (None, 0.025)),
        (0.2, REDESIGNED, (None, 0.2)),
        (0.2, ORIGINAL, (None, 0.2)),
    ],
)
def test_the_time_that_messages_wait_at_the_server(
    timeout: float | None, partition: int, wanted: tuple[int | None, float | None]
) -> None:
    assert asked(ConsumerOptions(output_buffer_timeout=timeout), partition) == wanted


def test_by_default_messages_wait_the_shortest_time_of_servers_with_a_buffer() -> None:
    assert asked(ConsumerOptions(), REDESIGNED) == (None, 0.01)
    assert asked(ConsumerOptions(), ORIGINAL) == (None, 0.025)


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_the_size_of_the_buffer(timeout: float | None) -> None:
    options = ConsumerOptions(output_buffer_timeout=timeout, output_buffer_size=65536)
    assert asked(options, REDESIGNED) == (65536, timeout)


@pytest.mark.parametrize("connection", [ConnectionOptions(snappy=True), ConnectionOptions(deflate_level=6)])
def test_compression_is_never_without_a_timer(connection: ConnectionOptions) -> None:
    options = ConsumerOptions(output_buffer_timeout=0, connection=connection)
    assert asked(options, REDESIGNED) == (None, 0.01)
    assert asked(options, ORIGINAL) == (None, 0.025)


@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_subscription_fits_a_topic_as_long_as_its_headers_and_its_order_are_the_same(
    extend: bool, ordered: bool
) -> None:
    meta = TopicMeta(1, extend_support=True, ordered=True)
    request = SubscribeRequest("orders", "ch", 0, Address("h", 1), meta, None, ConsumerOptions())
    assert request.fits(TopicMeta(2, extend_support=extend, ordered=ordered)) == (extend and ordered)
