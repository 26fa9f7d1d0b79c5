"""The order of an ordered partition."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.subscriptions.order_check import OrderCheck
from nsqext.errors import OrderViolation
from tests.support.messages import RecordingOwner, make_message


def test_growing_offsets_are_in_order_and_an_equal_one_is_a_redelivery() -> None:
    check, owner = OrderCheck(), RecordingOwner(in_order=True)
    for number, offset, attempts in ((2, 0, 1), (2, 0, 2), (3, 35, 1), (9, 300, 1)):
        message = make_message(owner, number, offset=offset, attempts=attempts)
        assert check.accepts(message)
        message.answered = True
    assert check.accepts(make_message(owner, 9, offset=300, attempts=1)), "after a lost connection attempts do not grow"


@pytest.mark.parametrize(("number", "offset"), [(4, 50), (5, 49), (4, 60), (6, 49), (6, 50), (5, 51)])
def test_going_backwards_is_an_error(number: int, offset: int) -> None:
    check, owner = OrderCheck(), RecordingOwner(in_order=True)
    check.accepts(make_message(owner, 5, offset=50))
    with pytest.raises(
        OrderViolation, match=f"id {number} at offset {offset} was received after id 5 at offset 50"
    ) as caught:
        check.accepts(make_message(owner, number, offset=offset))
    assert (caught.value.topic, caught.value.partition) == ("t", 3)


def test_a_duplicate_is_dropped_while_the_first_is_in_flight() -> None:
    check, owner = OrderCheck(), RecordingOwner(in_order=True)
    first = make_message(owner, 2, offset=0)
    assert check.accepts(first)
    assert not check.accepts(make_message(owner, 2, offset=0))
    assert not check.accepts(make_message(owner, 2, offset=0))
    assert check.accepts(make_message(owner, 2, offset=0, attempts=2)), "its timeout has passed: it is another delivery"


def test_a_message_that_blocks_is_reported_with_its_attempts(caplog: pytest.LogCaptureFixture) -> None:
    check, owner = OrderCheck(report_attempts=3), RecordingOwner(in_order=True)
    with caplog.at_level(logging.WARNING, "nsqext.consumer"):
        for attempts in range(1, 8):
            check.accepts(make_message(owner, 2, offset=0, attempts=attempts))
    assert [record.__dict__["attempts"] for record in caplog.records] == [3, 6]
    assert "blocks its partition, delivered 3 times" in caplog.records[0].message


@given(st.lists(st.integers(0, 20), min_size=1))
def test_it_accepts_exactly_non_decreasing_sequences(numbers: list[int]) -> None:
    check, owner = OrderCheck(), RecordingOwner(in_order=True)
    right = sorted(numbers) == numbers
    try:
        for number in numbers:
            message = make_message(owner, number, offset=number * 40)
            check.accepts(message)
            message.answered = True
    except OrderViolation:
        assert not right
    else:
        assert right
