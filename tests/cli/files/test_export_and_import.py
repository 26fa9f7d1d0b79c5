"""`nsqext export` and `nsqext import`: files of a topic, which are complete after a kill too."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nsqext.arrow
from nsqext import OutgoingMessage
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.files import export
from nsqext.cli.files.export import ExportProgress
from nsqext.cli.files.tables import entries_of
from nsqext.cli.message_files import outgoing_message
from nsqext.errors import InvalidInput, InvalidSetting, NsqError
from nsqext.sync import Producer
from tests.support.command_line import lines, run, started

MESSAGES = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=1) as running:
        yield running


@pytest.fixture
def source(cluster: Cluster) -> str:
    """A topic of two partitions with messages of all kinds."""
    name = f"source_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, extend=True, channels=["ch"])
    with Producer(cluster.lookupd) as producer:
        for partition in range(2):
            # the ends of a file, by which an import recognizes it, are not all of it
            bodies = [b"%d-%d" % (partition, number) + b"." * 60 for number in range(MESSAGES - 5)]
            special = [
                OutgoingMessage(b"\xff\x00", {"user": "ann"}, "blue", 7, "k"),
                OutgoingMessage(b"three", key="k"),
                OutgoingMessage(b'two\nlines, "quoted"', {"a": "\u00e9"}),
            ]
            producer.publish_many(name, [*bodies, *special], partition=partition)
            producer.publish(name, b"a trace id without a header", trace_id=9, partition=partition)
            producer.publish(name, b"of another client", header=b'{"##key":"", "n":1.50}', partition=partition)
    return name


def stored(cluster: Cluster, topic: str) -> list[tuple[object, ...]]:
    """Return what the messages of a topic consist of, by partition and offset."""
    columns = ("partition", "value", "header", "key", "tag", "trace_id")
    table = nsqext.arrow.read(topic, cluster.lookupd, columns=columns).read_all()
    return [tuple(row[name] for name in columns) for row in table.to_pylist()]


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_an_imported_copy_has_the_same_bytes_in_the_same_partitions(
    cluster: Cluster, source: str, tmp_path: Path, ending: str
) -> None:
    file, copy = tmp_path / f"all.{ending}", f"copy_{token_hex(4)}"
    cluster.create_topic(copy, partitions=2, extend=True, channels=["ch"])
    address = cluster.lookupd[0]
    *_, last = lines("export", source, str(file), "--lookupd", address)
    assert last == {"topic": source, "file": str(file), "messages": 2 * MESSAGES, "resumed": 0}
    assert [entry.number for entry in entries_of(file, 2 * MESSAGES - 2)] == [2 * MESSAGES - 1, 2 * MESSAGES]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    *_, last = lines("import", str(file), copy, "--keep-partitions", "--lookupd", address)
    assert last == {"topic": copy, "messages": 2 * MESSAGES, "resumed": 0}
    keyed = [row for row in stored(cluster, source) if row[3] is not None]
    assert [row for row in stored(cluster, copy) if row[3] is None] == [
        row for row in stored(cluster, source) if row[3] is None
    ]
    copied = [row[1:] for row in stored(cluster, copy) if row[3] is not None]
    assert sorted(copied, key=repr) == sorted((row[1:] for row in keyed), key=repr)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_bodies_are_exported_as_they_are_stored(cluster: Cluster, tmp_path: Path) -> None:
    topic, file = f"t_{token_hex(4)}", tmp_path / "all.jsonl"
    cluster.create_topic(topic, extend=True, channels=["ch"])
    with Producer(cluster.lookupd, compression="gzip") as producer:
        producer.publish(topic, b"x" * 50_000)
    lines("export", topic, str(file), "--lookupd", cluster.lookupd[0])
    (entry,) = entries_of(file, 0)
    message = outgoing_message(entry.record)
    assert isinstance(message.body, bytes)
    assert gzip.decompress(message.body) == b"x" * 50_000


def test_a_killed_export_continues_and_has_each_message_once(cluster: Cluster, source: str, tmp_path: Path) -> None:
    file = tmp_path / "all.parquet"
    words = ("export", source, str(file), "--rows", "7", "--lookupd", cluster.lookupd[0])
    with started(*words, cwd=None) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    assert not file.exists()
    other = run(*words[:-1], "h:1")
    assert (other.returncode, b"is the progress of an export of" in other.stderr) == (2, True)
    with Producer(cluster.lookupd) as producer:
        producer.publish_many(source, [b"later"] * 10, partition=0)  # the first run has fixed the end
    *_, last = lines(*words)
    assert last["messages"] == 2 * MESSAGES and last["resumed"] >= 7
    table = pq.read_table(file)
    places = list(zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True))
    assert places == [(partition, offset) for partition in range(2) for offset in range(MESSAGES)]


@pytest.mark.parametrize("count", [100, 2 * MESSAGES])
def test_a_killed_export_does_not_continue_with_another_topic_of_that_name(
    cluster: Cluster, source: str, tmp_path: Path, count: int
) -> None:
    """The file had messages of both topics."""
    file = tmp_path / "all.parquet"
    words = ("export", source, str(file), "--rows", "7", "--lookupd", cluster.lookupd[0])
    with started(*words, cwd=None) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    cluster.delete_topic(source)
    cluster.create_topic(source, partitions=2, extend=True, channels=["ch"])
    with Producer(cluster.lookupd) as producer:
        for partition in range(2):
            producer.publish_many(source, [b"of the new topic"] * count, partition=partition)
    found = run(*words)
    assert found.returncode == 2
    assert b"it was created again, or its leader has lost messages" in found.stderr
    shutil.rmtree(tmp_path / "all.parquet.progress")
    assert lines(*words)[-1]["messages"] == 2 * count


def test_a_part_ends_at_a_number_of_bytes(
    cluster: Cluster,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def in_pieces(*arguments: Any, **given: Any) -> Iterator[pa.RecordBatch]:
        for batch in read(*arguments, **given):
            for place in range(0, batch.num_rows, 10):
                sizes.append(batch.slice(place, 10).nbytes)
                yield batch.slice(place, 10)

    sizes, read = list[int](), nsqext.arrow.read
    monkeypatch.setattr(nsqext.arrow, "read", in_pieces)
    monkeypatch.setattr(export, "_PART_BYTES", 1 << 40)
    words = ("export", source, "--lookupd", cluster.lookupd[0])
    with pytest.raises(SystemExit, match="0"):
        main([*words, str(tmp_path / "whole.jsonl")])
    assert len(capsys.readouterr().out.splitlines()) == 3  # a part of each partition, and the end
    monkeypatch.setattr(export, "_PART_BYTES", 3 * max(sizes))
    with pytest.raises(SystemExit, match="0"):
        main([*words, str(tmp_path / "parts.jsonl")])
    ends = [json.loads(line)["exported"] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert len(ends) > 5
    assert [end for start, end in pairwise([0, *ends]) if end - start < 30 and end % MESSAGES] == []


def test_an_export_that_was_killed_while_it_deleted_its_progress_reads_again_what_is_missing(tmp_path: Path) -> None:
    """The parts that were left replaced the file."""
    progress = ExportProgress(tmp_path / "all.jsonl")

    def begin(topic: str, *names: str) -> list[tuple[int, int]]:
        for name in names:
            (progress.folder / f"0000-{name}.parquet").touch()
        progress.begin(topic, "h:1", lambda: {0: (5, 30), 1: (0, 0)})
        return [(part.start, part.end) for part in progress.parts()]

    assert begin("orders") == []
    assert begin("orders", "5-10", "20-30") == [(5, 10)]
    (progress.folder / "plan.json").unlink()
    assert begin("refunds") == []


def test_an_export_that_was_killed_before_its_first_part_begins_again(tmp_path: Path) -> None:
    """It exported the first messages of a topic that was created again, as many as the deleted topic had."""
    progress = ExportProgress(tmp_path / "all.jsonl")
    ends = [30, 50]

    def begin(topic: str = "orders") -> dict[int, tuple[int, int]]:
        return progress.begin(topic, "h:1", lambda: {0: (5, ends[0])})

    assert begin() == {0: (5, 30)}
    del ends[0]
    with pytest.raises(InvalidSetting, match="is the progress of an export of orders"):
        begin("refunds")
    assert begin() == {0: (5, 50)}
    (progress.folder / "0000-5-10.parquet").touch()
    ends[0] = 70
    assert begin() == {0: (5, 50)}


def test_an_export_that_cannot_be_written_leaves_no_file_and_continues(
    cluster: Cluster, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(target: Path, parts: Sequence[Path]) -> None:
        target.write_text("half of it")
        raise OSError("the disk is full")

    file = tmp_path / "all.csv"
    words = ("export", source, str(file), "--lookupd", cluster.lookupd[0])
    monkeypatch.setattr(export, "writer_of", lambda _: fill)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert not file.exists()
    assert lines(*words)[-1]["resumed"] == 2 * MESSAGES


def test_a_killed_import_continues_and_repeats_one_batch_at_most(cluster: Cluster, source: str, tmp_path: Path) -> None:
    file, copy, batch = tmp_path / "all.jsonl", f"copy_{token_hex(4)}", 11
    for name in (copy, f"{copy}_2"):
        cluster.create_topic(name, extend=True, channels=["ch"])
    address = cluster.lookupd[0]
    lines("export", source, str(file), "--lookupd", address)
    words = ("import", str(file), copy, "--batch", str(batch), "--lookupd", address)
    with started(*words, cwd=None) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    other = run(*words[:-1], "h:1")
    assert (other.returncode, b"is the progress of messages for" in other.stderr) == (2, True)
    content = file.read_bytes()
    middle = len(content) // 2
    inside = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for changed in (content + b"{}\n", content.replace(b"0-7", b"9-7"), content[:-3] + b"}}\n", inside):
        file.write_bytes(changed)
        other = run(*words)  # it would leave out the first messages of another file
        assert (other.returncode, b"files to continue, or delete it to begin again" in other.stderr) == (2, True)
    file.write_bytes(content)
    *_, second = lines("import", str(file), f"{copy}_2", "--lookupd", address)
    assert second["resumed"] == 0
    *_, last = lines(*words)
    assert last["messages"] == 2 * MESSAGES and last["resumed"] >= batch
    found = stored(cluster, copy)
    assert {row[1:] for row in found} == {row[1:] for row in stored(cluster, source)}
    assert 2 * MESSAGES <= len(found) <= 2 * MESSAGES + batch


def test_an_import_that_could_not_publish_begins_again(cluster: Cluster, source: str, tmp_path: Path) -> None:
    file, copy = tmp_path / "all.jsonl", f"copy_{token_hex(4)}"
    address = cluster.lookupd[0]
    lines("export", source, str(file), "--lookupd", address)
    words = ("import", str(file), copy, "--lookupd", address)
    assert run(*words).returncode == 2
    cluster.create_topic(copy, extend=True, channels=["ch"])
    *_, last = lines(*words)
    assert last == {"topic": copy, "messages": 2 * MESSAGES, "resumed": 0}


def test_an_import_whose_output_is_closed_has_not_succeeded(cluster: Cluster, source: str, tmp_path: Path) -> None:
    """Its exit code was 0, with a part of the messages."""
    file, copy = tmp_path / "all.jsonl", f"copy_{token_hex(4)}"
    cluster.create_topic(copy, extend=True, channels=["ch"])
    address = cluster.lookupd[0]
    lines("export", source, str(file), "--lookupd", address)
    with started("import", str(file), copy, "--batch", "1", "--lookupd", address) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 1
    assert 0 < len(stored(cluster, copy)) < 2 * MESSAGES


def test_a_file_for_other_programs_is_imported(cluster: Cluster, tmp_path: Path) -> None:
    copy = f"copy_{token_hex(4)}"
    cluster.create_topic(copy, extend=True, channels=["ch"])
    file = tmp_path / "given.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["body", "key", "tag", "headers"])
        writer.writerow(["one", "k", "blue", json.dumps({"user": "ann"})])
        writer.writerow(["two", "", "", ""])
    lines("import", str(file), copy, "--lookupd", cluster.lookupd[0])
    assert [(row[1], row[3], row[4]) for row in stored(cluster, copy)] == [(b"one", "k", "blue"), (b"two", None, None)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"body,key\nx,1\n\xff,2\n", "'utf-8' codec can't decode"),
        (b"body,key\na,1\ntwo, parts,1\n", "line 3: 3 columns instead of 2"),
        (b'body,key\n"a\nb",1\ncut', "line 4: 1 column instead of 2"),
        (b'body,key\n"cut', "unexpected end of data"),
        (b"body,body\na,b\n", "two columns of one name"),
        (b'body,headers\na,"' + b"[" * 99_999 + b'"\n', "line 2: maximum recursion depth"),
        (b'\xef\xbb\xbfbody,headers\na,"{""a"": true}"\nb,1\n', "headers must be a JSON object"),
    ],
)
def test_a_csv_file_that_is_not_whole_is_refused(tmp_path: Path, text: bytes, error: str) -> None:
    file = tmp_path / "given.csv"
    file.write_bytes(text)
    with pytest.raises(InvalidInput, match=error):
        [outgoing_message(entry.record) for entry in entries_of(file, 0)]


def test_a_record_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_bytes(b'{"body":"1"}\n{"headers":' + b"[" * 99_999 + b"\n")
    with pytest.raises(InvalidInput, match="line 2 is not JSON: maximum recursion depth"):
        list(entries_of(file, 0))


def test_messages_before_a_damaged_line_are_imported(cluster: Cluster, tmp_path: Path) -> None:
    """Those of the same batch were left out, and how many were published was not said."""
    copy, file = f"copy_{token_hex(4)}", tmp_path / "given.jsonl"
    cluster.create_topic(copy, extend=True, channels=["ch"])
    file.write_bytes(b'{"body":"1"}\n{"body":"2"}\n{"body":"3"}\n{"body":\n{"body":"5"}\n')
    found = run("import", str(file), copy, "--batch", "2", "--lookupd", cluster.lookupd[0])
    assert found.returncode == 2
    assert [json.loads(line) for line in found.stdout.splitlines()] == [{"imported": 2}, {"imported": 3}]
    assert b"given.jsonl, line 4 is not JSON" in found.stderr
    assert b"the messages before it are published" in found.stderr
    assert [row[1] for row in stored(cluster, copy)] == [b"1", b"2", b"3"]


def test_a_parquet_file_of_another_program_is_imported(cluster: Cluster, tmp_path: Path) -> None:
    copy = f"copy_{token_hex(4)}"
    cluster.create_topic(copy, extend=True, channels=["ch"])
    file = tmp_path / "given.parquet"
    headers = [[{"key": "user", "value": b"ann"}], None]  # as Polars writes a map
    pq.write_table(pa.table({"value": ["one", "two"], "key": [b"k", None], "headers": headers}), file)
    lines("import", str(file), copy, "--lookupd", cluster.lookupd[0])
    found = nsqext.arrow.read(copy, cluster.lookupd, columns=("value", "headers", "key")).read_all().to_pylist()
    assert found == [
        {"value": b"one", "headers": [("user", "ann")], "key": "k"},
        {"value": b"two", "headers": None, "key": None},
    ]


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"value": [5]}, "the column value is int64"),
        ({"value": ["x"], "trace_id": [1.5]}, "the column trace_id is double"),
        ({"value": ["x"], "hedaers": ["y"]}, "column hedaers is unknown"),
        ({"key": ["x"]}, "column value is missing"),
        ({"value": ["x", None]}, "row 2: the value is null"),
        ({"value": ["x"], "key": [b"\xff"]}, "row 1: a key or header is no text"),
    ],
)
def test_a_parquet_file_of_something_else_is_refused(
    tmp_path: Path, columns: Mapping[str, Sequence[object]], error: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "given.parquet")
    with pytest.raises(NsqError, match=error):
        list(entries_of(tmp_path / "given.parquet", 0))


def test_other_values_of_headers_are_json() -> None:
    found = outgoing_message(
        {"body": "x", "headers": {"paid": True, "sum": 1.5, "none": None, "name": "ann"}, "key": 7}
    )
    assert found.headers == {"paid": "true", "sum": "1.5", "none": "null", "name": "ann"}
    assert found.key == "7"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("export", "t", "all.txt"), "is of no known format"),
        (("export", "t", "there.csv"), "there.csv exists"),
        (("import", "missing.csv", "t"), "is not a file"),
        (("import", "there.csv", "t"), "has no column body"),
        (("import", "broken.parquet", "t"), "is not a Parquet file"),
        (("import", "all.txt", "t"), "is of no known format"),
    ],
)
def test_other_files_are_refused(cluster: Cluster, tmp_path: Path, words: tuple[str, ...], error: str) -> None:
    (tmp_path / "there.csv").write_text("a,b\n1,2\n")
    (tmp_path / "broken.parquet").write_text("no")
    result = run(*words, "--lookupd", cluster.lookupd[0], cwd=tmp_path)
    assert (result.returncode, error in result.stderr.decode()) == (2, True), result.stderr


def test_a_header_as_it_was_stored_takes_precedence_over_an_empty_key() -> None:
    found = outgoing_message({"body": "x", "key": "", "header_base64": "eyIjI2tleSI6IiJ9"})
    assert (found.header, found.key) == (b'{"##key":""}', None)


def test_an_empty_header_of_a_csv_file_concerns_trace_ids_without_headers(tmp_path: Path) -> None:
    file = tmp_path / "given.csv"
    file.write_text("body,trace_id,tag,header_base64\na,7,,\nb,7,blue,\nc,,,\n")
    assert [entry.record.get("header_base64") for entry in entries_of(file, 0)] == ["", None, None]
    file.write_text("body,trace_id\na,7\n")
    assert [entry.record.get("header_base64") for entry in entries_of(file, 0)] == [None]


def test_an_export_of_a_missing_topic_leaves_no_progress(cluster: Cluster, tmp_path: Path) -> None:
    """Beside which the next export would replace a file."""
    result = run("export", "missing", "all.csv", "--lookupd", cluster.lookupd[0], cwd=tmp_path)
    assert (result.returncode, [*tmp_path.iterdir()]) == (2, []), result.stderr
