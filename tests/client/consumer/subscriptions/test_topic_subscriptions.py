"""Which topics a consumer joins and leaves, with subscribers and lists of topics of the test."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import Position
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions import topics as module
from nsqext.client.consumer.subscriptions.topics import TopicSelection, TopicSubscriptions
from nsqext.errors import (
    InvalidInput,
    InvalidPartition,
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    NsqError,
    PartitionUnavailable,
)
from nsqext.waits import chance
from tests.support.sleeps import settled
from tests.support.subscriber_scene import make_context

pytestmark = pytest.mark.anyio

_LAST = Position.latest()
Answer = set[str] | NsqError


class Subscriber:
    """The subscriber of a topic."""

    def __init__(self, topic: str, context: Any, fail: Callable[[NsqError], None], *, discovered: bool = False) -> None:
        self.topic, self.fail, self.discovered = topic, fail, discovered
        self.idle = self.vanished = False
        self.started = anyio.Event()
        self.calls: list[str] = []
        self.left = anyio.Event()
        self.seeker = self
        self.refusal: NsqError | None = None
        self.unmovable: NsqError | None = None

    async def run(self) -> None:
        self.calls.append("run")
        if self.refusal is not None:
            raise self.refusal

    async def leave(self) -> None:
        self.calls.append("leave")
        await self.left.wait()

    def forget(self) -> None:
        self.calls.append("forget")

    def forget_messages(self) -> None:
        self.calls.append("forget messages")

    async def close(self) -> None:
        self.calls.append("close")
        self.left.set()

    def chosen(self, partitions: Sequence[int] | None) -> None:
        if self.unmovable is not None:
            raise self.unmovable

    async def seek(self, position: Position, partitions: Sequence[int] | None) -> None:
        self.calls.append(f"seek {partitions}")
        if self.refusal is not None:
            raise self.refusal


class Scene:
    """The topics of a consumer of the channel ch."""

    def __init__(self, given: str | list[str], tasks: Any, *answers: Answer, lookup_timeout: float = 60.0) -> None:
        self.answers = list(answers)
        self.lists = 0
        self.failed: list[NsqError] = []
        self.all: list[Subscriber] = []
        options = ConsumerOptions(lookup_timeout=lookup_timeout, reconnect_wait=0.001)
        self.options = SimpleNamespace(poll_interval=0.01, poll_jitter=0.0)
        self.group = SimpleNamespace(opened=0, options=options, metadata=self, tasks=tasks)
        self.subject = TopicSubscriptions(TopicSelection(given), make_context(self.group, []), self.failed.append)

    async def topics(self, max_age: float) -> set[str]:
        assert max_age == 0.005
        self.lists += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, NsqError):
            raise answer
        return answer

    @property
    def joined(self) -> dict[str, Subscriber]:
        return {one.topic: one for one in self.all if "leave" not in one.calls}

    async def listed(self, times: int = 2) -> None:
        """Wait until the list was read some times more."""
        until = self.lists + times
        while self.lists < until:  # noqa: ASYNC110 - there is no event for a list
            await anyio.sleep(0.001)
        await settled()


@asynccontextmanager
async def _scene(
    monkeypatch: pytest.MonkeyPatch, given: str | list[str], *answers: Answer, **settings: Any
) -> AsyncIterator[Scene]:
    """Run the subscriptions of some topics."""
    made: list[Subscriber] = []

    def make(*arguments: Any, **members: Any) -> Subscriber:
        made.append(Subscriber(*arguments, **members))
        return made[-1]

    monkeypatch.setattr(module, "Subscriber", make)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            scene = Scene(given, tasks, *answers, **settings)
            scene.all = made
            tasks.start_soon(scene.subject.run)
            await settled()
            yield scene
            tasks.cancel_scope.cancel()


async def test_named_topics_are_joined_and_others_selected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, ["a", "b"]) as scene:
        assert list(scene.joined) == ["a", "b"]
        assert [(one.calls, one.discovered) for one in scene.all] == [(["run"], False)] * 2
        scene.joined["a"].started.set()
        await settled()
        assert not scene.subject.started.is_set()
        scene.joined["b"].started.set()
        await settled()
        assert (scene.subject.started.is_set(), scene.lists) == (True, 0)
        scene.subject.select(TopicSelection(["b", "c"]))
        await settled()
        assert list(scene.joined) == ["b", "c"]
        left = scene.all[0]
        assert left.calls == ["run", "leave"]
        left.left.set()
        await settled()
        assert left.calls == ["run", "leave", "forget", "forget messages"]


async def test_topics_that_match_are_joined_as_they_appear_and_left_when_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _scene(monkeypatch, ["a*", "x"], {"a2", "a1", "b"}) as scene:
        assert [(one.topic, one.discovered) for one in scene.all] == [("x", False), ("a1", True), ("a2", True)]
        scene.answers = [{"a1", "a3"}]
        await scene.listed()
        assert list(scene.joined) == ["x", "a1", "a2", "a3"], "its connections are open"
        scene.joined["a2"].idle = scene.joined["x"].idle = scene.joined["a1"].idle = True
        await scene.listed()
        assert list(scene.joined) == ["x", "a1", "a3"]
        scene.answers = [LookupUnreachable("down")]
        await scene.listed()
        assert list(scene.joined) == ["x", "a1", "a3"]
        scene.joined["a1"].vanished = True
        scene.joined["a3"].vanished = True
        await scene.listed()
        assert list(scene.joined) == ["x", "a3"], "it may be joined again with the next list"
        scene.answers = [{"a1", "a3"}]
        await scene.listed()
        assert list(scene.joined) == ["x", "a3", "a1"]


@pytest.mark.parametrize("found", [set[str](), {"a1"}])
async def test_a_consumer_has_started_once_the_list_was_read(
    monkeypatch: pytest.MonkeyPatch, found: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsqext.consumer")
    async with _scene(monkeypatch, "a*", LookupUnreachable("down")) as scene:
        await scene.listed()
        assert not scene.subject.started.is_set()
        scene.answers = [found]
        await scene.listed(4)
        for one in scene.all:
            assert not scene.subject.started.is_set()
            one.started.set()
        await settled()
        assert scene.subject.started.is_set()
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "topics cannot be listed" in text] == ["topics cannot be listed: down"]
    assert len([text for text in texts if "no topic matches a* so far" in text]) == (0 if found else 1)


@pytest.mark.parametrize(
    ("error", "lookup_timeout", "raised"),
    [
        (LookupFailed("wrong"), 60.0, True),
        (LookupUnreachable("down"), 0.0, True),
        (LookupUnreachable("down"), 60.0, False),
        (InvalidState("closed"), 60.0, True),
    ],
)
async def test_only_a_lookup_service_that_may_answer_soon_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: NsqError, lookup_timeout: float, raised: bool
) -> None:
    errors: list[NsqError] = []
    async with anyio.create_task_group() as tasks:
        scene = Scene("a*", tasks, error, lookup_timeout=lookup_timeout)

        async def run() -> None:
            try:
                await scene.subject.run()
            except NsqError as failure:
                errors.append(failure)

        tasks.start_soon(run)
        with anyio.fail_after(25):
            while not errors and scene.lists < 3:  # noqa: ASYNC110 - there is no event for a list
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert errors == ([error] if raised else [])


async def test_the_list_is_read_again_after_the_poll_interval_or_sooner_while_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses, drawn = list[float](), list[tuple[float, float]]()
    move_on_after = anyio.move_on_after

    def record(seconds: float) -> anyio.CancelScope:
        pauses.append(seconds)
        return move_on_after(0.0 if len(pauses) < 5 else 60.0)

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return high / 2

    async with anyio.create_task_group() as tasks:
        down = LookupUnreachable("down")
        scene = Scene("a*", tasks, down, down, set[str](), down, set[str]())
        scene.options.poll_jitter = 0.5
        monkeypatch.setattr(module, "Subscriber", Subscriber)
        monkeypatch.setattr(anyio, "move_on_after", record)
        monkeypatch.setattr(chance, "uniform", draw)
        monkeypatch.setattr(module, "pause_before_lookup", lambda options, failures: 100.0 * failures)
        tasks.start_soon(scene.subject.run)
        while len(pauses) < 5:
            await anyio.lowlevel.checkpoint()
        scene.subject.select(TopicSelection("a"))
        while len(pauses) < 6:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert pauses == [100.0, 200.0, *[pytest.approx(0.01 * 1.25)] * 3, float("inf")]
    assert drawn == [(-1, 1)] * 3


async def test_a_failure_to_list_is_logged_again_after_a_list(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = LookupUnreachable("down")
    async with _scene(monkeypatch, "a*", down, {"a1"}, down, down, {"a1"}) as scene:
        await scene.listed(5)
    assert caplog.text.count("topics cannot be listed") == 2


async def test_after_a_first_list_every_failure_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, "a*", {"a1"}, LookupFailed("wrong")) as scene:
        await scene.listed(4)
        assert list(scene.joined) == ["a1"]


@pytest.mark.parametrize(("opened", "others", "fails"), [(0, False, True), (1, False, False), (0, True, False)])
async def test_a_found_topic_that_is_refused_is_left_and_ends_the_consumer_only_if_nothing_ever_worked(
    monkeypatch: pytest.MonkeyPatch, opened: int, others: bool, fails: bool
) -> None:
    async with _scene(monkeypatch, "a*", {"a1", "a2"} if others else {"a1"}) as scene:
        scene.group.opened = opened
        scene.answers = [LookupUnreachable("down")]
        refused, error = scene.joined["a1"], InvalidInput("refused")
        refused.fail(error)
        await settled()
        assert (list(scene.joined), scene.failed) == (["a2"] if others else [], [error] if fails else [])
        assert "leave" in refused.calls
        refused.fail(error)
        assert len(scene.failed) == fails


async def test_a_named_topic_that_is_refused_ends_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    error = InvalidInput("refused")

    async def refuse(subscriber: Subscriber) -> None:
        raise error

    monkeypatch.setattr(Subscriber, "run", refuse)
    async with _scene(monkeypatch, ["a", "b"]) as scene:
        assert (scene.failed, list(scene.joined)) == ([error, error], ["a", "b"])


async def test_a_found_topic_that_is_given_by_name_later_is_refused_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, "a*", {"a1", "a2"}) as scene:
        scene.group.opened = 2
        named, found = scene.all
        scene.subject.select(TopicSelection(["a1", "a*"]))
        await scene.listed(1)
        assert (named.discovered, found.discovered) == (False, True)
        named.fail(error := InvalidInput("refused"))
        found.fail(InvalidInput("refused"))
        await settled()
        assert (scene.failed, "leave" in named.calls, "leave" in found.calls) == ([error], False, True)


async def test_a_topic_that_is_selected_again_while_it_is_left_keeps_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _scene(monkeypatch, "a") as scene:
        for chosen in ("b", "a"):
            scene.subject.select(TopicSelection(chosen))
            await settled()
        first, other, second = scene.all
        first.fail(InvalidInput("refused while it is left"))
        for one in (first, other):
            one.left.set()
        await settled()
        assert (first.calls[-1], other.calls[-1], second.calls) == ("forget", "forget messages", ["run"])


async def test_a_seek_without_any_topic_says_that_nothing_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, "a*", set()) as scene:
        with pytest.raises(InvalidInput, match=r"nothing was moved: no topic that matches a\*"):
            await scene.subject.seek(_LAST, None, None)


async def test_a_seek_of_one_or_of_all_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, ["a", "b"]) as scene:
        with pytest.raises(InvalidInput, match="does not consume this topic") as caught:
            await scene.subject.seek(_LAST, None, "c")
        assert caught.value.topic == "c"
        with pytest.raises(InvalidInput, match="partitions are given without their topic"):
            await scene.subject.seek(_LAST, [0], None)
        await scene.subject.seek(_LAST, [0], "a")
        await scene.subject.seek(_LAST, None, None)
        assert [one.calls[1:] for one in scene.all] == [["seek [0]", "seek None"], ["seek None"]]
        scene.all[1].refusal = InvalidPartition("no")
        with pytest.raises(InvalidPartition, match="no"):
            await scene.subject.seek(_LAST, None, None)
        calls = list(scene.all[0].calls)
        scene.all[1].unmovable = PartitionUnavailable("no leader")
        with pytest.raises(PartitionUnavailable, match="no leader"):
            await scene.subject.seek(_LAST, None, None)
        assert scene.all[0].calls == calls, "no channel is moved"
    async with _scene(monkeypatch, "a") as scene:
        await scene.subject.seek(_LAST, [1], None)
        assert scene.all[0].calls[1:] == ["seek [1]"]


async def test_closing_closes_the_topics_that_are_being_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _scene(monkeypatch, ["a", "b"]) as scene:
        scene.subject.select(TopicSelection("b"))
        await settled()
        scene.subject.forget()
        assert [one.calls[-1] for one in scene.all] == ["forget", "forget"]
        scene.subject.select(TopicSelection("c"))
        await scene.subject.close()
        await settled()
        assert ["close" in one.calls for one in scene.all] == [True, True]
        assert len(scene.all) == 2, "nothing is joined any more"
