"""What becomes of messages whose handler raised."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from nsqext import FailureOptions, Finish, Reject, Requeue
from nsqext.client.consumer.handlers.failure_policy import DelayedRequeues, FailurePolicy
from nsqext.errors import InvalidInput, InvalidSetting
from tests.support.owned_messages import Book, made

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

pytestmark = pytest.mark.anyio


def verdict(
    letters: list[str] | None = None, delays: DelayedRequeues | None = None, **members: object
) -> FailurePolicy:
    """Return a verdict without jitter, whose dead letters are written down."""

    async def take(message: Message, error: Exception | None) -> None:
        assert letters is not None
        letters.append(f"{message.internal_id} {error}")
        if "refused" in str(error):
            raise OSError("no")

    options = FailureOptions(**members)  # type: ignore[arg-type]
    return FailurePolicy(options, None if letters is None else take, delays or DelayedRequeues(), chance=lambda: 0.0)


async def test_failures_are_requeued_with_a_delay_that_grows() -> None:
    book = Book()
    judge = verdict(requeue_delay=2.0, max_requeue_delay=5.0)
    for attempts in (1, 2, 3):
        await judge.failed(made(book, attempts=attempts), ValueError("x"))
    assert book.lines == ["REQ 1 2!", "REQ 1 4!", "REQ 1 5!"]


async def test_jitter_stays_within_its_share() -> None:
    for chance, delay in ((-1.0, 1.5), (1.0, 2.5)):
        options = FailureOptions(requeue_delay=2.0, jitter=0.25)
        judge = FailurePolicy(options, None, DelayedRequeues(), chance=partial(float, chance))
        assert judge.delay(made(Book())) == delay


async def test_handlers_decide_by_what_they_raise() -> None:
    book, letters = Book(), list[str]()
    judge = verdict(letters, requeue_delay=2.0)
    for signal in (Finish(), Requeue(), Requeue(7, backoff=False), Reject("enough")):
        await judge.failed(made(book), signal)
    assert book.lines == ["FIN 1", "REQ 1 2!", "REQ 1 7", "FIN 1"]
    assert letters == ["1 enough"]
    with pytest.raises(InvalidInput):
        Requeue(-1)


async def test_what_was_answered_stays_answered() -> None:
    book = Book()
    judge = verdict()
    for error in (Finish(), Requeue(), Reject(), ValueError("x")):
        message = made(book)
        message.answered = True
        await judge.failed(message, error)
    assert book.lines == []


async def test_the_last_attempt_goes_to_the_dead_letters() -> None:
    book, letters = Book(), list[str]()
    judge = verdict(letters, requeue_delay=0.0, max_attempts=2)
    await judge.failed(made(book), ValueError("first"))
    await judge.failed(made(book, attempts=2), ValueError("second"))
    assert book.lines == ["REQ 1 0!", "FIN 1"]
    assert letters == ["1 second"]
    assert [judge.worn_out(made(book, attempts=attempts)) for attempts in (1, 2, 3)] == [False, False, True]
    await judge.give_up(made(book, 8, attempts=3), None)
    assert letters[1:] == ["8 None"]


async def test_dead_letters_that_fail_lose_nothing() -> None:
    book, letters = Book(), list[str]()
    judge = verdict(letters, requeue_delay=0.0, max_attempts=1)
    await judge.failed(made(book), ValueError("refused"))
    assert book.lines == ["REQ 1 0!"]


async def test_without_dead_letters_what_is_given_up_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    await verdict(max_attempts=1).failed(made(book), ValueError("x"))
    assert book.lines == ["FIN 1"]
    assert "given up after 1 attempts" in caplog.text


async def test_ordered_messages_are_given_up_only_where_that_was_asked_for() -> None:
    for asked, lines in ((False, ["REQ 1 0!"]), (True, ["FIN 1"])):
        book, letters = Book(in_order=True), list[str]()
        judge = verdict(letters, requeue_delay=0.0, max_attempts=1, give_up_ordered=asked)
        await judge.failed(made(book), ValueError("x"))
        assert book.lines == lines
        assert judge.worn_out(made(book, attempts=9)) == asked
        assert len(letters) == asked


async def test_delays_of_ordered_messages_pass_here() -> None:
    book, delays = Book(in_order=True), DelayedRequeues()
    judge = verdict(delays=delays, requeue_delay=5.0)
    message = made(book)
    await judge.failed(message, ValueError("x"))
    assert book.lines == ["failed"]
    assert delays.held == {message}
    delays.tick(0.0)
    assert delays.held == {message}
    delays.tick(float("inf"))
    assert book.lines == ["failed", "REQ 1 0"]
    assert not delays.held


@pytest.mark.parametrize(
    "members",
    [
        {"requeue_delay": -1},
        {"max_requeue_delay": 4 * 24 * 3600},
        {"jitter": 1.0},
        {"max_attempts": -1},
        {"max_attempts": True},
        {"report_attempts": 1.5},
        {"dead_letter": "no topic", "max_attempts": 1},
        {"dead_letter": 5, "max_attempts": 1},
        {"give_up_ordered": True},
    ],
)
def test_settings_that_make_no_sense(members: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        FailureOptions(**members)  # type: ignore[arg-type]
    assert issubclass(InvalidSetting, InvalidInput)
