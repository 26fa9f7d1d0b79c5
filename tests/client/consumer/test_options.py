"""Settings of consumers."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext import ExtFilter, Position
from nsqext.client.consumer.options import ConsumerOptions, DeliveryOptions
from nsqext.errors import InvalidInput


class _Looked:
    async def start_of(self, topic: str, channel: str, partition: int, log: object) -> None:
        """Return no position."""


@pytest.mark.parametrize(
    "members",
    [
        {"sample_rate": 100},
        {"concurrency": 0},
        {"max_in_flight_bytes": -1},
        {"key": ""},
        {"key": 5},
        {"sample_rate": 5, "ordered": True},
        {"msg_timeout": 0.5},
        {"msg_timeout": 901},
        {"partitions": ()},
        {"partitions": (-1,)},
        {"partitions": ("1",)},
        {"start_existing": True},
        {"start_existing": True, "start": _Looked()},
        {"reconnect_wait": -1},
        {"close_timeout": "long"},
        {"start_timeout": True},
        {"output_buffer_timeout": -0.1},
        {"output_buffer_timeout": 1.5},
        {"output_buffer_size": 63},
        {"output_buffer_size": 65537},
        {"output_buffer_size": 4096.0},
        {"output_buffer_timeout": 0, "output_buffer_size": 4096},
        {"sample_rate": 1.5},
        {"sample_rate": "3"},
        {"msg_timeout": "5"},
        {"start": "begin"},
        {"start": {"0": Position.earliest()}},
        {"start": {0: "earliest"}},
        {"backoff": {"mode": "off"}},
        {"connection": None},
        {"ext_filter": ExtFilter(0, "a", "b")},
        {"ext_filter": ExtFilter(5, "a", "b")},
        {"ext_filter": ExtFilter(1, "", "b")},
        {"ext_filter": ExtFilter(2, "a")},
        {"ext_filter": ExtFilter(3, "a", pairs=(("a", "b"),))},
        {"ext_filter": ExtFilter(4, "some", pairs=(("a", "b"),))},
        {"ext_filter": ExtFilter(4, "any", "b")},
        {"ext_filter": ExtFilter(4, "all", pairs=(("a", ""),))},
    ],
)
def test_invalid_settings_are_refused(members: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ConsumerOptions(**members)


@pytest.mark.parametrize("members", [{"on_lost": "shout"}, {"block_warning": -1}])
def test_invalid_delivery_options_are_refused(members: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        DeliveryOptions(**members)


def test_start_for_all_partitions_or_for_each() -> None:
    first, last = Position.earliest(), Position.latest()
    assert ConsumerOptions().start_of(0) is None
    assert ConsumerOptions(start=first).start_of(7) == first
    assert ConsumerOptions(start={1: last}).start_of(1) == last
    assert ConsumerOptions(start={1: last}).start_of(0) is None
