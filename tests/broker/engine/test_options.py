"""Settings of partitions and their channels."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext.broker.engine.options import MIB, ChannelKind, ChannelRules, PartitionOptions, make_kind
from nsqext.broker.engine.storage.log import Refusal
from nsqext.protocol.messages import KEY_HEADER
from nsqext.protocol.server.negotiate import ServerLimits

PLAIN, KEYS, OTHER = ChannelKind(), ChannelKind("key_failover"), ChannelKind("key_failover", "region")


def test_a_type_is_chosen_by_its_name() -> None:
    assert [make_kind(""), make_kind("", "region")] == [None, None]
    assert make_kind("shared", "region") == PLAIN
    assert (make_kind("key_failover"), make_kind("key_failover", "region")) == (KEYS, OTHER)
    assert make_kind("shared", fixed=True) == ChannelKind("shared", KEY_HEADER, True)
    with pytest.raises(Refusal, match=r"^dispatch type other is unknown, use shared or key_failover$"):
        make_kind("other")
    assert list(map(str, (PLAIN, KEYS, OTHER))) == ["shared", "key_failover", "key_failover with keys in region"]


def test_channels_that_share_their_messages_have_no_keys() -> None:
    kinds = PLAIN, ChannelKind("shared", "region"), KEYS, OTHER, ChannelKind("key_failover", "region", True)
    assert [[one.same(other) for other in kinds] for one in kinds] == [
        [True, True, False, False, False],
        [True, True, False, False, False],
        [False, False, True, False, False],
        [False, False, False, True, True],
        [False, False, False, True, True],
    ]


@pytest.mark.parametrize(
    ("most", "after", "attempts", "age", "ignored"),
    [
        (1, 5, 2, 6, True),
        (1, 1, 2, 6, True),
        (1, 5, 1, 6, False),
        (1, 5, 2, 5, False),
        (1, 0, 2, 6, False),
        (0, 5, 2, 6, False),
    ],
)
def test_an_old_message_is_ignored_after_some_attempts(
    most: int, after: float, attempts: int, age: float, ignored: bool
) -> None:
    assert ChannelRules(ignored_attempts=most, ignored_after=after).ignores(attempts, age) == ignored


def test_a_segment_is_a_small_part_of_each_bound() -> None:
    bounds: list[dict[str, Any]] = [{"memory_bound": 160_000}, {"finished_bytes": 160_000}, {"cache_bytes": 160_000}]
    assert [PartitionOptions(**bound).segment_bytes for bound in bounds] == [10_000] * 3
    assert PartitionOptions(memory_bound=0).segment_bytes == 4096
    large = PartitionOptions(memory_bound=160 * MIB, finished_bytes=160 * MIB, cache_bytes=160 * MIB)
    assert large.segment_bytes == MIB


def test_what_a_partition_offers_on_its_own() -> None:
    assert not PartitionOptions().extend_compatible()
    assert [
        PartitionOptions(limits=ServerLimits()).original,
        PartitionOptions(limits=ServerLimits.original()).original,
    ] == [
        False,
        True,
    ]
