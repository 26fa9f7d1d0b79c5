"""Headers of other clients: every reader returns the same values."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import nsqext.arrow
from nsqext import Admin, Consumer, Message, Reject
from nsqext.cli.message_files import files_in, read_entries
from tests.support.command_line import lines, run
from tests.support.header_values import WRITTEN
from tests.support.messages import finish_all
from tests.support.raw_publish import RawPublisher
from tests.support.topic_plan import TopicPlan, fresh_name
from tests.support.web_pages import browsing

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest

_CHANNELS = ("record", "tail")
_VALUES = [(written.header, written.values) for written in WRITTEN]


@pytest.fixture(scope="module")
def topic(cluster_under_test: ClusterUnderTest) -> Iterator[str]:
    """A topic of one partition, in which each body is the number of its header in `WRITTEN`."""
    plan = TopicPlan(fresh_name("headers"), extend=True, channels=_CHANNELS)

    async def create() -> str:
        async with Admin(cluster_under_test.lookupd) as admin:
            await plan.create(admin)
            return str((await admin.topic(plan.name)).leaders[0])

    async def delete() -> None:
        async with Admin(cluster_under_test.lookupd) as admin:
            await admin.delete_topic(plan.name)

    publisher = RawPublisher(anyio.run(create), plan.name, 0)
    responses = publisher.publish((written.header, b"%d" % number) for number, written in enumerate(WRITTEN))
    publisher.close()
    assert dict.fromkeys(responses) == {b"OK": None}
    yield plan.name
    anyio.run(delete)


def _typed(value: Any) -> Any:
    """Return a value with the types of all its parts: 1 and True, and text and `RawJson`, are equal otherwise."""
    if isinstance(value, dict):
        return {name: _typed(item) for name, item in value.items()}
    return type(value), [_typed(item) for item in value] if isinstance(value, list) else value


@pytest.mark.anyio
async def test_a_consumer_receives_each_header_with_its_values(
    cluster_under_test: ClusterUnderTest, topic: str
) -> None:
    async with Consumer(topic, fresh_name("consume"), lookupd=cluster_under_test.lookupd, start="earliest") as consumer:
        received = await finish_all(consumer, len(WRITTEN))
    found = {int(message.body): (message.header, _typed(message.headers)) for message in received}
    assert found == {number: (header, _typed(values)) for number, (header, values) in enumerate(_VALUES)}


@pytest.mark.anyio
async def test_an_administrator_sees_the_same_values(cluster_under_test: ClusterUnderTest, topic: str) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        stored = await admin.peek(topic, count=len(WRITTEN))
    found = {int(message.body): _typed(message.headers) for message in stored}
    assert found == {number: _typed(values) for number, (_, values) in enumerate(_VALUES)}


def test_rows_have_the_same_values_as_text(cluster_under_test: ClusterUnderTest, topic: str) -> None:
    texts = [written.texts for written in WRITTEN]
    for form in ("map", "array"):
        rows = nsqext.arrow.read(topic, cluster_under_test.lookupd, columns=["headers"], headers_format=form)
        found = rows.read_all()["headers"].to_pylist()
        if form == "array":
            found = [
                [(pair["key"], pair["value"] if pair["value"] is None else pair["value"].decode()) for pair in pairs]
                for pairs in found
            ]
        assert [dict(pairs) for pairs in found] == texts


def test_commands_print_and_record_the_same_values(
    cluster_under_test: ClusterUnderTest, topic: str, tmp_path: Path
) -> None:
    where = ("--lookupd", ",".join(cluster_under_test.lookupd), "--until-end")
    expected = [_typed({name: _plain(value) for name, value in values.items()}) for _, values in _VALUES]
    printed = lines("tail", topic, "--channel", "tail", *where)
    assert [_typed(record["headers"]) for record in sorted(printed, key=_number)] == expected
    lines("record", topic, "--to", str(tmp_path), *where)
    recorded = [dict(entry.record) for path in files_in([tmp_path]) for entry in read_entries(path)]
    assert [_typed(record["headers"]) for record in sorted(recorded, key=_number)] == expected


def test_headers_are_matched_and_formatted_as_text(cluster_under_test: ClusterUnderTest, topic: str) -> None:
    where = ("--lookupd", ",".join(cluster_under_test.lookupd), "--start", "earliest", "--until-end")
    done = run("tail", topic, "--header", "t=true", "--format", "{headers[t]} {headers[i]} {headers[d]}|", *where)
    matching = [written.texts for written in WRITTEN if written.texts.get("t") == "true"]
    shown = [f"true {texts.get('i', '')} {texts.get('d', '')}|" for texts in matching]
    assert (done.returncode, done.stdout.decode().splitlines()) == (0, shown)


@pytest.mark.anyio
async def test_dead_letters_have_the_same_values(cluster_under_test: ClusterUnderTest, topic: str) -> None:
    lookupd, dead, rejected = cluster_under_test.lookupd, fresh_name("dead"), 0
    rejecting: dict[str, Any] = {"start": "earliest", "max_attempts": 1, "dead_letter": dead}
    async with Admin(lookupd) as admin:
        await TopicPlan(dead, extend=True, channels=("check",)).create(admin)
        consumer = Consumer(topic, fresh_name("reject"), lookupd=lookupd, **rejecting)

        @consumer.handler
        async def handle(message: Message) -> None:
            nonlocal rejected
            rejected += 1
            if rejected == len(WRITTEN):
                consumer.stop()
            raise Reject("refused")

        with anyio.fail_after(120):
            await consumer.serve(signals=False)
        async with Consumer(dead, "check", lookupd=lookupd) as letters:
            received = await finish_all(letters, len(WRITTEN))
        await admin.delete_topic(dead)
    found = {int(message.body): _typed(_without_origin(message.headers)) for message in received}
    assert found == {number: _typed(values) for number, (_, values) in enumerate(_VALUES)}


@pytest.mark.anyio
async def test_the_page_shows_the_same_values_as_text(cluster_under_test: ClusterUnderTest, topic: str) -> None:
    async with browsing(list(cluster_under_test.lookupd)) as browser:
        text = (await browser.get(f"/topics/{topic}/messages?count={len(WRITTEN)}")).text
    found: dict[int, dict[str, str | None]] = {}
    for article in re.findall(r"<article.*?</article>", text, re.DOTALL):
        body = re.findall(r"<pre[^>]*>(.*?)</pre>", article, re.DOTALL)
        shown = re.findall(r'<dt class="header">(.*?)</dt><dd class="mono">(.*?)</dd>', article, re.DOTALL)
        found[int(body[0])] = {
            html.unescape(name): None if value == "<em>null</em>" else html.unescape(value) for name, value in shown
        }
    assert found == {number: written.texts for number, written in enumerate(WRITTEN)}


def _without_origin(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if not name.startswith("dead-letter-")}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def _number(record: dict[str, Any]) -> int:
    return int(record["body"])
