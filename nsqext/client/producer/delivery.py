"""From a publication to its receipts: straight where all is well, else by more attempts with refreshes and pauses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from nsqext.client.producer.retry import given_up, refusal
from nsqext.errors import ConnectionFailed, NsqError, ServerError
from nsqext.errors.server import NotLeader, TopicNotExist

if TYPE_CHECKING:
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.routing import Route, Target
    from nsqext.client.producer.sender import Sender
    from nsqext.types import Receipt

__all__ = ("PublishAttempt", "deliver")

_MOVES = 3
"""Failures after which even a publish that could go elsewhere waits before it does."""

_clock = time.monotonic


async def deliver(sender: Sender, publication: PublishRequest, started: float | None = None) -> list[Receipt]:
    """Publish; returns a receipt for each message.

    Args:
        sender: sends it.
        publication: what is published.
        started: when the publish began, in seconds of the monotonic clock, where that was before now.

    Raises:
        NsqError: see `nsqext.client.producer.producer.Producer.publish`.
    """
    if started is None:
        started = _clock()
    route = sender.current(publication.topic)
    if route is None:
        return await PublishAttempt(sender, publication, started).run()
    target = None
    failure: NsqError | None = None
    try:
        target = sender.choose(route, publication)
        connection = target.node.connection
        if connection is not None and connection.usable:
            # as `Sender.request` does it, without the cost of one more coroutine
            command = publication.command(target, route.meta, target.node.negotiated)
            publication.in_doubt = True
            reply = await connection.request(command, started + sender.options.timeout, breaks=publication.breaks)
            publication.in_doubt = False
            return sender.receipts(publication, route, target, connection, reply)
    except NsqError as error:
        publication.in_doubt = False
        failure = error.at(topic=publication.topic)
        if target is not None:
            failure.at(partition=target.partition, node=target.node.node)
    return await PublishAttempt(sender, publication, started).run(route, target, failure)


class PublishAttempt:
    """A publication on its way, with all its attempts.

    Args:
        sender: sends it.
        publication: what is published.
        started: when the publish began, in seconds of the monotonic clock.

    Attributes:
        errors: how the attempts so far ended.
    """

    __slots__ = ("_publication", "_route", "_scope", "_sender", "_started", "_tried", "errors")

    def __init__(self, sender: Sender, publication: PublishRequest, started: float) -> None:
        self._sender = sender
        self._publication = publication
        self._started = started
        self._route: Route | None = None
        self._tried: list[Target] = []
        self._scope = anyio.CancelScope()
        self.errors: list[NsqError] = []

    async def run(
        self, route: Route | None = None, target: Target | None = None, failure: NsqError | None = None
    ) -> list[Receipt]:
        """Publish; returns the receipts.

        Args:
            route: the route of an attempt that was made already.
            target: its target; None where there was none to be found.
            failure: how it ended; None where there was no attempt.

        Raises:
            NsqError: see `nsqext.client.producer.producer.Producer.publish`.
        """
        self._route = route
        if failure is not None:
            self._note(failure, target)
        left = self._started + self._sender.options.timeout - _clock()
        self._sender.running.add(self._scope)
        try:
            with self._scope:
                # a connection that closing broke leaves an outcome to tell, and nothing to try again
                self._scope.deadline = anyio.current_time() + (0.0 if self._sender.closed else max(0.0, left))
                return await self._run(target if failure is None else None)
        finally:
            self._sender.running.discard(self._scope)
        if self._sender.closed:
            reason = "before the producer was closed"
        else:
            reason = f"within {self._sender.options.timeout:g} s"
        raise given_up(reason, self.errors, self._publication.in_doubt).at(topic=self._publication.topic)

    async def _run(self, target: Target | None) -> list[Receipt]:
        if not self.errors:
            try:
                return await self._attempt(target)
            except NsqError as error:
                self.errors.append(error)
        if self._sender.retry.final(self.errors):
            refused = refusal(self.errors)
            raise refused from refused.__cause__
        return await self._sender.retry.go_on(self, self._again)

    @property
    def moves(self) -> bool:
        """Whether the next attempt goes somewhere that has not failed yet."""
        return (
            self._publication.free
            and len(self.errors) <= _MOVES
            and self._route is not None
            and self._route.untried(self._tried)
        )

    @property
    def paced(self) -> bool:
        """Whether the next attempt waits for an answer of lookup."""
        return self.errors[-1].refresh_lookup and self._sender.directory.asks

    async def _again(self) -> list[Receipt]:
        last = self.errors[-1]
        topic = self._publication.topic
        if last.refresh_lookup:
            view = self._route.view if self._route is not None else None
            refused = self._tried[-1].partition if self._tried and _not_there(last) else None
            partition = refused if refused is not None and refused >= 0 else None
            if view is not None and self.moves:
                self._sender.refresh_soon(topic, view, partition)
            else:
                await self._sender.directory.refresh(topic, "w", failed=view, partition=partition)
        return await self._attempt(None)

    async def _attempt(self, target: Target | None) -> list[Receipt]:
        sender, publication = self._sender, self._publication
        if target is None or self._route is None:
            route = self._route = await sender.find(publication.topic)
            try:
                target = sender.choose(route, publication, self._tried)
            except NsqError as error:
                raise error.at(topic=publication.topic) from error.__cause__
        try:
            connection = await sender.connected(target)
            return await sender.request(
                publication, self._route, target, connection, self._started + sender.options.timeout
            )
        except NsqError as error:
            self._mark(error, target)
            raise

    def _note(self, error: NsqError, target: Target | None) -> None:
        self.errors.append(error)
        self._mark(error, target)

    def _mark(self, error: NsqError, target: Target | None) -> None:
        if target is not None:
            self._tried.append(target)
            if error.retryable and isinstance(error, ServerError):
                target.refused()


def _not_there(error: NsqError) -> bool:
    """Whether the node that lookup names does not lead the partition, or is gone."""
    return isinstance(error, (NotLeader, TopicNotExist, ConnectionFailed))
