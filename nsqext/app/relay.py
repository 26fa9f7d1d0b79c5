"""Publish what a store keeps, while an app runs: common to the relays of delays and of the outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, NsqError, OperationNotSupported, ReceiptsMissing
from nsqext.errors.server import BadBody, BadMessage, BadTag, BadTopic, ExtendRefused, InvalidJsonHeader, RecordTooLarge

if TYPE_CHECKING:
    import sqlite3

    from nsqext import Producer
    from nsqext.app.app import App

LAST: float = 5.0
"""Seconds for what is being published when an app ends."""
MARGIN: float = 5.0
"""Seconds beyond the timeout of a publish after which another relay takes over leased messages."""


_ABOUT_RELAY = (InvalidSetting, OperationNotSupported)
_ABOUT_MESSAGE = (
    *(InvalidInput, BadTopic, BadBody, BadMessage, BadTag),
    *(ExtendRefused, InvalidJsonHeader, RecordTooLarge),
)


class Cancellation(Enum):
    """Outcome of a request to cancel a message of a relay."""

    CANCELLED = "cancelled"  #: it is not published
    TOO_LATE = "too late"  #: it is being published; if that fails, it is not repeated
    UNKNOWN = "unknown"  #: it does not wait, as it is unknown, published or cancelled

    @property
    def explanation(self) -> str:
        """The outcome as commands print it behind the identity of a message."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    Cancellation.CANCELLED: "cancelled",
    Cancellation.TOO_LATE: "is being published: too late, unless that fails; then it is not repeated",
    Cancellation.UNKNOWN: "does not wait: unknown, published or cancelled before",
}


class Relay:
    """Publishes the messages of a store with the producer of an app, from the app's start to its end.

    A relay leases messages before it publishes them: any number of relays may share a store, and another relay
    publishes what a killed relay had leased when the lease has ended. When an app ends, what is being published has 5
    seconds for its outcome, which is recorded.
    """

    _runs = False
    _stopping = False
    #: why its store or database cannot be used at the moment; None otherwise
    outage: str | None = None
    #: why the last publish stored nothing, unless its message is the reason; None otherwise
    failure: str | None = None

    def attach(self, app: App) -> None:
        """Run while an app runs, with its producer; the app is ready while the relay has no outage and no failure.

        Raises:
            InvalidState: the app is running already.
        """
        app.lifespan(self._lifespan)
        app.readiness_check(lambda: self.outage or self.failure)

    async def _lifespan(self, app: App) -> AsyncIterator[None]:
        ended = anyio.Event()

        async def run() -> None:
            await self.run(app.producer)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield
            if not ended.is_set():  # another run would end at once
                self.stop()
            with anyio.move_on_after(LAST):
                await ended.wait()
            tasks.cancel_scope.cancel()

    async def run(self, producer: Producer) -> None:
        """Publish until `stop` is called or until cancelled; then record what was published, and return leases.

        When cancelled, messages that are being published may be published again. While the store cannot be used, the
        relay logs a warning and tries again every second.

        Args:
            producer: an open producer, without middleware that drops messages.

        Raises:
            InvalidSetting: the producer's ``timeout`` is infinite.
            InvalidState: the store was closed, the relay runs already, or middleware drops messages or their receipts.
            Exception: an error of an outbox's database that is final; see `nsqext.transactions.outages`.
        """
        if self._runs:  # both runs would publish what one of them has leased
            raise InvalidState("the relay runs already", hint="make a relay for each app; relays share a store")
        self._runs = True
        try:
            await self._run(producer)
        finally:
            self._runs = self._stopping = False

    async def _run(self, producer: Producer) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Begin no further publish; `run` returns when the outcomes of running publishes are recorded."""
        self._stopping = True


def without_receipts(error: ReceiptsMissing, store: str, command: str) -> InvalidState:
    """Return the error of a relay whose messages its middleware drops: it would publish them again and again."""
    return InvalidState(
        f"middleware drops messages of {store}, or their receipts: {error.message}",
        topic=error.topic,
        hint=f"run the relay in an app without it, or with nsqext {command}",
    )


def check_on_disk(database: sqlite3.Connection, name: str) -> None:
    """Raise InvalidSetting for a SQLite database in memory, or in a temporary file: it ends with its connection."""
    if not database.execute("PRAGMA database_list").fetchone()[2]:
        raise InvalidSetting(
            f"the SQLite database {name!r} is not a file: its messages would be lost", hint="name a file"
        )


def publish_timeout(producer: Producer) -> float:
    """Return the seconds in which a publish ends, with the search for its outcome.

    Raises:
        InvalidSetting: it never ends: what a killed relay had leased would be published by no other.
    """
    settings = producer.settings
    names = ["timeout", "settle_timeout"] if settings.get("on_unknown") == "settle" else ["timeout"]
    for name in names:
        if float(str(settings[name])) == inf:
            raise InvalidSetting(f"a relay needs a time limit of publishes: {name}=inf", hint=f"give {name} in seconds")
    return sum(float(str(settings[name])) for name in names)


def lease_time(timeout: float) -> float:
    """Return the seconds for which a relay leases messages."""
    return timeout + MARGIN


def refuses_message(error: NsqError) -> bool:
    """Return whether an error says that a message can never be stored in its topic, whatever the relay's settings."""
    return isinstance(error, _ABOUT_MESSAGE) and not isinstance(error, _ABOUT_RELAY)
