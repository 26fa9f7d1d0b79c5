"""Names of topics, channels and tags; partitions and trace ids."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext.errors import InvalidInput, InvalidName, InvalidPartition
from nsqext.protocol import names
from tests.support.tables import table

_GOOD = ["a", "A.b_c-9", ".", "x" * 64, "t#ephemeral", "x" * 54 + "#ephemeral", "_-"]
_BAD = ["", "x" * 65, "a b", "a/b", "a#", "#ephemeral", "a#ephemera", "a#ephemeral#ephemeral", "x" * 55 + "#ephemeral",
        "é", "a\n", "a!", "٣", "a\x00"]  # fmt: skip


@pytest.mark.parametrize("name", _GOOD)
def test_names_that_servers_accept(name: str) -> None:
    assert names.check_topic(name) == names.check_channel(name) == name


@table("name", [*_BAD, None, 5, b"bytes", ["a"]])
def test_names_that_no_server_accepts(name: Any) -> None:
    with pytest.raises(InvalidName, match=r"topic name .* is not valid: use 1 to 64"):
        names.check_topic(name)
    with pytest.raises(InvalidName, match=r"channel name .* is not valid: .*'#ephemeral' .* counts"):
        names.check_channel(name)


@pytest.mark.parametrize("tag", ["a", "x" * 100, "A-b_9"])
def test_tags(tag: str) -> None:
    assert names.check_tag(tag) == tag


@table("tag", ["", "x" * 101, "a b", "a.b", "é", "a\n", None, 5])
def test_bad_tags(tag: Any) -> None:
    with pytest.raises(InvalidName, match=r"tag .* is not valid: use 1 to 100"):
        names.check_tag(tag)


@pytest.mark.parametrize("partition", [0, 1, 1023])
def test_partitions(partition: int) -> None:
    assert names.check_partition(partition) == partition


@pytest.mark.parametrize("partition", [-1, 1024, True, "0", 1.0, None])
def test_bad_partitions(partition: Any) -> None:
    with pytest.raises(InvalidPartition, match="use a number from 0 to 1023"):
        names.check_partition(partition)


def test_trace_ids() -> None:
    for trace_id in (0, (1 << 64) - 1):
        assert names.check_trace_id(trace_id) == trace_id
    for bad in (-1, 1 << 64, True, "5", None):
        with pytest.raises(InvalidInput, match="trace id"):
            names.check_trace_id(bad)  # type: ignore[arg-type]


def test_ephemeral_names() -> None:
    assert names.is_ephemeral("t#ephemeral")
    assert not names.is_ephemeral("t")
    pattern = names.check_topic_pattern("t*")
    assert [name for name in ("t", "t1", "t#ephemeral") if pattern.fullmatch(name)] == ["t", "t1"]


def test_what_databases_store() -> None:
    assert [text for text in ("é", "a\0", "\ud800") if names.is_storable(text)] == ["é"]
