"""Recovery of damaged files: losses are reported, readable messages are delivered, channels receive new messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nsqext.broker.engine.storage.partition_store import NewMessage, stored_partitions
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.protocol.record import RECORD_OVERHEAD, Record, encode_record, raw_size
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.engine_partition import Bench

BODIES = [f"message {number:03d} " + "x" * (300 if number in (0, 50) else number % 7) for number in range(100)]
FIRST_FILE = "orders/orders-0.diskqueue.000000.dat"


def stored(path: Path, **options: Any) -> Path:
    """Store 100 messages, of which the channel ``half`` has finished 50 and ``none`` none; return the file."""
    bench = Bench(data_path=path, **options)
    bench.channel("none")
    consumer = bench.consume(ready=50, channel="half", **options)
    for body in BODIES:
        bench.publish(body)
    bench.finish(consumer, range(2, 52), "half")
    bench.wait(1)
    bench.partition.close()
    return path / FIRST_FILE


def received(bench: Bench, channel: str, **settings: Any) -> list[str]:
    messages = bench.consume(99, ready=2500, channel=channel, **settings).take()
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
    assert recovery.lost_messages == len(BODIES) - len(old)
    assert recovery.is_damaged == ("is damaged" in caplog.text) == (recovery.lost_messages > 0)
    if recovery.is_damaged:
        assert (tmp_path / "orders" / recovery.damaged_files[0]).read_bytes() == bytes(data)
    again.partition.close()
    repaired = Bench(data_path=tmp_path).partition.recovery
    assert repaired is not None
    assert not repaired.is_damaged, "damage is reported once"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize(
    ("damage", "numbers", "lost"),
    [
        ("zeros", [0], [0]),
        ("zeros", [50], [50]),
        ("zeros", [50, 52], [50, 52]),
        ("shorter", [50], [50]),
        ("longer", [50], [50]),
        ("same id", [50], [49]),
        ("id of the first", [2], [2]),
        ("other partition", [99], [99]),
    ],
)
@pytest.mark.parametrize("extend", [False, True])
def test_only_damaged_messages_are_lost(
    tmp_path: Path, damage: str, numbers: list[int], lost: list[int], extend: bool
) -> None:
    file = stored(tmp_path, extend=extend)
    data = bytearray(file.read_bytes())
    for number in numbers:
        size = raw_size(len(BODIES[number]), 0, extend)
        at = data.index(BODIES[number].encode()) + len(BODIES[number]) - size
        match damage:
            case "zeros":
                data[at : at + size] = bytes(size)
            case "same id":
                data[at + 21] -= 1
            case "id of the first":
                data[at + 21] -= 2
            case "other partition":
                data[at + 14] ^= 1
            case _:
                data[at : at + 4] = (size - 4 + (3 if damage == "longer" else -3)).to_bytes(4, "big")
    file.write_bytes(data)
    again = Bench(data_path=tmp_path)
    recovery = again.partition.recovery
    assert recovery is not None
    assert recovery.lost_messages == len(lost)
    assert recovery.lost_bytes == sum(raw_size(len(BODIES[number]), 0, extend) for number in lost)
    again.publish("new")
    again.partition.log.shrink(0)
    left = [*(body for number, body in enumerate(BODIES) if number not in lost), "new"]
    assert received(again, "none", extend=extend) == left
    again.partition.close()
    repaired = Bench(data_path=tmp_path)
    assert repaired.partition.recovery is not None
    assert not repaired.partition.recovery.is_damaged
    assert received(repaired, "none", extend=extend) == left


def test_messages_behind_a_damaged_one_are_found_by_distant_ids(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path, number=5)
    bench.channel()
    bench.publish("first", "damaged")
    bench.partition.skip_ids(1 << 24)
    assert bench.publish("last", "very last").message_id == (5 << 50) + 4 + (1 << 24)
    bench.partition.close()
    file = tmp_path / "orders/orders-5.diskqueue.000000.dat"
    data, at = file.read_bytes(), RECORD_OVERHEAD + len("first")
    file.write_bytes(data[:at] + bytes(4) + data[at + 4 :])
    again = Bench(data_path=tmp_path, number=5)
    assert again.consume(ready=9).bodies() == ["first", "last", "very last"]


def test_a_record_in_the_body_of_the_last_message_is_no_message(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path)
    bench.channel()
    body = encode_record(Record(1, 4, 0, b"a message that was copied"))
    bench.publish("first", NewMessage(body))
    bench.partition.close()
    again = Bench(data_path=tmp_path)
    assert again.partition.recovery is not None
    assert not again.partition.recovery.is_damaged
    assert [message.body for message in again.consume(ready=9).take()] == [b"first", body]


def test_an_acknowledged_end_is_not_a_torn_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = stored(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    again = Bench(data_path=tmp_path)
    assert again.partition.recovery is not None
    assert again.partition.recovery.torn_bytes == 0
    assert (file.parent / again.partition.recovery.damaged_files[0]).read_bytes() == data[:-5]
    assert (again.partition.recovery.lost_bytes, again.partition.recovery.lost_messages) == (
        RECORD_OVERHEAD + len(BODIES[-1]),
        1,
    )
    assert "with 1 messages before offset" in caplog.text
    assert received(again, "none") == BODIES[:-1]


@pytest.mark.parametrize("content", [None, b"{}"])
def test_without_the_file_of_channels_and_its_copy_channels_are_unknown(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path)
    for name in ("orders-0.channels.json", "orders-0.channels.json.copy"):
        file = tmp_path / "orders" / name
        file.unlink() if content is None else file.write_bytes(content)
    assert [(state.topic, state.partition) for state in stored_partitions(tmp_path)] == [("orders", 0)]
    again = Bench(data_path=tmp_path)
    assert "orders-0.channels.json is missing or damaged: the channels of 100 messages are unknown" in caplog.text
    assert again.partition.log.end_count == 100


def test_missing_files_of_messages_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = stored(tmp_path)
    file.unlink()
    again = Bench(data_path=tmp_path)
    assert "all files of the queue are missing; it had 100 messages" in caplog.text
    assert again.partition.recovery is not None
    assert again.partition.recovery.lost_messages == 100
    again.publish("new")
    assert received(again, "none") == received(again, "half") == ["new"]


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


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"crc32":1,"content":{}}'])
def test_a_damaged_file_of_channels_is_kept_and_its_copy_is_read(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path)
    state = tmp_path / "orders/orders-0.channels.json"
    state.write_bytes(damage)
    again = Bench(data_path=tmp_path)
    assert "kept as orders-0.channels.json.damaged; channels are read from its copy" in caplog.text
    assert state.with_name("orders-0.channels.json.damaged").read_bytes() == damage
    again.publish("new")
    assert received(again, "half") == [*BODIES[50:], "new"]
    again.wait(1)
    assert state.exists(), "the file is rewritten"


DAMAGES: dict[str, Callable[[bytes, int], bytes | None]] = {
    "flip": lambda data, at: data[:at] + bytes((data[at] ^ 1 << at % 8,)) + data[at + 1 :],
    "cut": lambda data, at: data[:at],
    "zeros": lambda data, at: data[:at] + bytes(len(data) - at),
    "garbage": lambda data, at: data + b"\xff{" * 9,
    "remove": lambda data, at: None,
}


def _limits(generation: str) -> ServerLimits:
    return ServerLimits.original() if generation == "original" else ServerLimits()


def store_everything(path: Path, generation: str) -> list[Path]:
    """Store 40 messages in several files, two channels and delayed messages; return the files."""
    disk = DiskOptions(max_file_bytes=400, retention_bytes=0)
    bench = Bench(data_path=path, disk=disk, limits=_limits(generation))
    bench.channel("none")
    consumer = bench.consume(ready=20, channel="half")
    for body in BODIES[:40]:
        bench.publish(body)
    bench.finish(consumer, range(2, 12), "half")
    for counter in (12, 13, 14):
        bench.channel("half").requeue(consumer, counter, 1200)
    bench.wait(1)
    bench.partition.close()
    return sorted((path / "orders").iterdir())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.integers(0, 1000),
    damage=st.sampled_from(sorted(DAMAGES)),
    at=st.integers(0, 10_000),
    generation=st.sampled_from(["redesigned", "original"]),
)
@example(which=0, damage="flip", at=2, generation="redesigned")
@example(which=3, damage="zeros", at=4, generation="original")
@example(which=3, damage="zeros", at=22, generation="original")
@example(which=3, damage="cut", at=0, generation="redesigned")
@example(which=1, damage="remove", at=0, generation="redesigned")
@example(which=381, damage="flip", at=381, generation="redesigned")
def test_any_damaged_file_is_survived_and_named(
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    which: int,
    damage: str,
    at: int,
    generation: str,
) -> None:
    """No error, no loss outside of the damage, a report, and every channel receives the next published message."""
    caplog.clear()
    path = tmp_path_factory.mktemp("damage")
    files = store_everything(path, generation)
    file = files[which % len(files)]
    data = file.read_bytes()
    if not data:
        return
    changed = DAMAGES[damage](data, at % len(data))
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
    assert {(state.topic, state.partition) for state in stored_partitions(path)} == {("orders", 0)}
    is_queue = file.suffix == ".dat"
    concerned = {body for body in BODIES if body.encode() in data} if is_queue else set()
    for attempt in range(2):  # repairs are permanent
        again = Bench(data_path=path, limits=_limits(generation))
        recovery = again.partition.recovery
        assert recovery is not None
        consumers = [again.consume(number, ready=2500, channel=name) for number, name in enumerate(("none", "half"))]
        found = {message.body.decode("latin-1") for message in consumers[0].take()}
        lost = set(BODIES[:40]) - found
        assert lost <= concerned
        assert len(lost) <= 2 or damage != "flip"
        reported = [name for name in (*recovery.damaged_files, recovery.torn_file) if name]
        altered = found - {*BODIES[:40], *(f"new 0 {number}" for number in range(20))}  # records have no checksums
        if attempt:
            assert not recovery.is_damaged
        elif changed != data:
            assert all(name.startswith(file.name) for name in reported), reported
            assert not is_queue or recovery.lost_messages == len(lost) - len(altered)
            is_silent = (
                altered or (is_queue and damage == "flip" and not lost) or (file.suffix == ".jsonl" and damage == "cut")
            )
            assert reported or is_silent, "a journal may end with any line"
            assert not reported or file.name in caplog.text
        consumers[1].take()
        new = [f"new {attempt} {number}" for number in range(20)]
        again.publish(*new)
        for consumer in consumers:
            assert consumer.bodies() == new
        again.partition.close()
