"""The window of a client: it shrinks and grows like that of the real server."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.channel.in_flight import NO_LIMIT, SubscribedClient
from tests.support.engine_partition import Consumer


def client(ready: int) -> SubscribedClient:
    consumer = Consumer()
    consumer.ready = ready
    consumer.refresh()
    return consumer


@pytest.mark.parametrize(
    ("ready", "errors", "window"),
    [(10, 0, 10), (10, 4, 10), (10, 5, 10), (10, 6, 9), (10, 14, 1), (10, 15, 1), (10, 99, 1), (1, 99, 1), (0, 9, 0)],
)
def test_errors_narrow_the_window(ready: int, errors: int, window: int) -> None:
    found = client(ready)
    for _ in range(errors):
        found.record_failure()
    assert found.window == window


def test_errors_are_bounded() -> None:
    found = client(10)
    for _ in range(1000):
        found.record_failure()
    assert found.errors == 30


@pytest.mark.parametrize(("errors", "left"), [(1, 0), (2, 0), (3, 0), (4, 0), (9, 7), (6, 3), (30, 28), (12, 10)])
def test_successes_reduce_errors(errors: int, left: int) -> None:
    found = client(10)
    found.errors = errors
    found.record_success()
    assert found.errors == left


def test_limit_and_stall() -> None:
    found = client(10)
    assert found.limit == NO_LIMIT
    found.limit = 3
    found.refresh()
    assert found.window == 3
    found.stall()
    found.refresh()
    assert found.window == 0
