"""Each checker accepts a good history, and rejects one that violates its guarantee."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.checkers import CHECKERS, judge
from tests.simulation.history import Channel, Delivery, History, Publish


def good() -> History:
    """Three messages of a key, published one after the other and handled in order on a channel."""
    history = History(channels=[Channel("orders", "billing", "key")], healed=30.0, concurrency={"c": 1})
    for number in range(3):
        body = b"%d" % number
        history.publishes.append(
            Publish(
                *(body, "orders", "k", number, float(number), number + 0.5, "stored"),
                partition=0,
                message_id=number + 1,
                offset=100 * number,
            )
        )
        history.deliveries.append(
            Delivery(body, "orders", "billing", "c", 0, number + 1, 1, number + 1.0, number + 1.1, "returned")
        )
    return history


def test_a_good_history_is_accepted() -> None:
    assert judge(good()) == []


def _lose(history: History) -> None:
    history.deliveries.pop()


def _fail_stored(history: History) -> None:
    history.publishes[1].outcome = "failed"


def _invent(history: History) -> None:
    history.deliveries[0].body = b"other"


def _store_twice(history: History) -> None:
    history.on_unknown = "raise"
    history.deliveries.append(Delivery(b"1", "orders", "billing", "c", 0, 77, 1, 9.0, 9.1, "returned"))


def _reorder(history: History) -> None:
    first, second = history.deliveries[:2]
    first.begin, second.begin = second.begin, first.begin
    first.end, second.end = second.end, first.end
    history.deliveries.sort(key=lambda delivery: delivery.begin)


def _same_id(history: History) -> None:
    history.publishes[2].message_id = 1


def _other_id(history: History) -> None:
    history.deliveries[2].message_id = 99


def _offsets(history: History) -> None:
    history.publishes[2].offset = 50


def _deliver_again(history: History) -> None:
    history.deliveries.append(Delivery(b"1", "orders", "billing", "c", 0, 2, 2, 9.0, 9.1, "returned"))


def _two_at_once(history: History) -> None:
    history.deliveries[0].end = 2.05


def _hang(history: History) -> None:
    history.publishes[2].outcome = "pending"


def _slow(history: History) -> None:
    history.publishes[2].end = 50.0


def _fail_late(history: History) -> None:
    history.publishes.append(Publish(b"3", "orders", "k", 3, 60.0, 61.0, "unknown"))


def _slow_close(history: History) -> None:
    history.close_seconds = 100.0


def _raise_another(history: History) -> None:
    history.publishes[1].outcome = "undocumented"


def _leave_socket(history: History) -> None:
    history.left_over.append("open socket")


BAD: list[tuple[str, Callable[[History], None]]] = [
    ("lost", _lose),
    ("phantom", _fail_stored),
    ("invented", _invent),
    ("stored_twice", _store_twice),
    ("reordered", _reorder),
    ("receipts", _same_id),
    ("receipts", _other_id),
    ("receipts", _offsets),
    ("redelivered_without_cause", _deliver_again),
    ("too_many_at_once", _two_at_once),
    ("unbounded_waits", _hang),
    ("unbounded_waits", _slow),
    ("unbounded_waits", _fail_late),
    ("unbounded_waits", _slow_close),
    ("undocumented_errors", _raise_another),
    ("left_over", _leave_socket),
]


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=[spoil.__name__.strip("_") for _, spoil in BAD])
def test_a_checker_rejects_a_bad_history(name: str, spoil: Callable[[History], None]) -> None:
    history = good()
    spoil(history)
    assert list(CHECKERS[name](history)) != []


def test_every_checker_has_a_history_that_it_rejects() -> None:
    assert {name for name, _ in BAD} == CHECKERS.keys()


def test_a_redelivery_after_a_fault_has_a_cause() -> None:
    history = good()
    _deliver_again(history)
    history.disturbances.append((5.0, 6.0))
    assert judge(history) == []
