"""Settings of consumers."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext import ExtFilter, Position
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions, DeliveryOptions, FailureOptions
from nsqext.errors import InvalidInput
from nsqext.protocol.identify import KEY_FAILOVER


class _Looked:
    async def start_of(self, topic: str, channel: str, partition: int, log: object) -> None:
        """Return no position."""


async def _key_later(message: object) -> str:
    return "key"


INVALID: list[tuple[type, dict[str, Any]]] = [
    (ConsumerOptions, {"sample_rate": 100}),
    (ConsumerOptions, {"concurrency": 0}),
    (ConsumerOptions, {"max_in_flight_bytes": -1}),
    (ConsumerOptions, {"key": ""}),
    (ConsumerOptions, {"key": 5}),
    (ConsumerOptions, {"key": _key_later}),
    (ConsumerOptions, {"sample_rate": 5, "ordered": True}),
    (ConsumerOptions, {"msg_timeout": 0.5}),
    (ConsumerOptions, {"msg_timeout": 901}),
    (ConsumerOptions, {"partitions": ()}),
    (ConsumerOptions, {"partitions": (-1,)}),
    (ConsumerOptions, {"partitions": ("1",)}),
    (ConsumerOptions, {"start_existing": True}),
    (ConsumerOptions, {"start_existing": True, "start": _Looked()}),
    (ConsumerOptions, {"reconnect_wait": -1}),
    (ConsumerOptions, {"close_timeout": "long"}),
    (ConsumerOptions, {"start_timeout": True}),
    (ConsumerOptions, {"output_buffer_timeout": -0.1}),
    (ConsumerOptions, {"output_buffer_timeout": 1.5}),
    (ConsumerOptions, {"output_buffer_size": 63}),
    (ConsumerOptions, {"output_buffer_size": 65537}),
    (ConsumerOptions, {"output_buffer_size": 4096.0}),
    (ConsumerOptions, {"output_buffer_timeout": 0, "output_buffer_size": 4096}),
    (ConsumerOptions, {"sample_rate": 1.5}),
    (ConsumerOptions, {"sample_rate": "3"}),
    (ConsumerOptions, {"msg_timeout": "5"}),
    (ConsumerOptions, {"start": "begin"}),
    (ConsumerOptions, {"start": {"0": Position.earliest()}}),
    (ConsumerOptions, {"start": {0: "earliest"}}),
    (ConsumerOptions, {"backoff": {"mode": "off"}}),
    (ConsumerOptions, {"connection": None}),
    (ConsumerOptions, {"ext_filter": ExtFilter(0, "a", "b")}),
    (ConsumerOptions, {"ext_filter": ExtFilter(5, "a", "b")}),
    (ConsumerOptions, {"ext_filter": ExtFilter(1, "", "b")}),
    (ConsumerOptions, {"ext_filter": ExtFilter(2, "a")}),
    (ConsumerOptions, {"ext_filter": ExtFilter(3, "a", pairs=(("a", "b"),))}),
    (ConsumerOptions, {"ext_filter": ExtFilter(4, "some", pairs=(("a", "b"),))}),
    (ConsumerOptions, {"ext_filter": ExtFilter(4, "any", "b")}),
    (ConsumerOptions, {"ext_filter": ExtFilter(4, "all", pairs=(("a", ""),))}),
    (ConsumerOptions, {"tag": "no tag!"}),
    (ConsumerOptions, {"max_in_flight": 0}),
    (ConsumerOptions, {"initial_ready": 0}),
    (ConsumerOptions, {"sample_rate": -1}),
    (ConsumerOptions, {"queue_position": "yes"}),
    (ConsumerOptions, {"dispatch": "fair"}),
    (ConsumerOptions, {"dispatch": "key_failover", "ordered": True}),
    (ConsumerOptions, {"key_tags": 4}),
    (ConsumerOptions, {"key_tags": 0}),
    (ConsumerOptions, {"key_tags": -1, "dispatch": "key_failover"}),
    (ConsumerOptions, {"msg_timeout": float("nan")}),
    (ConsumerOptions, {"start": {-1: Position.earliest()}}),
    (ConsumerOptions, {"max_reconnect_wait": -1}),
    (ConsumerOptions, {"lookup_timeout": -1}),
    (ConsumerOptions, {"close_timeout": -1}),
    (DeliveryOptions, {"on_lost": "shout"}),
    (DeliveryOptions, {"block_warning": -1}),
    (DeliveryOptions, {"redelivery_wait": -1}),
    (DeliveryOptions, {"gap_wait": -1}),
    (DeliveryOptions, {"max_unpacked_bytes": -1}),
    (FailureOptions, {"reject_ordered": "yes", "max_attempts": 1}),
    (FailureOptions, {"requeue_delay": -1}),
    (FailureOptions, {"max_requeue_delay": -1}),
    (FailureOptions, {"requeue_jitter": -0.1}),
    (FailureOptions, {"requeue_jitter": 1}),
    (FailureOptions, {"requeue_jitter": "0"}),
    (ConsumerOptions, {"partitions": 3}),
    (ConsumerOptions, {"partitions": "03"}),
    (FailureOptions, {"max_attempts": -1}),
    (FailureOptions, {"max_attempts": True}),
    (FailureOptions, {"report_attempts": -1}),
    (FailureOptions, {"report_attempts": 1.5}),
    (FailureOptions, {"max_attempts": 1, "dead_letter": "no topic!"}),
    (FailureOptions, {"max_attempts": 1, "dead_letter": 5}),
    (FailureOptions, {"dead_letter": "dead"}),
    (FailureOptions, {"reject_ordered": True}),
    (BackoffOptions, {"mode": "never"}),
    (BackoffOptions, {"base": 0}),
    (BackoffOptions, {"base": "1"}),
    (BackoffOptions, {"max_wait": -1}),
    (BackoffOptions, {"max_wait": 0, "mode": "off"}),
    (BackoffOptions, {"base": 1.0, "max_wait": 1.9}),
]


def test_invalid_settings_are_refused_by_their_name() -> None:
    for kind, members in INVALID:
        with pytest.raises(InvalidInput) as caught:
            kind(**members)
        assert any(word in str(caught.value) for word in (*members, "partition ", "topic name ")), members


@pytest.mark.parametrize("name", ["redelivery_wait", "gap_wait", "settle_wait"])
def test_waits_for_the_order_of_keys_need_keys(name: str) -> None:
    delivery = DeliveryOptions(**{name: 1.0})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=f"^{name} has no effect without key or dispatch='key_failover'"):
        ConsumerOptions(delivery=delivery, dispatch="shared")
    assert ConsumerOptions(delivery=delivery, key="k").delivery is delivery
    assert ConsumerOptions(delivery=delivery, dispatch=KEY_FAILOVER).delivery is delivery


@pytest.mark.parametrize("name", ["tag", "ext_filter"])
def test_buckets_of_keys_need_the_tags(name: str) -> None:
    chosen: dict[str, Any] = {name: {"tag": "red", "ext_filter": ExtFilter(1, "a", "b")}[name]}
    with pytest.raises(InvalidInput, match=f"^{name} and key_tags contradict"):
        ConsumerOptions(dispatch="key_failover", key_tags=4, **chosen)
    assert ConsumerOptions(dispatch="key_failover", key_tags=0, **chosen).bucket_count == 0
    assert ConsumerOptions(dispatch="key_failover", **chosen).bucket_count == 0


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (ConsumerOptions, {"sample_rate": 99}),
        (ConsumerOptions, {"sample_rate": 5, "ordered": False}),
        (ConsumerOptions, {"msg_timeout": 1}),
        (ConsumerOptions, {"msg_timeout": 900}),
        (ConsumerOptions, {"partitions": (0, 5)}),
        (ConsumerOptions, {"max_in_flight_bytes": 0}),
        (ConsumerOptions, {"output_buffer_timeout": 1}),
        (ConsumerOptions, {"output_buffer_timeout": 0}),
        (ConsumerOptions, {"output_buffer_timeout": None, "output_buffer_size": 64}),
        (ConsumerOptions, {"output_buffer_timeout": 0.5, "output_buffer_size": 65536}),
        (ConsumerOptions, {"start": Position.earliest(), "start_existing": True}),
        (ConsumerOptions, {"start": {0: Position.earliest(), 1: Position.latest()}}),
        (ConsumerOptions, {"start": _Looked()}),
        (ConsumerOptions, {"key": "##key"}),
        (ConsumerOptions, {"key": str}),
        (ConsumerOptions, {"dispatch": "shared", "ordered": True}),
        (DeliveryOptions, {"block_warning": 0, "redelivery_wait": 0, "gap_wait": 0, "max_unpacked_bytes": 0}),
        (FailureOptions, {"requeue_delay": 0, "max_requeue_delay": 0, "requeue_jitter": 0, "report_attempts": 0}),
        (FailureOptions, {"max_attempts": 1, "dead_letter": "dead", "reject_ordered": True}),
        (FailureOptions, {"max_attempts": 1, "dead_letter": print}),
        (BackoffOptions, {"base": 1.0, "max_wait": 2.0}),
        (BackoffOptions, {"base": 1.0, "max_wait": 1.0, "mode": "off"}),
    ],
)
def test_settings_at_their_limits_are_accepted(kind: type, members: dict[str, Any]) -> None:
    made = kind(**members)
    assert {name: getattr(made, name) for name in members} == members


def test_what_settings_imply() -> None:
    def key_of(message: object) -> str:
        return ""

    shared: dict[str, Any] = {"dispatch": "key_failover"}
    settings: list[dict[str, Any]] = [{}, {"key": "a"}, shared, {**shared, "key": key_of}]
    assert [ConsumerOptions(**each).lanes for each in settings] == [
        None,
        "a",
        "##key",
        key_of,
    ]
    assert [ConsumerOptions(**each).keeps_keys_alone for each in settings] == [False, True, False, False]
    assert [ConsumerOptions(**each).bucket_count for each in settings] == [0, 0, 16, 16]
    assert ConsumerOptions(**shared, key_tags=4).bucket_count == 4
    failures: list[dict[str, Any]] = [{}, {"max_attempts": 3}, {"max_attempts": 3, "dead_letter": "dead"}]
    assert [FailureOptions(**each).drops for each in failures] == [False, True, False]
    looked = _Looked()
    assert ConsumerOptions(start=looked).start_positions is looked
    assert ConsumerOptions(start=looked).start_of(0) is None
    assert ConsumerOptions(start=Position.latest()).start_positions is None


def test_start_for_all_partitions_or_for_each() -> None:
    first, last = Position.earliest(), Position.latest()
    assert ConsumerOptions().start_of(0) is None
    assert ConsumerOptions(start=first).start_of(7) == first
    assert ConsumerOptions(start={1: last}).start_of(1) == last
    assert ConsumerOptions(start={1: last}).start_of(0) is None


def test_what_is_not_given_is_off_or_small() -> None:
    options, failure, delivery = ConsumerOptions(), FailureOptions(), DeliveryOptions()
    assert not any((options.queue_position, options.start_existing, options.sample_rate, options.ordered))
    assert (options.concurrency, options.initial_ready) == (1, 1)
    assert not any((failure.max_attempts, failure.reject_ordered, BackoffOptions().jitter))
    assert (delivery.auto_touch, delivery.decompress, delivery.on_lost) == (True, True, "raise")
