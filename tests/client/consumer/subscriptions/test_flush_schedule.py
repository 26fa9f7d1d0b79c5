"""When pending commands are sent: at once, at the end of a turn of the event loop, or together."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import anyio
import pytest

from nsqext.client.consumer.subscriptions import flush_schedule as module
from nsqext.client.consumer.subscriptions.flush_schedule import FlushSchedule
from tests.support.clock import replace_clock
from tests.support.fake_nsqd import until
from tests.support.subscription_bench import Connection

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription


class Scene:
    """A schedule with a connection; time passes on request."""

    def __init__(self) -> None:
        self.now = 100.0
        self.schedule = FlushSchedule(lambda: self.schedule.flush_added())
        self.connection = Connection()
        self.subscription = cast("Subscription", self.connection)

    def at_once(self, after: float = 0.0) -> bool:
        """Add an answer after some seconds; return whether it is sent at once."""
        self.now += after
        return self.schedule.add(self.subscription, answer=True)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    replace_clock(monkeypatch, lambda: scene.now)
    return scene


def test_the_first_answer_after_a_pause_is_sent_at_once(scene: Scene) -> None:
    assert not scene.schedule.add(scene.subscription, answer=False), "RDY waits"
    assert [scene.at_once(after) for after in (0.0, 0.01, 0.009, 0.002, 0.019)] == [True, False, False, True, False]


@pytest.mark.parametrize(("answers", "after_50_ms"), [(15, True), (16, False)])
def test_no_answer_of_a_burst_is_sent_at_once(scene: Scene, answers: int, after_50_ms: bool) -> None:
    """Otherwise each burst would be split into two, with a read and a write each."""
    assert scene.at_once()
    assert not scene.at_once()
    scene.connection.pending += [b"FIN"] * answers
    scene.schedule.flush_added()
    assert scene.at_once(0.05) is after_50_ms
    assert scene.at_once(0.051), "the burst has ended"


@pytest.mark.anyio
@pytest.mark.parametrize(("ahead", "ready", "waits"), [(3, 6, True), (3, 7, False), (2, 1, False)])
async def test_answers_wait_for_others_while_handlers_have_messages(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, ahead: int, ready: int, waits: bool
) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.1)
    schedule, connection = scene.schedule, scene.connection
    schedule.ahead, connection.ready = [b"x"] * ahead, ready
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(schedule.run)
        tasks.start_soon(schedule.run_collected)
        await anyio.wait_all_tasks_blocked()
        assert scene.at_once()
        assert not scene.at_once()
        await anyio.wait_all_tasks_blocked()
        assert connection.flushes == (not waits)
        with anyio.fail_after(25):
            await until(lambda: connection.flushes == 1)
        tasks.cancel_scope.cancel()
