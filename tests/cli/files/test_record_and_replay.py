"""`nsqext record` and `replay`: no part of a message is lost; both continue after a kill."""

from __future__ import annotations

import gzip
import json
import os
import resource
import time
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
import pytest

from nsqext import Consumer, MessageBatch
from nsqext.broker import Cluster, ClusterOptions
from nsqext.cli import main, message_files
from nsqext.cli.files.replay import Progress
from nsqext.cli.message_files import MessageFiles, files_in, outgoing_message, read_entries
from nsqext.client.consumer.message import requeue_unanswered
from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight
from nsqext.sync import Producer
from tests.support.command_line import lines, run, started

if TYPE_CHECKING:
    from nsqext.types import Address


def make_topic(cluster: Cluster, channel: str = "ch") -> str:
    """Return an extend topic of two partitions with a channel."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, extend=True, channels=[channel])
    return name


def recorded(folder: Path) -> list[str]:
    """Return the recorded bodies."""
    return [entry.record["body"] for path in files_in([folder]) for entry in read_entries(path)]


def test_messages_are_recorded_and_replayed(cluster: Cluster, tmp_path: Path) -> None:
    topic, copy = make_topic(cluster, "record"), make_topic(cluster)
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", "--key", "k", "--header", "user=42", "--trace-id", "7", *where)
    lines("pub", topic, "traced", "--trace-id", "9", *where)
    lines("pub", topic, stdin=b"\xff\n", NSQEXT_LOOKUPD=cluster.lookupd[0])
    assert lines("record", topic, "--to", str(tmp_path), "--until-end", *where) == [{"topic": topic, "recorded": 3}]
    (traced,) = (entry for entry in read_entries(files_in([tmp_path])[0]) if entry.record.get("body") == "traced")
    assert outgoing_message(traced.record).header == b"", "otherwise a batch may give it one"
    (done,) = lines("replay", str(tmp_path), "--topic", copy, "--speed", "0", *where)
    assert done == {"replayed": 3, "skipped": 0, "files": 1}
    found = {one.get("body"): one for one in lines("tail", copy, "--channel", "ch", "--until-end", *where)}
    assert (found["one"]["key"], found["one"]["headers"], found["one"]["trace_id"]) == ("k", {"user": "42"}, 7)
    assert found[None]["body_base64"] == "/w=="


def test_a_new_channel_records_what_the_topic_has_stored(cluster: Cluster, tmp_path: Path) -> None:
    topic, where = make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", "two", *where)
    done = lines("record", topic, "--to", str(tmp_path), "--channel", "backup", "--until-end", *where)
    assert (done, sorted(recorded(tmp_path))) == ([{"topic": topic, "recorded": 2}], ["one", "two"])


def test_batches_of_a_recorder_have_its_limits(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, dict[str, float]]] = []

    def batches(consumer: Consumer, **limits: float) -> NoReturn:
        given.append((consumer.max_in_flight, limits))
        raise InvalidState("seen")

    monkeypatch.setattr(Consumer, "batches", batches)
    words = ("record", make_topic(cluster), "--to", str(tmp_path), "--lookupd", cluster.lookupd[0])
    for limits in ((), ("--batch", "7", "--linger", "1.5")):
        with pytest.raises(SystemExit):
            main((*words, *limits))
    assert given == [(2000, {"max_count": 1000, "max_wait": 0.2}), (14, {"max_count": 7, "max_wait": 1.5})]


def test_bodies_are_recorded_as_they_are_stored(cluster: Cluster, tmp_path: Path) -> None:
    topic, where = make_topic(cluster, "record"), ("--lookupd", cluster.lookupd[0])
    with Producer(cluster.lookupd, compression="gzip") as producer:
        producer.publish(topic, b"x" * 50_000)
    lines("record", topic, "--to", str(tmp_path), "--until-end", *where)
    ((entry,),) = [list(read_entries(path)) for path in files_in([tmp_path])]
    message = outgoing_message(entry.record)
    assert isinstance(message.body, bytes)
    assert gzip.decompress(message.body) == b"x" * 50_000


def test_messages_are_durable_when_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder finishes them in the channel then."""
    durable: dict[Path, int] = {}
    synchronize = os.fsync

    def note(descriptor: int) -> None:
        synchronize(descriptor)
        durable[Path(f"/proc/self/fd/{descriptor}").readlink()] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", note)
    files = MessageFiles(tmp_path, "orders", max_bytes=1 << 20, max_age=0)
    for body in ("one", "two"):
        files.append([{"body": body}])
        assert files.path is not None
        assert durable[files.path] == files.path.stat().st_size
    files.close()
    assert tmp_path in durable  # the name of the file


@pytest.mark.parametrize(("max_age", "count"), [(1e-9, 2), (0.0, 1), (3600.0, 1)])
def test_files_are_rotated_by_their_age(tmp_path: Path, max_age: float, count: int) -> None:
    files = MessageFiles(tmp_path, "orders", max_bytes=1 << 30, max_age=max_age)
    for body in ("one", "two"):
        files.append([{"body": body}])
    files.close()
    assert (recorded(tmp_path), len(files_in([tmp_path]))) == (["one", "two"], count)


def test_progress_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError("the disk is full")

    message_files.write_synced(tmp_path / "progress", b"1")
    monkeypatch.setattr(message_files, "synchronize", full)
    with pytest.raises(OSError, match="full"):
        message_files.write_synced(tmp_path / "progress", b"2")
    assert (tmp_path / "progress").read_bytes() == b"1"


def test_progress_that_cannot_be_written_is_refused_before_anything_is_published(
    cluster: Cluster, tmp_path: Path
) -> None:
    topic = make_topic(cluster)
    (tmp_path / "1.jsonl").write_text('{"body": "a"}\n')
    words = ("--topic", topic, "--progress", str(tmp_path / "missing" / "progress"), "--lookupd", cluster.lookupd[0])
    done = run("replay", str(tmp_path / "1.jsonl"), *words)
    assert (done.returncode, b"missing" in done.stderr) == (2, True), done.stderr
    assert [one["messages"] for one in lines("stats", topic, "--lookupd", cluster.lookupd[0])] == [0]


def test_messages_that_were_taken_back_while_they_were_written_are_recorded_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, where, taken = make_topic(cluster, "record"), ("--lookupd", cluster.lookupd[0]), list[MessageBatch]()
    finish = MessageBatch.finish

    async def finish_late(batch: MessageBatch) -> None:
        if taken:
            await finish(batch)
            return
        taken.append(batch)
        requeue_unanswered(batch)
        raise MessageNotInFlight("the server has taken them back")

    monkeypatch.setattr(MessageBatch, "finish", finish_late)
    lines("pub", topic, "one", *where)
    with pytest.raises(SystemExit) as ended:
        main(["record", topic, "--to", str(tmp_path), "--until-end", *where])
    assert (ended.value.code, recorded(tmp_path)) == (0, ["one", "one"])


def test_messages_that_were_not_published_are_no_progress(cluster: Cluster, tmp_path: Path) -> None:
    """The next replay would leave them out."""
    plain, where = f"t_{token_hex(4)}", ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(plain, channels=["ch"])
    file, progress = tmp_path / "some.jsonl", tmp_path / "progress"
    file.write_bytes(orjson.dumps({"body": "x", "headers": {"a": "b"}}) + b"\n")
    command = ("replay", str(file), "--progress", str(progress), *where)
    failed = run(*command, "--topic", plain)
    assert (failed.returncode, b"does not accept headers" in failed.stderr) == (2, True)
    assert not progress.exists()
    (tmp_path / "empty.jsonl").write_bytes(b'{"body": "x"}\n{"body": ""}\n')
    empty = run("replay", str(tmp_path / "empty.jsonl"), *where, "--topic", plain)
    assert (empty.returncode, b"empty.jsonl, line 2: " in empty.stderr) == (2, True), empty.stderr
    cluster.upgrade_topic(plain)
    assert lines(*command, "--topic", plain) == [{"replayed": 1, "skipped": 0, "files": 1}]


def test_messages_of_the_original_nsq_are_recorded_and_replayed(tmp_path: Path) -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        where = ("--lookupd", cluster.lookupd[0])
        lines("topic", "create", "orders", "--channel", "record", *where)
        lines("pub", "orders", "one", *where)
        assert lines("record", "orders", "--to", str(tmp_path), "--until-end", *where)[0]["recorded"] == 1
        (done,) = lines("replay", str(tmp_path), "--speed", "0", *where)
        assert done["replayed"] == 1
        (found,) = lines("tail", "orders", "--channel", "record", "--since", "1h", "--until-end", *where)
    assert found["body"] == "one"


def test_an_end_that_is_not_known_is_refused_before_a_channel_is_created(tmp_path: Path) -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        cluster.create_topic("orders")
        done = run("record", "orders", "--to", str(tmp_path), "--until-end", "--nsqd", cluster.nodes["n1"].tcp)
        assert (done.returncode, b"needs the lookup service" in done.stderr) == (2, True)
        assert cluster.topics == {"orders": []}


def test_a_recorder_waits_for_a_cluster_that_starts_later(tmp_path: Path, closed_address: Address) -> None:
    address = str(closed_address)
    with started("record", "t", "--to", str(tmp_path), "--until-end", "--lookupd", address) as recorder:
        assert recorder.poll() is None
        with Cluster(nodes=1, options=ClusterOptions(lookupd_http=(address,))) as cluster:
            cluster.create_topic("t", channels=["record"])
            with Producer(cluster.lookupd) as producer:
                producer.publish("t", b"one")
            output, errors = recorder.communicate(timeout=60)
    assert recorder.returncode == 0, errors
    assert (json.loads(output)["recorded"], recorded(tmp_path)) == (1, ["one"])


def test_replay_keeps_the_pace_of_the_recording(cluster: Cluster, tmp_path: Path) -> None:
    copy = make_topic(cluster)
    file = tmp_path / "messages.jsonl"
    stamps = [5_000_000_000, 7_000_000_000, 9_000_000_000]
    file.write_bytes(b"".join(orjson.dumps({"body": str(at), "timestamp": at}) + b"\n" for at in stamps))
    began = time.monotonic()
    lines("replay", str(file), "--topic", copy, "--speed", "2", "--lookupd", cluster.lookupd[0])
    found = lines("tail", copy, "--channel", "ch", "--until-end", "--lookupd", cluster.lookupd[0])
    assert time.monotonic() - began >= 1.0
    first, *_, last = sorted(one["timestamp"] for one in found)
    assert 0.9e9 <= last - first < 6e9


def test_a_replay_notes_each_file_and_keeps_the_partitions_of_messages_without_key(
    cluster: Cluster, tmp_path: Path
) -> None:
    copy, progress, where = make_topic(cluster), tmp_path / "progress", ("--lookupd", cluster.lookupd[0])
    (own,) = (one["partition"] for one in lines("pub", copy, "x", "--key", "k", *where))
    keyed = {"body": "a", "key": "k", "partition": 1 - own}
    records = [keyed, {"body": "b", "partition": 1}, {"body": "c", "partition": 1}]
    for name, some in (("1.jsonl", records), ("2.jsonl", records[1:])):
        (tmp_path / name).write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in some))
    options = ("--topic", copy, "--speed", "0", "--keep-partitions", "--progress", str(progress))
    (done,) = lines("replay", str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl"), *options, *where)
    noted = {"#target": f"{copy} at {cluster.lookupd[0]}", "1.jsonl": 3, "2.jsonl": 2}
    assert (done["replayed"], orjson.loads(progress.read_bytes())) == (5, noted)
    (again,) = lines("replay", str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl"), *options, *where)
    assert again == {"replayed": 0, "skipped": 5, "files": 2}
    found = lines("tail", copy, "--channel", "ch", "--until-end", *where)
    assert {(one["body"], one["partition"]) for one in found} == {("x", own), ("a", own), ("b", 1), ("c", 1)}


def test_the_options_of_rotation_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(*arguments: object, **given: object) -> NoReturn:
        found.append((*arguments, given))
        raise InvalidInput("recorded")

    found: list[tuple[object, ...]] = []
    monkeypatch.setattr("nsqext.cli.files.record.MessageFiles", make)
    words = ("--rotate-mb", "1.5", "--rotate-seconds", "7", "--lookupd", "h:1")
    with pytest.raises(SystemExit, match="2"):
        main(["record", "orders", "--to", str(tmp_path), *words])
    assert found == [(tmp_path, "orders", {"max_bytes": 3 << 19, "max_age": 7.0})]


def test_files_are_rotated_and_read_in_order(tmp_path: Path) -> None:
    one = len(gzip.compress(b'{"body":"0"}\n'))
    files = MessageFiles(tmp_path, "orders#ephemeral", max_bytes=one + 1, max_age=0)
    for number in range(5):
        files.append([{"body": str(number)}])
    files.close()
    assert len(files_in([tmp_path])) == 3, "each has the two batches that it takes"
    assert recorded(tmp_path) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("kept", [1, 15, -1])
def test_an_incomplete_member_at_the_end_is_left_out(tmp_path: Path, kept: int) -> None:
    whole, cut = (gzip.compress(orjson.dumps({"body": text}) + b"\n") for text in ("whole", "cut"))
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(whole + cut[:kept])
    assert recorded(tmp_path) == ["whole"]


def test_empty_lines_between_messages_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b'{"body":"a"}\n\n{"body":"b"}\n \n')
    found = [(entry.number, entry.record) for entry in read_entries(tmp_path / "1.jsonl")]
    assert found == [(1, {"body": "a"}), (2, {"body": "b"})]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": "a"}\n') + b"garbage")
    with pytest.raises(InvalidInput, match="damaged"):
        list(read_entries(path))
    path.write_bytes(b"[1]\n")
    with pytest.raises(InvalidInput, match="line 1 is not a message record"):
        list(read_entries(path))


def test_a_batch_that_unpacks_to_more_than_its_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl.gz"
    line = b'{"body":"' + b"a" * 3_000_000 + b'"}\n'
    path.write_bytes(gzip.compress(line) * 2)
    assert [len(entry.record["body"]) for entry in read_entries(path)] == [3_000_000] * 2
    monkeypatch.setattr(message_files, "MOST_UNPACKED", 2_000_000)
    with pytest.raises(InvalidInput, match="unpacks to more than 2000000 bytes"):
        list(read_entries(path))


def test_a_batch_that_is_larger_than_readers_accept_is_recorded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_files, "MOST_UNPACKED", 2_000_000)
    monkeypatch.setattr(message_files, "MOST_PACKED", 1_000_000)
    files = MessageFiles(tmp_path, "orders", max_bytes=1 << 30, max_age=0)
    bodies = [letter * 400_000 for letter in "abcdefg"]
    files.append([{"body": body} for body in bodies])
    files.close()
    assert recorded(tmp_path) == bodies


@pytest.mark.parametrize(
    "record", [[], {}, {"body": 1}, {"body_base64": "?"}, {"body": "a", "headers": []}, {"body": "a", "delay": 5}]
)
def test_records_are_checked(record: object) -> None:
    with pytest.raises(InvalidInput):
        outgoing_message(record)


def test_messages_before_a_damaged_line_are_replayed_and_counted(cluster: Cluster, tmp_path: Path) -> None:
    """Those of the same batch were left out, and how many were published was not said."""
    copy, file = f"copy_{token_hex(4)}", tmp_path / "given.jsonl"
    cluster.create_topic(copy, channels=["ch"])
    file.write_bytes(b'{"body":"1"}\n{"body":"2"}\n{"body":"3"}\n{"body":\n{"body":"5"}\n')
    words = ("replay", str(file), "--topic", copy, "--progress", str(tmp_path / "progress"), "--batch", "2")
    found = run(*words, "--lookupd", cluster.lookupd[0])
    assert (found.returncode, json.loads(found.stdout)["replayed"]) == (2, 3)
    assert b"given.jsonl, line 4 is not JSON" in found.stderr
    assert b"the messages before it are published" in found.stderr
    file.write_bytes(b'{"body":"1"}\n{"body":"2"}\n{"body":"3"}\n{"body":"4"}\n{"body":"5"}\n')
    (again,) = lines(*words, "--lookupd", cluster.lookupd[0])
    assert (again["replayed"], again["skipped"]) == (2, 3)
    bodies = lines("tail", copy, "--start", "earliest", "--until-end", "--lookupd", cluster.lookupd[0])
    assert sorted(one["body"] for one in bodies) == ["1", "2", "3", "4", "5"]


def test_a_replay_that_fails_names_the_error_of_the_publish(cluster: Cluster, tmp_path: Path) -> None:
    """Behind the messages that were not stored, the file is damaged."""
    file = tmp_path / "given.jsonl"
    file.write_bytes(b'{"body":"1"}\n{"body":\n')
    found = run("replay", str(file), "--topic", "no_such_topic", "--lookupd", cluster.lookupd[0])
    assert (found.returncode, json.loads(found.stdout)["replayed"]) == (2, 0)
    assert b"no_such_topic" in found.stderr and b"not JSON" not in found.stderr


def test_mistakes_of_replay(tmp_path: Path) -> None:
    missing = run("replay", str(tmp_path), "--lookupd", "h:1")
    assert (missing.returncode, b"no files of recorded messages" in missing.stderr) == (2, True)
    (tmp_path / "progress").write_text(json.dumps([]))
    with pytest.raises(InvalidInput, match="is not a progress file"):
        Progress.load(tmp_path / "progress", "copy at h:1")
    (tmp_path / "1.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "progress").write_text(json.dumps({"#target": "copy at h:1, i:1", "1.jsonl": 1}))
    for topic, address in (("copy", "h:2"), ("other", "i:1,h:1")):  # their messages before line 2 would be missing
        words = ("replay", str(tmp_path / "1.jsonl"), "--topic", topic, "--progress", str(tmp_path / "progress"))
        other = run(*words, "--lookupd", address)
        assert (other.returncode, b"is the progress of messages for copy at h:1, i:1, and not" in other.stderr) == (
            2,
            True,
        )


def test_a_write_that_stores_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NearlyFull(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    monkeypatch.setattr(message_files, "FileIO", NearlyFull)
    files = MessageFiles(tmp_path, "orders", max_bytes=1 << 20, max_age=0)
    files.append([{"body": str(number)} for number in range(50)])
    files.close()
    assert recorded(tmp_path) == [str(number) for number in range(50)]


def test_a_folder_that_cannot_be_created_ends_the_recorder_at_once(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    topic = make_topic(cluster, "record")
    done = run("record", topic, "--to", str(tmp_path / "file" / "in"), "--lookupd", cluster.lookupd[0])
    assert (done.returncode, b"Not a directory" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (("record", "t", "--to", "backup"), "sample_rate=50"),
        (("record", "t", "--to", "backup"), "max_attempts=3"),
        (("record", "t", "--to", "backup"), "tag=eu"),
        (("relay", "t", "--to", "copy"), "max_attempts=3"),
        (("relay", "t", "--to", "copy"), "sample_rate=50"),
        (("relay", "t", "--to-http", "http://h"), "dispatch=key_failover"),
    ],
)
def test_settings_of_services_in_the_environment_lose_no_message(words: tuple[str, ...], setting: str) -> None:
    """A half was recorded, and what could not be sent was dropped, with exit code 0."""
    name, _, value = setting.partition("=")
    done = run(*words, "--lookupd", "h:1", **{f"NSQEXT_{name.upper()}": value})  # type: ignore[arg-type]
    assert done.returncode == 2
    assert f"messages would be left out with the setting {setting}".encode() in done.stderr


def test_a_full_disk_ends_the_recorder_and_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    topic = make_topic(cluster, "record")
    words = ("record", topic, "--to", str(tmp_path), "--batch", "10", "--lookupd", cluster.lookupd[0])
    with started(*words) as recorder:
        resource.prlimit(recorder.pid, resource.RLIMIT_FSIZE, (30_000, 30_000))
        with Producer(cluster.lookupd) as producer:
            producer.publish_many(topic, [token_hex(500).encode() for _ in range(200)])
        _, errors = recorder.communicate()
    assert (recorder.wait(), b"File too large" in errors, b"Traceback" in errors) == (2, True, False), errors
    kept = len(recorded(tmp_path))
    assert 0 < kept < 200
    lines(*words, "--until-end")
    assert len(set(recorded(tmp_path))) == 200
