"""More time for messages that are here."""

from __future__ import annotations

from nsqext.client.consumer.handlers.auto_touch import AutoTouch
from nsqext.errors import MessageNotInFlight
from tests.support.owned_messages import Book, made


def test_half_of_the_timeout_is_when_to_touch() -> None:
    book, toucher = Book(), AutoTouch()
    message = made(book)
    message.received = 100.0
    assert toucher.tick([message], 129.9) == 0
    assert toucher.tick([message], 130.0) == 1
    message.received = 130.0
    assert toucher.tick([message], 159.0) == 0
    assert toucher.tick([message], 160.0) == 1
    assert book.lines == ["TOUCH 1", "TOUCH 1"]


def test_answered_and_lost_messages_are_left_alone() -> None:
    book, toucher = Book(), AutoTouch()
    message = made(book)
    book.refusal = MessageNotInFlight("gone")
    assert toucher.tick([message], 60.0) == 0
    book.refusal = None
    message.answered = True
    assert toucher.tick([message], 60.0) == 0
    assert book.lines == []


def test_no_longer_than_the_server_grants() -> None:
    book, toucher = Book(), AutoTouch()
    book.msg_timeout, book.max_msg_timeout = 10.0, 30.0
    message = made(book)
    now = 0.0
    while now < 100.0:
        if toucher.tick([message], now):
            message.received = now
        now += 0.25
    assert message.received <= 30.0
    assert len(book.lines) == 4
