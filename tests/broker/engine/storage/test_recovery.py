"""Recovery of damaged files: losses are reported, readable messages are delivered, channels receive new messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsqext.broker.engine.storage.partition_store import stored_partitions
from nsqext.errors import InvalidSetting
from tests.support.engine_partition import Bench

BODIES = [f"message {number:03d} " + "x" * (number % 7) for number in range(100)]
FIRST_FILE = "orders/orders-0.diskqueue.000000.dat"


def stored(path: Path) -> Path:
    """Store 100 messages, of which the channel ``half`` has finished 50 and ``none`` none; return the file."""
    bench = Bench(data_path=path)
    bench.channel("none")
    consumer = bench.consume(ready=50, channel="half")
    for body in BODIES:
        bench.publish(body)
    bench.finish(consumer, range(2, 52), "half")
    bench.wait(1)
    bench.partition.close()
    return path / FIRST_FILE


def received(bench: Bench, channel: str) -> list[str]:
    messages = bench.consume(99, ready=2500, channel=channel).take()
    return [message.body.decode("latin-1") for message in messages]


@pytest.mark.parametrize("position", [0, 1, 2, 3, 1500, 1501, 1502, 1503])
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_loses_at_most_two_messages(
    tmp_path: Path, position: int, mask: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = stored(tmp_path)
    data = bytearray(file.read_bytes())
    data[position] ^= mask
    file.write_bytes(data)
    again = Bench(data_path=tmp_path)
    recovery = again.partition.recovery
    assert recovery is not None
    new = [f"new {number}" for number in range(50)]
    again.publish(*new)
    all_of, half = received(again, "none"), received(again, "half")
    assert all_of[-50:] == half[-50:] == new, "every channel receives every new message"
    old = all_of[:-50]
    assert len(set(BODIES) - set(old)) <= 2
    assert len(set(BODIES[50:]) - set(half[:-50])) <= 2
    if len(old) < len(BODIES) or set(old) != set(BODIES):
        lost = len(set(BODIES) - set(old))
        if recovery.lost_messages:
            assert recovery.lost_messages == lost
            assert "is damaged" in caplog.text
            assert (tmp_path / "orders" / recovery.damaged_files[0]).read_bytes() == bytes(data)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.sampled_from([0, 0, 1, 17, 200]),
)
def test_any_damage_is_survived_and_new_messages_reach_all_channels(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("damage")
    file = stored(path)
    data = bytearray(file.read_bytes())
    for position, mask in flips:
        data[position % len(data)] ^= mask
    file.write_bytes(data[: len(data) - cut])
    for attempt in range(2):
        again = Bench(data_path=path)
        log = again.partition.log
        assert log.end_count >= 80
        new = [f"new {attempt} {number}" for number in range(20)]
        again.publish(*new)
        for channel in ("none", "half"):
            assert received(again, channel)[-20:] == new
        again.partition.close()


def test_an_intact_file_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path)
    again = Bench(data_path=tmp_path)
    assert again.partition.recovery is not None
    assert not again.partition.recovery.is_damaged
    assert received(again, "none") == BODIES
    assert caplog.text == ""


def test_an_acknowledged_end_is_not_a_torn_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = stored(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    again = Bench(data_path=tmp_path)
    assert again.partition.recovery is not None
    assert again.partition.recovery.torn_bytes == 0
    assert (file.parent / again.partition.recovery.damaged_files[0]).read_bytes() == data[:-5]
    assert "although it was acknowledged up to" in caplog.text
    assert received(again, "none") == BODIES[:-1]


def test_a_missing_file_of_channels_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path)
    (tmp_path / "orders/orders-0.channels.json").unlink()
    assert [(state.topic, state.partition) for state in stored_partitions(tmp_path)] == [("orders", 0)]
    again = Bench(data_path=tmp_path)
    assert "orders-0.channels.json is missing: the channels of 100 messages are unknown" in caplog.text
    assert again.partition.log.end_count == 100


def test_missing_files_of_messages_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = stored(tmp_path)
    file.unlink()
    again = Bench(data_path=tmp_path)
    assert "all files of the queue are missing; it had 100 messages" in caplog.text
    again.publish("new")
    assert received(again, "none") == received(again, "half") == ["new"]


def test_a_missing_journal_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(data_path=tmp_path)
    consumer = bench.consume(ready=2)
    bench.publish("a", "b")
    bench.channel().requeue(consumer, 2, 1200)
    bench.channel().requeue(consumer, 3, 1200)
    bench.partition.close()
    (tmp_path / "orders/orders-0.delayed.jsonl").unlink()
    again = Bench(data_path=tmp_path)
    assert "delayed messages are lost, by channel: {'ch': 2}" in caplog.text
    assert again.partition.recovery is not None
    assert again.partition.recovery.lost_messages == 2


@pytest.mark.parametrize("damage", [b"{}", b"{", b"[]", b'{"channel":"ch","record":"AAAA"}', b"\xff"])
def test_a_damaged_line_of_the_journal_loses_only_that_line(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(data_path=tmp_path)
    consumer = bench.consume(ready=3)
    bench.publish("a", "b", "c")
    for number in (2, 3, 4):
        bench.channel().requeue(consumer, number, 1200)
    bench.partition.close()
    journal = tmp_path / "orders/orders-0.delayed.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]))
    again = Bench(data_path=tmp_path)
    assert sorted(again.channel().cursor.delayed.messages) == [2, 4]
    assert "1 of 3 changes" in caplog.text
    assert (tmp_path / "orders/orders-0.delayed.jsonl.damaged").exists()


def test_a_damaged_file_of_channels_is_an_error_that_names_it(tmp_path: Path) -> None:
    stored(tmp_path)
    state = tmp_path / "orders/orders-0.channels.json"
    state.write_bytes(state.read_bytes().replace(b'"offset"', b'"nffset"'))
    with pytest.raises(InvalidSetting, match=r"orders-0\.channels\.json"):
        Bench(data_path=tmp_path)
