"""Run a relay until it is stopped or meets a final error: it waits for nodes, and reports its lag."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import anyio
from attrs import define, frozen

from nsqext.cli.command import UntilEnd
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.parameters import Option
from nsqext.client.signals import stop_on_signals
from nsqext.client.tasks import first_error
from nsqext.errors import InvalidState, NsqError
from nsqext.observability import TopicRelay, TopicRelayStatistics

if TYPE_CHECKING:
    import socket

    from nsqext import Consumer, Producer

logger: logging.Logger = logging.getLogger("nsqext.relay")

IN_FLIGHT: int = 500
"""Messages in flight."""
_AT_START = 10  # times as many at the start: see `RelayRun.sorts`
_SETTLE = 1.0  # seconds in which the first messages of a partition are sorted
_LOOK = 0.05  # seconds between two looks whether the consumer has subscribed
_LONGEST_DRAIN = 10.0  # seconds for messages in flight before a relay stops
_DRAIN_LOOK = 0.1  # seconds between two looks whether messages are in flight
_QUIET = 3  # looks without messages in flight, after which a server has sent its last messages
_PAUSE = 1.0  # seconds before a consumer whose nodes did not respond is opened again


@frozen
class Running:
    """How long a relay runs, and what it reports."""

    start: Annotated[
        str | None,
        Option(
            help="Where a new channel starts: earliest, latest, or another position of `nsqext tail`."
            " (default: latest; with --until-end earliest, on the redesigned NSQ)"
        ),
    ] = None
    until_end: UntilEnd = False
    report: Annotated[float, Option(min=0.1, help="Seconds between two reports of progress and lag.")] = 5.0
    http: Annotated[str | None, Option(help="HOST:PORT that serves /healthz, /readyz and /metrics.")] = None


@define(eq=False)
class RelayRun(TopicRelay):
    """A relay that consumes a channel.

    Attributes:
        target: topic or URL that receives the messages.
        relayed: number of messages sent.
        error: why no restart would help; None while it runs.
        outage: why the target stored nothing when it was last tried; None if it did.
        sorts: whether the server redelivers what a killed relay had in flight at once, in any order and mixed with new
            messages: it is sorted if there is room for all of it.
    """

    connection: ServerAccess
    topic: str
    channel: str
    target: str
    running: Running
    relayed: int = 0
    error: NsqError | None = None
    outage: NsqError | None = None
    sorts: bool = False
    _lag: int | None = None
    _consumer: Consumer | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the consumer that concern messages in flight."""
        most = IN_FLIGHT * (_AT_START if self.sorts else 1)
        first = {"initial_ready": most, "settle_wait": _SETTLE} if self.sorts else {}
        return {"max_in_flight": most, **first}

    async def serve(self, open_consumer: Callable[[], Consumer], producer: Producer | None = None) -> None:
        """Consume until a signal, or the end of the channel with ``until_end``; print what was relayed.

        A consumer that failed because no node or lookup server responds is opened again.

        Raises:
            NsqError: the error of `give_up`, or of a consumer that cannot continue.
        """
        listener, stopping = self._listen(), anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on_signals, stopping.set, logger)
            tasks.start_soon(self._report)
            if listener is not None:
                tasks.start_soon(self._serve_http, listener, producer)
            while (failure := await self._consume(open_consumer(), stopping)) is not None and not stopping.is_set():
                logger.warning("%s is consumed again in %g s: %s", self.topic, _PAUSE, failure)
                with anyio.move_on_after(_PAUSE):
                    await stopping.wait()
                    break
            tasks.cancel_scope.cancel()
        if self.error is not None:
            raise self.error
        text = f"{counted(self.relayed, 'message')} of {self.topic} relayed"
        self.connection.show({"topic": self.topic, "relayed": self.relayed}, text)
        self.connection.check_end(until_end=self.running.until_end)

    def give_up(self, error: NsqError) -> None:
        """End the relay with an error; unfinished messages stay in the channel."""
        self.error = self.error or error
        if self._consumer is not None:
            self._consumer.stop()

    async def _lower(self, consumer: Consumer) -> None:
        """Lower the bound that `settings` raises."""
        while not consumer.subscribed:  # noqa: ASYNC110 - a consumer has no event for it
            await anyio.sleep(_LOOK)
        await anyio.sleep(2 * _SETTLE)
        consumer.max_in_flight = IN_FLIGHT

    async def _drain(self, consumer: Consumer, stopping: anyio.Event) -> None:
        """Stop a consumer once it has sent what it received, which the original NSQ would not redeliver in order."""
        await stopping.wait()
        consumer.pause()
        quiet = 0
        with anyio.move_on_after(_LONGEST_DRAIN):
            while quiet < _QUIET:
                await anyio.sleep(_DRAIN_LOOK)
                quiet = 0 if self._in_flight() else quiet + 1
        consumer.stop()

    async def _consume(self, consumer: Consumer, stopping: anyio.Event) -> NsqError | None:
        """Consume until the end; return the error after which another consumer may succeed."""
        self._consumer = consumer
        try:
            async with anyio.create_task_group() as tasks:
                if self.sorts:
                    tasks.start_soon(self._lower, consumer)
                tasks.start_soon(self._drain, consumer, stopping)
                await self.connection.serve(consumer, until_end=self.running.until_end, signals=False)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            matching, rest = group.split(NsqError)
            found = None if matching is None or rest is not None else first_error(matching)
            if not isinstance(found, NsqError) or not found.retryable:
                raise
            return found
        return None

    # Lag

    def statistics(self) -> TopicRelayStatistics:
        """Return the progress; the lag is as of the last report."""
        return TopicRelayStatistics(self.topic, self.channel, self.target, self.relayed, self._lag, self._in_flight())

    def _in_flight(self) -> int:
        try:
            return 0 if self._consumer is None else self._consumer.statistics().in_flight
        except InvalidState:  # it is not open
            return 0

    async def _report(self) -> None:
        """Print progress and lag when they have changed."""
        last: dict[str, Any] = {}
        while True:
            await anyio.sleep(self.running.report)
            self._lag = await self._read_lag()
            found = self.statistics()
            record = {
                "topic": self.topic,
                "channel": self.channel,
                "relayed": found.relayed,
                "lag": found.lag,
                "in_flight": found.in_flight,
            }
            if record != last:
                lag = "lag unknown" if found.lag is None else f"lag {found.lag}"
                text = f"{self.topic}: {counted(found.relayed, 'message')} relayed, {lag}, {found.in_flight} in flight"
                self.connection.show(record, text)
            last = record

    async def _read_lag(self) -> int | None:
        """Return the unfinished messages of the channel; None if a part of them is not reported, or without lookup."""
        if not self.connection.load().lookupd:
            return None
        try:
            async with self.connection.new_admin() as admin:
                stats = await admin.stats(self.topic, self.channel)
        except NsqError:
            return None
        found = stats.channels.get(self.channel)
        return found.lag if found is not None and stats.complete else None

    # Health and metrics

    def _listen(self) -> socket.socket | None:
        if self.running.http is None:
            return None
        from nsqext.cli.status_page import listen_for_status, process_metrics

        process_metrics()  # refused before anything is received
        return listen_for_status(self.running.http)

    async def _serve_http(self, listener: socket.socket, producer: Producer | None) -> None:
        from prometheus_client import generate_latest

        from nsqext.app.health import Health, unready
        from nsqext.cli.status_page import StatusPage, process_metrics
        from nsqext.http.uvicorn_server import HttpServer

        prometheus = process_metrics()
        prometheus.attach(self)
        if producer is not None:
            prometheus.attach(producer)

        async def health() -> dict[int, Health]:
            found = [] if self.outage is None else [f"{self.target} stores no messages: {self.outage}"]
            if self._consumer is None:
                found.append("not started")
            else:
                found += filter(None, [unready(self._consumer)])
            return {1: Health(live=True, ready=not found, reasons=tuple(found))}

        async def metrics() -> dict[int, str]:
            if self._consumer is not None:
                prometheus.attach(self._consumer)
            return {1: generate_latest().decode()}

        await HttpServer(StatusPage(health, metrics)).serve(listener)
