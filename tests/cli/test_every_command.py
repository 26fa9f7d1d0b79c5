"""Every command as a process: once in a pipe, where it prints JSON lines, and once under a pseudo terminal, as text."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from secrets import token_hex
from subprocess import CompletedProcess

import pytest
from attrs import frozen

from docs.commands_table import commands
from nsqext.broker import Cluster
from nsqext.cli import PROGRAMS
from nsqext.delays import DelayStore
from nsqext.protocol.delay_record import DelayedMessage
from nsqext.sync import Producer
from nsqext.transactions import Outbox, OutboxStore
from tests.support.command_line import Terminal, run, started


@frozen
class Place:
    """Values that the arguments of a command may contain.

    Attributes:
        lookupd: lookup address of a redesigned cluster.
        original: lookup address of an original cluster.
        node: TCP address of the redesigned node.
        http: its HTTP address.
        topic: an extend topic with the channel ``ch`` and one message.
        other: a topic with the channel ``ch``.
        folder: an empty folder.
    """

    lookupd: str
    original: str
    node: str
    http: str
    topic: str
    other: str
    folder: Path


ENDING = {
    "topic list": ("topic list", "partitions"),
    "topic show": ("topic show {topic}", "1 partition, 1 replica"),
    "topic create": ("topic create {topic}_made", "_made is created"),
    "topic delete": ("topic delete {topic} --yes", "is deleted"),
    "topic upgrade": ("topic upgrade {topic} --yes", "is upgraded"),
    "topic expand": ("topic expand {topic} --partitions 1 --yes", "is expanded"),
    "topic set": ("topic set {topic} --retention-days 7 --yes", "is changed"),
    "topic trace": ("topic trace {topic} --channel ch --yes", "is traced"),
    "topic tombstone": ("topic tombstone {topic} {http} --yes", "is hidden"),
    "node list": ("node list", "reachable"),
    "node disable-writes": ("node disable-writes --ordered-only --yes", "writes to ordered topics are disabled"),
    "node enable-writes": ("node enable-writes --yes", "writes are enabled"),
    "node log-level": ("node log-level debug --yes", "the log level is debug"),
    "node option": ("node option {node} msg_timeout", "60000000000"),
    "topic empty": ("topic empty {topic} --yes", "is emptied"),
    "topic pause": ("topic pause orders --lookupd {original} --yes", "is paused"),
    "topic unpause": ("topic unpause orders --lookupd {original} --yes", "is unpaused"),
    "channel list": ("channel list {topic}", "in flight"),
    "channel create": ("channel create {topic} more", "is created"),
    "channel delete": ("channel delete {topic} ch --yes", "is deleted"),
    "channel set": ("channel set {topic} ch --rate-limit-kib 1024 --yes", "is changed"),
    "channel limit-consumers": ("channel limit-consumers {topic} ch 10 --yes", "is limited"),
    "channel redeliver": ("channel redeliver {topic} ch --yes", "is redelivered"),
    "channel empty-delayed": ("channel empty-delayed {topic} ch --yes", "is emptied"),
    "channel deliver-delayed": ("channel deliver-delayed {topic} ch --yes", "is delivered"),
    "channel pause": ("channel pause {topic} ch --yes", "is paused"),
    "channel unpause": ("channel unpause {topic} ch --yes", "is unpaused"),
    "channel empty": ("channel empty {topic} ch --yes", "is emptied"),
    "channel skip": ("channel skip {topic} ch --yes", "is skipped"),
    "channel unskip": ("channel unskip {topic} ch --yes", "is unskipped"),
    "channel seek": ("channel seek {topic} ch earliest --yes", "is moved"),
    "pub": ("pub {topic} hello", "stored in {topic}[0]"),
    "tail": ("tail {topic} --channel ch --count 1", "{topic}[0] key=k"),
    "record": ("record {topic} --to {folder} --channel ch --until-end", "1 message of {topic} recorded"),
    "replay": ("replay {folder}/one.jsonl --topic {topic}", "1 message replayed"),
    "export": ("export {topic} {folder}/all.parquet", "1 message of {topic} exported"),
    "import": ("import {folder}/one.jsonl {topic}", "1 message imported into {topic}"),
    "stats": ("stats {topic}", "per second"),
    "lag": ("lag {topic} --max 1", "deferred"),
    "doctor": ("doctor", "accepts connections"),
    "check": ("check {topic} ch", "healthy"),
    "lookup": ("lookup {topic}", "partition 0:"),
    "relay": ("relay {topic} --channel ch --to {other} --until-end", "1 message of {topic} relayed"),
    "delay list": ("delay list --store {folder}/delayed", "order-17"),
    "delay cancel": ("delay cancel order-17 --store {folder}/delayed --yes", "order-17 cancelled"),
    "delay discard": ("delay discard --store {folder}/delayed --yes", "0 records deleted"),
    "outbox status": ("outbox status --database sqlite:///{folder}/shop.db", "0 messages waiting"),
    "outbox list": ("outbox list --database sqlite:///{folder}/orders.db", "order-17"),
    "outbox cancel": ("outbox cancel order-17 --database sqlite:///{folder}/orders.db --yes", "order-17 cancelled"),
    "trace": ("trace {topic} 7", "trace id 7: one"),
    "deadletters replay": ("deadletters replay {other} --channel ch --idle 0.1", "0 dead letters of {other}"),
    "config set": ("config set made nsq://127.0.0.1:1", "context made is nsq://127.0.0.1:1"),
    "config list": ("config list", "current"),
    "config use": ("config use here", "here is the current context"),
    "config delete": ("config delete here --yes", "context here is deleted"),
    "key-ranges": ("key-ranges {topic} keyed --once", "no consumer"),
    "bench": ("bench {topic} --channel ch --count 20", "consume: 20 messages"),
    "spark": ("spark anchors list {topic}", "{topic}[0] ch: at"),
}
"""Arguments of commands that exit by themselves, and their output at a terminal."""

TABLES = {
    "demo": ("demo --nodes 1 --partitions 1", "no violations"),
    "outbox sql": ("outbox sql --dialect sqlite", "CREATE TABLE"),
    "app schema": ("app schema service:app", '"asyncapi": "3.0.0"'),
}
"""Arguments of commands that print text in pipes too."""

RUNNING = {
    "top": ("top {topic} --interval 0.1", "sorted by lag", 130),
    "broker": ("broker --nodes 1", "ready", 0),
    "delay run": ("delay run --store {folder}/delayed", "waiting", 0),
    "outbox relay": ("outbox relay --database sqlite:///{folder}/shop.db", "waiting", 0),
    "web": ("web --port 0", "http://127.0.0.1:", 0),
    "run": ("run service:app", "all workers are ready: 1", 0),
    "nsqd": ("nsqd -tcp-address=127.0.0.1:0 -http-address=127.0.0.1:0", "HTTP: listening on 127.0.0.1:", 0),
    "nsqlookupd": ("nsqlookupd -tcp-address=127.0.0.1:0 -http-address=127.0.0.1:0", "HTTP: listening on", 0),
}
"""Arguments of commands that run until a signal, their output once they run, and their exit code."""

CONFIRMED = {
    "channel finish": "channel finish orders billing 0000000000000002000000000000002a --yes",
    "node remove": "node remove 127.0.0.1:4150 --yes",
    "topic move": "topic move orders 0 127.0.0.1:4150 127.0.0.1:4152 --yes",
    "node option": "node option 127.0.0.1:4150 verbose --set true --yes",
    "config set": "config set here nsq://127.0.0.1:2 --yes",
    "spark": "spark anchors delete orders --channel query --yes",
    "outbox status": "outbox status --database sqlite:///kept.db --discard 0 --yes",
}
"""Arguments of commands that change something, where those of ENDING change nothing or are missing."""

UNCONFIRMED = {
    *("topic list", "topic show", "topic create", "channel list", "channel create", "node list", "stats", "lag", "top"),
    *(
        "doctor",
        "check",
        "lookup",
        "trace",
        "key-ranges",
        "pub",
        "tail",
        "record",
        "replay",
        "relay",
        "export",
        "import",
    ),
    *("deadletters replay", "delay run", "delay list", "config list", "config use"),
    *("outbox relay", "outbox sql", "outbox list"),
    *("bench", "demo", "broker", "web", "run", "app schema"),
}
"""Commands that read, add, publish, consume or serve. Every other command changes or deletes something."""

CHANGING = sorted({name for name, _ in commands()} - UNCONFIRMED)

REVERSIBLE = {
    *("topic set", "topic move", "topic trace", "topic tombstone", "topic pause", "topic unpause"),
    *("channel set", "channel limit-consumers", "channel pause", "channel unpause", "channel unskip"),
    *("node enable-writes", "node log-level", "node option"),
}
"""Commands that do not ask at a terminal: another call undoes them, and no message is lost."""

IRREVERSIBLE = [name for name in CHANGING if name not in REVERSIBLE]

ELSEWHERE = {"channel finish", "node remove", "topic move"}
"""Commands that need a consumer or two nodes: tests/cli/admin."""

SERVICE = """
import nsqext

app = nsqext.App()

@app.handler({topic!r}, "ch")
async def handle(body: str) -> None:
    pass
"""


def test_the_tables_name_every_command() -> None:
    assert {*ENDING, *TABLES, *RUNNING, *ELSEWHERE} == {*(name for name, _ in commands()), *PROGRAMS}


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[Cluster, Cluster, Producer]]:
    """A redesigned cluster with a producer, and an original one with the topic ``orders``; both have a topic."""
    with (
        Cluster(nodes=1) as cluster,
        Cluster(nodes=1, generation="original") as original,
        Producer(cluster.lookupd) as producer,
    ):
        cluster.create_topic("first", channels=["ch"])
        original.create_topic("orders", channels=["ch"])
        yield cluster, original, producer


@pytest.fixture
def place(request: pytest.FixtureRequest, clusters: tuple[Cluster, Cluster, Producer], tmp_path: Path) -> Place:
    """What the command of the test names: fresh topics and files."""
    cluster, original, producer = clusters
    topic, other = f"t_{token_hex(4)}", f"t_{token_hex(4)}"
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else "top"
    text = (ENDING | TABLES | RUNNING)[name][0] + (SERVICE if name in ("run", "app schema") else "")
    if "{topic" in text:
        cluster.create_topic(topic, extend=True, channels=["ch", "keyed"])
        producer.publish(topic, b"one", key="k", trace_id=7)
    if "{other}" in text:
        cluster.create_topic(other, extend=True, channels=["ch"])
    if "one.jsonl" in text:
        (tmp_path / "one.jsonl").write_text('{"body": "one"}\n')
    if "/delayed" in text:
        with DelayStore(tmp_path / "delayed") as store:
            store.add([(DelayedMessage(identity="order-17", topic=topic, due=2**42), b"later")])
    if "/shop.db" in text:
        OutboxStore(f"sqlite:///{tmp_path}/shop.db", create=True).close()
    if "/orders.db" in text:
        add_order(tmp_path)
    (tmp_path / "service.py").write_text(SERVICE.format(topic=topic))
    (tmp_path / "contexts.toml").write_text('[contexts]\n"here" = "nsq://127.0.0.1:1"\n')
    (node,) = cluster.nodes.values()
    return Place(cluster.lookupd[0], original.lookupd[0], node.tcp, node.http, topic, other, tmp_path)


def add_order(folder: Path) -> None:
    """Make an outbox in which a message waits."""
    OutboxStore(f"sqlite:///{folder}/orders.db", create=True).close()
    with closing(sqlite3.connect(folder / "orders.db")) as connection, connection:
        Outbox().add(connection, "orders", b"later", identity="order-17")


def prepared(text: str, place: Place) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a command."""
    variables = {"NSQEXT_LOOKUPD": place.lookupd, "NSQEXT_CONTEXTS_FILE": str(place.folder / "contexts.toml")}
    return [word.format(**_members(place)) for word in text.split()], variables


def _members(place: Place) -> dict[str, object]:
    return {name: getattr(place, name) for name in ("lookupd", "original", "node", "http", "topic", "other", "folder")}


def piped(text: str, place: Place) -> CompletedProcess[bytes]:
    """Run a command to its end, in pipes."""
    words, variables = prepared(text, place)
    return run(*words, stdin=b"", cwd=place.folder, limit=50.0, **variables)


@pytest.mark.parametrize("name", ENDING)
def test_a_command_prints_json_lines_into_a_pipe(name: str, place: Place) -> None:
    done = piped(ENDING[name][0], place)
    assert (done.returncode, done.stderr) == (0, b"")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records
    assert all(isinstance(record, dict) for record in records)


@pytest.mark.parametrize("name", ENDING | TABLES)
def test_a_command_prints_text_at_a_terminal(name: str, place: Place) -> None:
    text, shown = (ENDING | TABLES)[name]
    words, variables = prepared(text, place)
    with Terminal(*words, cwd=place.folder, **variables) as terminal:
        assert terminal.end() == 0, terminal.shown
    assert shown.format(**_members(place)) in terminal.shown


@pytest.mark.parametrize("name", TABLES)
def test_a_command_prints_text_into_a_pipe(name: str, place: Place) -> None:
    text, shown = TABLES[name]
    done = piped(text, place)
    assert (done.returncode, done.stderr, shown in done.stdout.decode()) == (0, b"", True)


@pytest.mark.parametrize("name", RUNNING)
def test_a_command_runs_at_a_terminal_until_ctrl_c(name: str, place: Place) -> None:
    text, shown, code = RUNNING[name]
    words, variables = prepared(text, place)
    with Terminal(*words, cwd=place.folder, **variables) as terminal:
        terminal.wait_for(shown)
        terminal.type("\x03")
        assert terminal.end() == code
    assert "Traceback" not in terminal.shown


@pytest.mark.parametrize("name", [name for name in RUNNING if name != "top"])
def test_a_command_runs_in_a_pipe_until_sigterm(name: str, place: Place) -> None:
    text, shown, code = RUNNING[name]
    words, variables = prepared(text, place)
    with started(*words, cwd=place.folder, **variables) as process:
        stream = process.stdout if name in ("broker", "delay run", "outbox relay", "web") else process.stderr
        assert stream is not None
        assert any(shown in line.decode() for line in stream)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    assert (process.wait(), b"Traceback" in output + errors) == (code, False)


def test_every_command_that_changes_or_deletes_something_has_the_option_yes() -> None:
    asking = {name for name, command in commands() if any("--yes" in one.opts for one in command.params)}
    assert asking == {*CHANGING}


def nowhere(name: str, folder: Path, address: str = "127.0.0.1:1") -> tuple[list[str], dict[str, str]]:
    """Return the arguments of a command and its environment, in which no server responds."""
    folder.mkdir(exist_ok=True)
    OutboxStore(f"sqlite:///{folder}/kept.db", create=True).close()
    OutboxStore(f"sqlite:///{folder}/shop.db", create=True).close()
    add_order(folder)
    with DelayStore(folder / "delayed") as store:
        store.add([(DelayedMessage(identity="order-17", topic="orders", due=2**42), b"later")])
    (folder / "contexts.toml").write_text('[contexts]\n"here" = "nsq://127.0.0.1:1"\n')
    (folder / "one.jsonl").write_text('{"body": "one"}\n')
    (folder / "service.py").write_text(SERVICE.format(topic="orders"))
    place = Place(address, address, address, address, "orders", "other", folder)
    return prepared(CONFIRMED.get(name) or (ENDING | TABLES | RUNNING)[name][0], place)


def unconfirmed(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of a command without --yes, and its environment; see `nowhere`."""
    words, variables = nowhere(name, folder)
    return [word for word in words if word != "--yes"], variables


@pytest.mark.parametrize("name", CHANGING)
def test_without_a_terminal_a_command_that_changes_something_is_refused_and_names_yes(
    name: str, tmp_path: Path
) -> None:
    words, variables = unconfirmed(name, tmp_path)
    done = run(*words, stdin=b"", cwd=tmp_path, limit=50.0, **variables)  # before it connects
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"not done without a confirmation" in done.stderr
    assert b"give --yes" in done.stderr
    with DelayStore(tmp_path / "delayed") as store:
        assert store.count() == 1
    assert (tmp_path / "contexts.toml").read_text() == '[contexts]\n"here" = "nsq://127.0.0.1:1"\n'


def test_a_retry_of_what_an_outbox_set_aside_needs_yes_too(tmp_path: Path) -> None:
    words, variables = unconfirmed("outbox status", tmp_path)
    done = run(*words[:-2], "--retry", stdin=b"", cwd=tmp_path, limit=50.0, **variables)
    assert (done.returncode, b"give --yes" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", IRREVERSIBLE)
def test_at_a_terminal_a_change_that_cannot_be_undone_is_not_done_after_a_no(name: str, tmp_path: Path) -> None:
    words, variables = unconfirmed(name, tmp_path)
    with Terminal(*words, cwd=tmp_path, **variables) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("n\n")
        assert terminal.end() == 1
    assert "Aborted" in terminal.shown


ALONE = {
    *("delay list", "delay cancel", "delay discard", "config set", "config list", "config use"),
    *("outbox sql", "outbox status", "outbox list", "outbox cancel"),
    *("config delete", "demo", "broker", "web", "top", "app schema"),
}
"""Commands that wait for no other server, here; `top` shows errors in its table."""


def test_each_other_command_says_what_it_waits_for_while_no_server_responds(tmp_path: Path) -> None:
    waiting = [name for name, _ in commands() if name not in ALONE]
    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for first in range(0, len(waiting), 8):
            with ExitStack() as stack:
                running = {}
                for name in waiting[first : first + 8]:
                    folder = tmp_path / name
                    words, variables = nowhere(name, folder, address)
                    running[name] = stack.enter_context(started(*words, cwd=folder, **variables))
                for name, process in running.items():
                    assert process.stderr is not None
                    assert any(line.startswith(b"nsqext: waiting for ") for line in process.stderr), name
                    process.kill()


def test_top_refuses_a_pipe(place: Place) -> None:
    done = piped("top", place)
    assert (done.returncode, b"top needs a terminal: use nsqext stats --watch" in done.stderr) == (2, True)
