"""Callbacks for the events of a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.client.events import ClientEvent, ClientEvents

if TYPE_CHECKING:
    import pytest


def test_a_callback_that_fails_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    events, seen = ClientEvents(), list[ClientEvent]()

    def fail(event: ClientEvent) -> None:
        raise ValueError(event.detail)

    def add(event: ClientEvent) -> None:
        events.add(seen.append)

    for callback in (fail, seen.append, add):
        events.add(callback)
    events.emit("disconnected", "t", 3, "n:4150", "lost")
    assert seen == [ClientEvent("disconnected", "t", 3, "n:4150", "lost")], "what a callback adds is for later events"
    assert [record.getMessage() for record in caplog.records] == [f"a callback for events failed: {seen[0]!r}"]
