"""Messages of any client are passed on with the same bytes of header and body, and the same trace id."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from attrs import frozen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import nsqext.arrow
from nsqext import Admin, Consumer, Message, Reject, replay_dead_letters
from nsqext.protocol.headers import MAX_STORED_HEADER
from tests.support.cluster import REAL
from tests.support.command_line import lines
from tests.support.header_values import WRITTEN
from tests.support.messages import finish_all
from tests.support.raw_publish import RawPublisher, Stored
from tests.support.strategies import odd_headers
from tests.support.topic_plan import TopicPlan, fresh_name

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest

_CHANNELS = ("check", "record", "relay", "reject", "replay")
_LARGEST = 1 << 20


@frozen
class Scene:
    """Topics with extend support: messages are published to ``source``, and passed on to ``target`` and ``dead``."""

    lookupd: list[str]
    source: str
    target: str
    dead: str
    publisher: RawPublisher


@pytest.fixture(scope="module")
def scene(cluster_under_test: ClusterUnderTest) -> Iterator[Scene]:
    """Topics of one partition with all channels."""
    lookupd = cluster_under_test.lookupd
    names = [fresh_name(word) for word in ("source", "target", "dead")]

    async def create() -> str:
        async with Admin(lookupd) as admin:
            for name in names:
                await TopicPlan(name, extend=True, channels=_CHANNELS).create(admin)
            return str((await admin.topic(names[0])).leaders[0])

    async def delete() -> None:
        async with Admin(lookupd) as admin:
            for name in names:
                await admin.delete_topic(name)

    publisher = RawPublisher(anyio.run(create), names[0], 0)
    source, target, dead = names
    yield Scene(lookupd, source, target, dead, publisher)
    publisher.close()
    anyio.run(delete)


def _message(header: bytes, body: bytes, trace_id: int) -> Stored:
    return Stored(header, body, 0 if header else trace_id)


_MESSAGES = st.builds(_message, st.just(b"") | odd_headers(), st.binary(min_size=1, max_size=30), st.integers(0, 9))
_COMPRESSED = b'{"nsq.client.compress":"1","nsq.msg.size":"4", "a":null}'
_LISTED = [
    *(Stored(written.header, b"%d" % number) for number, written in enumerate(WRITTEN)),
    Stored(b"", b"without header"),
    Stored(b"", b"traced", 7),
    Stored(b'{"##trace_id":"8","##key":"k","##client_dispatch_tag":"t"}', b"all"),
    Stored(b'{"##trace_id":"9", "a":1,"##trace_id":"10"}', b"the first trace id counts"),
    Stored(_COMPRESSED, gzip.compress(b"body")),
    Stored(_COMPRESSED, b"not compressed"),
    Stored(b'{"content-encoding":"gzip"}', gzip.compress(b"body")),
    Stored(b'{"a":"' + b"x" * (MAX_STORED_HEADER - 8 - 1000) + b'"}', b"long header"),
    Stored(b'{"a":1}', b"x" * (_LARGEST - 1000)),
    Stored(b"", b"x" * (_LARGEST - 1000)),
]
"""Messages with all headers that are listed, and with the largest that leave room for a dead letter's origin."""


async def _read(scene: Scene, topic: str, count: int) -> Counter[Stored]:
    """Return the next messages of a topic as they are stored."""
    async with Consumer(topic, "check", lookupd=scene.lookupd, decompress=False) as consumer:
        messages = await finish_all(consumer, count)
    return Counter(_stored(message) for message in messages)


def _stored(message: Message) -> Stored:
    return Stored(message.header, message.body, message.trace_id)


async def _relay(scene: Scene, count: int, folder: Path) -> str:
    words = ("relay", scene.source, "--to", scene.target, "--until-end")
    await _command(*words, "--lookupd", ",".join(scene.lookupd))
    return scene.target


async def _record_and_replay(scene: Scene, count: int, folder: Path) -> str:
    where = ("--lookupd", ",".join(scene.lookupd))
    await _command("record", scene.source, "--to", str(folder), "--until-end", *where)
    await _command("replay", str(folder), "--topic", scene.target, "--speed", "0", *where)
    return scene.target


async def _command(*words: str) -> None:
    await anyio.to_thread.run_sync(lines, *words)


async def _reject_and_replay(scene: Scene, count: int, folder: Path) -> str:
    consumer = Consumer(scene.source, "reject", lookupd=scene.lookupd, max_attempts=1, dead_letter=scene.dead)
    rejected = 0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal rejected
        rejected += 1
        if rejected == count:
            consumer.stop()
        raise Reject("refused")

    await consumer.serve(signals=False)
    assert await replay_dead_letters(scene.dead, lookupd=scene.lookupd, idle=5.0 if REAL else 0.5) == count
    # the other channels receive what was replayed as well
    for channel in ("record", "relay", "reject"):
        async with Consumer(scene.source, channel, lookupd=scene.lookupd) as other:
            await finish_all(other, count)
    return scene.source


_COLUMNS = ("value", "topic", "trace_id", "tag", "headers", "key", "header")


async def _read_and_write_rows(scene: Scene, count: int, folder: Path) -> str:
    def copy() -> None:
        rows = nsqext.arrow.read(scene.source, scene.lookupd, columns=_COLUMNS).read_all()
        nsqext.arrow.write(rows.slice(len(rows) - count), scene.lookupd, topic=scene.target)

    await anyio.to_thread.run_sync(copy)
    return scene.target


_WAYS: list[Callable[[Scene, int, Path], Awaitable[str]]] = [
    _relay,
    _record_and_replay,
    _read_and_write_rows,
    _reject_and_replay,
]


@pytest.mark.timeout(300)
@settings(max_examples=1 if REAL else 2, suppress_health_check=list(HealthCheck), deadline=None)
@given(messages=st.lists(_MESSAGES, min_size=1, max_size=30))
@example(messages=_LISTED)
def test_header_body_and_trace_id_stay(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory, messages: list[Stored]
) -> None:
    async def pass_on() -> None:
        responses = scene.publisher.publish_stored(messages)
        assert [response[:2] for response in responses] == [b"OK"] * len(messages)
        expected = await _read(scene, scene.source, len(messages))
        for way in _WAYS:
            with anyio.fail_after(120):
                topic = await way(scene, len(messages), tmp_path_factory.mktemp("recorded"))
                found = await _read(scene, topic, len(messages))
            assert found == expected, f"{way.__name__}: {found - expected} in place of {expected - found}"

    anyio.run(pass_on)
