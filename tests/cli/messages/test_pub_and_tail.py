"""`nsqext pub` and `tail`: inputs, filters, output formats, ^C, safe text at terminals."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import attrs
import pytest

from nsqext import Admin, OutgoingMessage
from nsqext.broker import Cluster
from nsqext.cli.command import parse_time
from nsqext.cli.connection import ServerAccess
from nsqext.cli.messages.pub import Columns, read_lines, read_rows
from nsqext.cli.messages.tail import Filter
from nsqext.errors import InvalidInput, InvalidSetting, escaped
from nsqext.types import Address
from tests.support.blocking_client import eventually as eventually_blocking
from tests.support.command_line import Process, Terminal, environment, lines, run, started, unexpected
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from nsqext import Consumer
    from nsqext.admin import TopicInfo, TopicStats


END = ("--start", "earliest", "--until-end")


def test_tail_prints_every_message_whatever_the_environment_sets_for_services(cluster: Cluster) -> None:
    topic, where = f"t_{token_hex(4)}", ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, extend=True, channels=["ch"])
    lines("pub", topic, "one", *where)
    found = lines("tail", topic, "--channel", "ch", "--until-end", *where, NSQEXT_TAG="eu", NSQEXT_SAMPLE_RATE="1")
    assert [one["body"] for one in found] == ["one"]


def test_tail_until_end_reads_a_topic_from_its_first_message(cluster: Cluster, topic: str) -> None:
    """It began at the end: it printed nothing, with exit code 0."""
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", *where)
    assert [one["body"] for one in lines("tail", topic, "--until-end", *where)] == ["one"]
    new = lines("tail", topic, "--channel", "new", "--until-end", *where)
    assert [one["body"] for one in new] == ["one"]
    lines("pub", topic, "two", *where)
    assert [one["body"] for one in lines("tail", topic, "--channel", "new", "--until-end", *where)] == ["two"]
    assert lines("tail", topic, "--start", "latest", "--until-end", *where) == []


def test_messages_survive_tail_and_pub(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", "--key", "k", "--tag", "canary", "--header", "user=42", "--trace-id", "7", *where)
    lines("pub", topic, stdin=b"\xff\n", NSQEXT_LOOKUPD=cluster.lookupd[0])
    copied = run("tail", topic, *END, *where).stdout
    other = f"t_{token_hex(4)}"
    cluster.create_topic(other, extend=True, channels=["ch"])
    assert lines("pub", other, "--format", "json", *where, stdin=copied) == [{"topic": other, "published": 2}]
    tagged, plain = sorted(lines("tail", other, *END, *where), key=lambda one: one["tag"] is None)
    assert (tagged["body"], tagged["key"], tagged["tag"], tagged["headers"], tagged["trace_id"]) == (
        "one",
        "k",
        "canary",
        {"user": "42"},
        7,
    )
    assert plain["body_base64"] == "/w=="


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("--format", "json"), b'\xef\xbb\xbf{"body":"a"}\r\n{"body_base64":"/w=="}\r\n'),
        (("--format", "lines"), b"\xef\xbb\xbfa\r\n\xff"),
        ((b"a", b"\xff"), b""),
    ],
)
def test_bytes_arrive_without_the_marks_of_an_editor(
    cluster: Cluster, topic: str, arguments: tuple[str | bytes, ...], given: bytes
) -> None:
    words = [word if isinstance(word, str) else os.fsdecode(word) for word in arguments]
    lines("pub", topic, *words, "--lookupd", cluster.lookupd[0], stdin=given)
    found = lines("tail", topic, *END, "--lookupd", cluster.lookupd[0])
    assert {one.get("body", one.get("body_base64")) for one in found} == {"a", "/w=="}


def test_options_win_over_the_properties_of_a_record(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    record = b'{"body": "a", "headers": {"user": "42", "own": "1"}, "tag": "a", "key": "k", "trace_id": 7}\n'
    options = ("--header", "user=43", "--tag", "b", "--key", "l", "--trace-id", "8")
    lines("pub", topic, "--format", "json", *options, *where, stdin=record)
    (found,) = lines("tail", topic, *END, *where)
    assert found["headers"] == {"user": "43", "own": "1"}
    assert (found["tag"], found["key"], found["trace_id"]) == ("b", "l", 8)


def test_large_numbers_of_headers_stay_exact(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    number = 123456789012345678901
    lines("pub", topic, "--format", "json", *where, stdin=json.dumps({"body": "x", "headers": {"n": number}}).encode())
    (found,) = lines("tail", topic, *END, *where)
    assert found["headers"] == {"n": str(number)}


def test_tags_are_filtered(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "tagged", "--tag", "canary", *where)
    lines("pub", topic, "plain", *where)
    for options in (END, ("--channel", "ch", "--count", "1")):
        (found,) = lines("tail", topic, *options, "--tag", "canary", *where)
        assert found["body"] == "tagged"


def test_tail_ends_after_the_count_of_matching_messages(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "other", "--partition", "0", *where)
    lines("pub", topic, "one", "two", "three", "--partition", "0", "--header", "k=v", *where)
    # two and three are received together
    found = lines("tail", topic, "--channel", "ch", "--count", "2", "--header", "k=v", "--partition", "0", *where)
    assert [one["body"] for one in found] == ["one", "two"]
    assert [one["body"] for one in lines("tail", topic, "--channel", "ch", "--until-end", *where)] == ["three"]


def test_rows_of_csv_with_key_and_headers(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    file = tmp_path / "orders.csv"
    file.write_text('customer,country,note\n4711,NL,"two\nlines"\n4712,DE,\n')
    columns = ("--format", "csv", "--key-column", "customer", "--header-column", "country")
    assert lines("pub", topic, "--file", str(file), *columns, *where) == [{"topic": topic, "published": 2}]
    found = {one["key"]: one for one in lines("tail", topic, *END, *where)}
    assert json.loads(found["4711"]["body"]) == {"customer": "4711", "country": "NL", "note": "two\nlines"}
    assert found["4712"]["headers"] == {"country": "DE"}
    empty = Columns("customer", ["country"], "note").message({"customer": "", "country": "", "note": "x"})
    assert empty == OutgoingMessage(b"x")
    missing = run("pub", topic, "--file", str(file), "--format", "csv", "--key-column", "name", *where)
    assert (missing.returncode, b"has no column 'name'" in missing.stderr) == (2, True)


def test_a_whole_file_is_one_message(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    (tmp_path / "body").write_bytes(b"first\nsecond\n")
    lines("pub", topic, "--file", str(tmp_path / "body"), "--format", "whole", *where)
    lines("pub", topic, *where, stdin=b"with a space \r\n\n")
    assert {one["body"] for one in lines("tail", topic, *END, *where)} == {"first\nsecond\n", "with a space "}


def test_options_of_messages_as_arguments(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    found = [lines("pub", topic, "x", "--partition", number, *where)[0]["partition"] for number in "011"]
    assert found == [0, 1, 1]
    assert run("pub", topic, "x", "--delay", "-1", *where).returncode == 2
    failed = run("pub", "no_such_topic", *where, stdin=b"x\n")
    assert (failed.returncode, json.loads(failed.stdout)["published"]) == (2, 0)


@pytest.mark.parametrize(
    ("form", "given", "error", "published"),
    [
        ("csv", b"\xef\xbb\xbfa,b\n1,2\n3\n", "line 3: 1 column instead of 2", 1),
        ("csv", b"a,b\n1,2\n\xff,2\n", "line 3: 'utf-8' codec can't decode byte 0xff", 1),
        ("csv", b"a,a\n1,2\n", "the file has two columns of one name", 0),
        (
            "json",
            b'{"body":"x"}\n{"boby":"y"}\n',
            "line 2: a message record has no member 'boby': did you mean body?",
            1,
        ),
        ("json", b'{"body":"x"}\n\n{"body":"y"}\n{"body":""}\n', "line 4: a body cannot be empty", 2),
        ("json", b'{"body":"x"}\n{"headers":' + b"[" * 99_999 + b"\n", "line 2: maximum recursion depth", 1),
        ("lines", b"one\n" + b"x" * (2 << 20), "line 2: a body of 2097152 bytes", 1),
    ],
)
def test_an_input_that_ends_with_an_error(
    cluster: Cluster, topic: str, form: str, given: bytes, error: str, published: int
) -> None:
    found = run("pub", topic, "--format", form, "--lookupd", cluster.lookupd[0], stdin=given)
    assert (found.returncode, json.loads(found.stdout)["published"]) == (2, published)
    assert found.stderr.decode().startswith(f"nsqext: {error}")
    assert len(lines("tail", topic, *END, "--lookupd", cluster.lookupd[0])) == published


def test_the_lines_of_failed_messages_are_named(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    failed = run("pub", "no_such_topic", *where, stdin=b"1\n2\n\n4\n6\n")
    assert json.loads(failed.stdout)["failed_lines"] == "1-2, 4-5"
    many = run("pub", "no_such_topic", *where, stdin=b"x\n\n" * 50)
    assert json.loads(many.stdout)["failed_lines"].endswith("37, 39, …")


def test_a_column_of_a_megabyte(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    given = b"a,b\n1," + b"x" * 500_000 + b"\n"
    lines("pub", topic, "--format", "csv", "--body-column", "b", *where, stdin=given)
    assert len(lines("tail", topic, *END, *where)[0]["body"]) == 500_000


def test_filters_and_formats(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    for number in range(4):
        options = ("--key", ("k1", "k3")[number % 2], "--header", f"user={number}")
        lines("pub", topic, f"m{number}", *options, *where)
    by_key = lines("tail", topic, *END, "--key", "k3", *where)
    assert sorted(one["body"] for one in by_key) == ["m1", "m3"]
    (by_header,) = lines("tail", topic, *END, "--header", "user=2", "--since", "1h", *where)
    assert by_header["body"] == "m2"
    assert lines("tail", topic, *END, "--until", "1h", *where) == []
    swapped = run("tail", topic, "--since", "1h", "--until", "2h", *where)  # it would wait for ever
    assert (swapped.returncode, b"--since is the earlier time" in swapped.stderr) == (2, True)
    assert len(lines("tail", topic, "--since", "1h", "--until-end", *where)) == 4
    partitions = [
        [(one["partition"], one["body"]) for one in lines("tail", topic, *END, "--partition", number, *where)]
        for number in ("0", "1")
    ]
    assert [{number for number, _ in found} for found in partitions] == [{0}, {1}]
    assert sorted(body for found in partitions for _, body in found) == ["m0", "m1", "m2", "m3"]
    template = "{key}:{headers[user]}:{attempts:s}:{body}"
    formatted = run("tail", topic, *END, "--header", "user=3", "--format", template, *where)
    assert formatted.stdout == b"k3:3:1:m3\n"
    raw = run("tail", topic, *END, "--raw", *where)
    assert sorted(raw.stdout.splitlines()) == [b"m0", b"m1", b"m2", b"m3"]


@pytest.mark.parametrize(("bodies", "given"), [((), b"a\n" * 21), (("a",) * 21, b"")], ids=["lines", "arguments"])
def test_the_rate_is_limited(cluster: Cluster, topic: str, bodies: tuple[str, ...], given: bytes) -> None:
    began = time.monotonic()
    lines("pub", topic, *bodies, "--rate", "20", stdin=given, NSQEXT_LOOKUPD=cluster.lookupd[0])
    assert time.monotonic() - began >= 1.0


def test_control_characters_are_escaped_at_a_terminal(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "\x1b]0;owned\x07", "--header", "user=\x1b[2J", *where)
    for options in ((), ("--raw",), ("--format", "{body} {headers[user]}")):
        with Terminal("tail", topic, *END, *options, *where) as terminal:
            assert terminal.end() == 0
        assert "\\x1b]0;owned\\x07" in terminal.shown
        assert "\x1b" not in terminal.shown


@pytest.mark.parametrize("text", ["a\x1bb", "\x9b", "\r", "\u202e", "\u2028", "\x7f"])
def test_escaped_text_is_printable(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped("žluťoučký kůň 🐎") == "žluťoučký kůň 🐎"


def test_ctrl_c_ends_pub_that_waits_for_typed_lines(cluster: Cluster, topic: str) -> None:
    with Terminal("pub", topic, "--lookupd", cluster.lookupd[0]) as terminal:
        terminal.type("typed\n")
        (found,) = lines("tail", topic, "--channel", "ch", "--count", "1", "--lookupd", cluster.lookupd[0])
        terminal.type("\x03")
        assert terminal.end() == 130
    assert found["body"] == "typed"
    assert "Fatal Python error" not in terminal.shown
    assert "Traceback" not in terminal.shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_publishes_what_was_read_and_says_how_much(cluster: Cluster, topic: str, number: int) -> None:
    """It printed nothing: how much of a long input was stored was not known."""
    where = ("--lookupd", cluster.lookupd[0])
    with started("pub", topic, *where) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\n\ntwo\nthree\nhalf of a line")
        process.stdin.flush()
        for _ in range(3):
            lines("tail", topic, "--channel", "ch", "--count", "1", *where)
        process.send_signal(number)
        out, err = process.communicate()
    assert json.loads(out) == {"topic": topic, "published": 3, "last_line": 4}
    assert (process.returncode, unexpected(err)) == (128 + number, b"")


def test_a_signal_ends_a_wait_for_a_cluster_that_stores_nothing() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", channels=["ch"])
        cluster.kill("n1")
        with started("pub", "orders", "--lookupd", cluster.lookupd[0]) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(b"one\ntwo\n")
            process.stdin.close()
            assert process.stderr.readline() == b"nsqext: waiting for orders to store messages\n"
            process.send_signal(signal.SIGINT)
            found = json.loads(process.stdout.read())
            process.wait(30)
    assert (found["published"], found["failed"], found["failed_lines"]) == (0, 2, "1-2")
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("tail", "t", "--raw", "--format", "{body}"), "contradict each other"),
        (("tail", "t", "--format", "{colour}"), "cannot be used"),
        (("tail", "t", "--since", "yesterday"), "cannot be parsed"),
        (("tail", "t", "--tag", "a", "--channel", "c", "--until-end"), "cannot be combined with --tag"),
        (("pub", "t", "--key-column", "a"), "need --format csv"),
        (("pub", "t", "body", "--header", "a=1", "--header", "a=2"), "--header a is given twice"),
        (("pub", "t", "--file", "/"), "/ is a folder"),
        (("pub", "t", "body", "--format", "json"), "cannot be combined with messages"),
        (("tail", "t", "--since", "-5m"), "cannot be parsed"),
        (("tail", "t", "--start", "2999-01-01"), "is not the time of a message"),
        (("tail", "t", "--start", "0001-01-01"), "0001-01-01"),
        (("trace", "t", "banana"), "a message id of 32 hexadecimal digits"),
    ],
)
def test_mistakes(words: tuple[str, ...], reason: str) -> None:
    done = run(*words, "--lookupd", "h:1")
    assert (done.returncode, reason in done.stderr.decode()) == (2, True), done.stderr


def test_times() -> None:
    assert parse_time("1.5") == 1_500_000_000
    assert parse_time("1970-01-01T00:00:02+00:00") == 2_000_000_000
    began = time.time_ns()
    assert began - 1000 <= parse_time("1m") + 60_000_000_000 <= time.time_ns() + 1000
    for text in ("soon", "-5m", "1e400s", "nans"):
        with pytest.raises(InvalidSetting):
            parse_time(text)


def test_a_filter_passes_messages_that_meet_all_conditions() -> None:
    record = {"headers": {"a": "b", "c": "d"}, "timestamp": 5, "tag": None, "key": None, "trace_id": 0}
    assert Filter().takes(record)
    assert not Filter(until="0.000000005").takes(record)
    assert Filter(header=["a=b", "c=d"]).takes(record)
    assert not Filter(header=["a=b", "c=e"]).takes(record)
    assert not Filter(header=["a=e", "c=d"]).takes(record)
    assert not Filter(header=["e=f"]).takes(record)


def _consumer(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[ServerAccess, Consumer, list[None]]:
    """Return a consumer of an empty topic that counts its stops, and does not stop."""
    connection = ServerAccess(cluster.lookupd[0])
    consumer = connection.consumer(topic, "ch")
    stops: list[None] = []
    monkeypatch.setattr(consumer, "stop", lambda: stops.append(None))
    return connection, consumer, stops


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_until_end_waits_until_all_partitions_are_consumed(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    describe = Admin.topic

    async def look(admin: Admin, name: str) -> TopicInfo:
        looks.append(name)
        return await describe(admin, name)

    monkeypatch.setattr(Admin, "topic", look)
    connection, consumer, stops = _consumer(cluster, topic, monkeypatch)  # not moved to its start: not subscribed
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.stop_when_drained, consumer, [])
        await eventually(lambda: len(looks) > 2 or bool(stops))
        assert not stops
        async with consumer:
            await eventually(lambda: bool(stops))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("empty", [0, 1], ids=["at once", "after one look at an empty channel"])
async def test_until_end_waits_for_the_channel_of_a_node_that_does_not_respond(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch, empty: int
) -> None:
    looks: list[str] = []
    silent = [True]
    count = Admin.stats

    async def look(admin: Admin, *names: str) -> TopicStats:
        looks.append(names[0])
        misses = silent[0] and len(looks) > empty
        found = await count(admin, *names)
        return attrs.evolve(found, unreachable=(Address("127.0.0.1", 1),)) if misses else found

    monkeypatch.setattr(Admin, "stats", look)
    connection, consumer, stops = _consumer(cluster, topic, monkeypatch)
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(connection.stop_when_drained, consumer, [])
        await eventually(lambda: len(looks) > 3 or bool(stops))
        assert not stops
        silent[0], before = False, len(looks)
        await eventually(lambda: bool(stops))
        assert len(looks) >= before + 2, "the redesigned NSQ may move a new channel after its response"


def test_the_end_of_a_partition_does_not_wait_for_the_others(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    for partition in "01":
        lines("pub", topic, f"in {partition}", "--partition", partition, *where)
    found = lines("tail", topic, "--channel", "ch", "--partition", "0", "--until-end", *where)
    assert [one["body"] for one in found] == ["in 0"]


@pytest.mark.parametrize("words", ["tail t", "record t --to {folder}", "relay t --to copy"])
def test_the_end_is_behind_stored_messages_that_a_busy_node_does_not_deliver_yet(tmp_path: Path, words: str) -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        cluster.create_topic("copy", channels=["ch"])
        where = ("--channel", "ch", "--lookupd", cluster.lookupd[0])
        lines("pub", "t", "delivered", *where[2:])
        cluster.faults.hold_flush("n1")
        lines("pub", "t", "stored", *where[2:])
        assert lines("lag", "t", "ch", *where[2:])[0]["lag"] == 2
        with started(*words.format(folder=tmp_path).split(), "--until-end", *where) as process:
            eventually_blocking(lambda: lines("lag", "t", "ch", *where[2:])[0]["lag"] == 1)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
            cluster.faults.heal()
            assert process.wait(20) == 0
        assert lines("lag", "t", "ch", *where[2:])[0]["lag"] == 0


@pytest.mark.parametrize("words", ["tail {topic}", "record {topic} --to {folder}", "relay {topic} --to {topic}_copy"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_end_is_no_success(cluster: Cluster, tmp_path: Path, words: str, number: int) -> None:
    topic, where = f"t_{token_hex(4)}", ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, channels=["ch"])
    lines("channel", "pause", topic, "ch", "--yes", *where)
    lines("pub", topic, "never delivered", *where)
    line = words.format(topic=topic, folder=tmp_path)
    with started(*line.split(), "--channel", "ch", "--until-end", *where) as process:
        while not any(one["consumers"] for one in lines("stats", topic, *where)):
            assert process.poll() is None
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 128 + number


def test_json_at_a_terminal_has_no_control_characters(cluster: Cluster, topic: str) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    body = "\x9b2J\x1b[2J\u202e\U000e0001\x7f"
    lines("pub", topic, body, *where)
    with Terminal("tail", topic, *END, "--json", *where) as terminal:
        assert terminal.end() == 0
    (line,) = terminal.shown.splitlines()
    assert line.isprintable()
    assert json.loads(line)["body"] == body


def test_lines_are_read_whatever_the_chunks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(path: Path) -> list[bytes]:
        with path.open("rb") as file:
            return [line async for line in read_lines(file.fileno())]

    monkeypatch.setattr("nsqext.cli.messages.pub._CHUNK", 3)
    for content in (b"", b"\n", b"a\nbb\n\nccccccc\nd", b"abc", b"abc\n", b"\n\nabcdef\n"):
        (tmp_path / "lines").write_bytes(content)
        assert anyio.run(read, tmp_path / "lines") == content.splitlines(keepends=True)
    (tmp_path / "lines").write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n\xef\xbb\xbfc")
    assert anyio.run(read, tmp_path / "lines") == [b"a\n", b"\xef\xbb\xbfb\n", b"\xef\xbb\xbfc"], "one mark of a file"
    assert anyio.run(read, Path("/dev/null")) == [], "it cannot be polled"
    monkeypatch.setattr("nsqext.cli.messages.pub._LONGEST_LINE", 5)
    (tmp_path / "lines").write_bytes(b"short\nlonger\n")
    with pytest.raises(InvalidInput, match="--format whole"):
        anyio.run(read, tmp_path / "lines")


def test_tail_ends_if_its_output_cannot_be_written(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", *where)
    errors = tmp_path / "errors"
    with Path("/dev/full").open("wb") as full, errors.open("wb") as written:
        words = ("tail", topic, "--channel", "ch", *where)
        with Process(words, environment(), output=(full.fileno(), written.fileno())) as tail:
            assert tail.wait(30) == 2
    assert errors.read_text().endswith("nsqext: [Errno 28] No space left on device\n")
    assert "Traceback" not in errors.read_text()
    assert [one["body"] for one in lines("tail", topic, "--channel", "ch", "--count", "1", *where)] == ["one"]


@pytest.mark.parametrize(
    ("content", "where"),
    [(b'a,b\n"1\n1",2\n3,5" pipe\n6,7\n', "before the end"), (b'a,b\n"1\n1",2\n3,"' + b"x\n" * 9, "within")],
)
def test_a_quote_that_is_not_closed_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, where: str
) -> None:
    async def read() -> list[list[str]]:
        with (tmp_path / "rows").open("rb") as file:
            return [row async for _, row in read_rows(file.fileno())]

    monkeypatch.setattr("nsqext.cli.messages.pub._LONGEST_LINE", 20)
    monkeypatch.setattr(csv, "field_size_limit", lambda limit: None)  # of the whole process
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(InvalidInput, match=f"line 4: a quoted field does not end {where}"):
        anyio.run(read)


def test_a_message_that_cannot_be_printed_stays_in_the_channel(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["ch"])
    where = ("--channel", "ch", "--lookupd", cluster.lookupd[0])
    with started("tail", topic, *where) as tail:
        lines("pub", topic, "one", *where[2:])
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline())["body"] == "one"
        tail.stdout.close()
        lines("pub", topic, "two", *where[2:])
        tail.wait(timeout=60)
    assert [one["body"] for one in lines("tail", topic, *where, "--until-end")] == ["two"]
