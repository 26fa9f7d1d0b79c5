"""The producer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from nsqext.client.batches import Sorter
from nsqext.client.options import ProducerOptions
from nsqext.client.pool import NodePool
from nsqext.client.publication import Batch, Draft, Publication, Single, check_choice, key_bytes
from nsqext.client.retry import RetryPolicy
from nsqext.client.routes import Route, Target
from nsqext.client.turns import KeyTurns, Turn
from nsqext.errors import BatchFailed, InvalidState, LookupFailed, NsqError, TopicNotFound
from nsqext.lookup.directory import Directory
from nsqext.protocol.commands import sized
from nsqext.protocol.hashing import key_hash
from nsqext.protocol.names import check_topic
from nsqext.types import Receipt

__all__ = ("Producer",)

Outcome = Receipt | NsqError


class Producer:
    """Publishes messages to the leaders of their partitions.

    Use it as an asynchronous context manager, in asyncio or trio; leaving the block waits for what is being published and
    closes the connections. One producer serves any number of topics and tasks.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas.
        nsqd: nsqd addresses (TCP) to publish to without lookup; fine for the original NSQ.
        options: everything else.

    Raises:
        InvalidSetting: neither or both kinds of addresses, or an address that is none.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] = (),
        *,
        nsqd: str | Sequence[str] = (),
        options: ProducerOptions | None = None,
    ) -> None:
        self.options = options or ProducerOptions()
        self._directory = Directory(lookupd=lookupd, nsqd=nsqd, options=self.options.lookup)
        self._pool = NodePool(self.options.connection)
        self._retry = RetryPolicy(self.options)
        self._key_hash = key_hash(self.options.key_hash)
        self._turns = KeyTurns()
        self._routes: dict[str, Route] = {}
        self._tasks: TaskGroup | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise InvalidState("a producer is opened once", hint="make a new one")
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._pool.run)
        self._tasks.start_soon(self._directory.run)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._open = False
        try:
            with anyio.CancelScope(shield=True):
                await self._pool.aclose()
                await self._directory.aclose()
        finally:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        trace_id: int | None = None,
        key: str | bytes | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish a message and wait until it is stored.

        Args:
            topic: name of the topic.
            body: what is published; not empty.
            headers: extend headers, names and values of text; the topic has to support them.
            tag: consumers that ask for this tag get the message first; the topic has to support extend headers.
            trace_id: 0 to 2**64 - 1; the receipt then tells message id, offset and size.
            key: messages of one key go to one partition, and are stored in the order of the calls.
            partition: the partition; otherwise partitions take turns.

        Returns:
            Where it was stored.

        Raises:
            InvalidInput: something given cannot be right; nothing was sent.
            TopicNotFound: lookup does not know the topic.
            LookupFailed: no lookup address answers.
            PublishFailed: not stored within ``options.timeout``, although it was tried again.
            DeliveryUnknown: possibly stored.
            ServerError: refused by the server for good.

        When it is cancelled, the message may be stored or not.
        """
        publication = Single(topic, body, self.options.max_message_size, headers, tag, trace_id)
        if key is None and partition is None:
            return (await self._publish(publication))[0]
        check_choice(key, partition)
        publication.partition = partition
        if key is None:
            return (await self._publish(publication))[0]
        publication.key = key_bytes(key)
        turn = (topic, publication.key)
        if not self._turns.try_enter(turn):
            await self._turns.enter(turn)
        try:
            return (await self._publish(publication))[0]
        finally:
            self._turns.leave(turn)

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | Draft],
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
    ) -> list[Receipt]:
        """Publish messages in batches, one for each partition concerned (more where a batch would grow too large).

        Messages without key go to one partition, in their order. A batch is stored as a whole or not at all.

        Args:
            topic: name of the topic.
            messages: bodies, or `Draft` objects where a message has headers, a tag, a trace id or a key of its own.
            key: for all messages that have none of their own.
            partition: for all messages; not together with keys.

        Returns:
            A receipt for each message, in order.

        Raises:
            InvalidInput: a message cannot be right; nothing was sent.
            BatchFailed: not all were stored; its ``outcomes`` tell for each message.
            TopicNotFound: lookup does not know the topic.
            LookupFailed: no lookup address answers.

        When it is cancelled, any of the batches may be stored or not.
        """
        check_topic(topic)
        check_choice(key, partition)
        sorter = Sorter(
            await self._route(topic), self.options, self._key_hash, None if key is None else key_bytes(key), partition
        )
        sorter.add(messages)
        entered: list[Turn] = []
        try:
            for turn in sorted((topic, key) for key in sorter.keys):
                await self._turns.enter(turn)
                entered.append(turn)
            return await self._publish_batches(sorter)
        finally:
            for turn in entered:
                self._turns.leave(turn)

    async def _publish_batches(self, sorter: Sorter) -> list[Receipt]:
        batches = sorter.batches
        outcomes: list[Outcome] = [NsqError("not tried")] * sorter.count

        async def run(batch: Batch) -> None:
            results: Sequence[Outcome]
            try:
                results = await self._publish(batch)
            except NsqError as error:
                results = [error] * len(batch.indexes)
            for index, result in zip(batch.indexes, results, strict=True):
                outcomes[index] = result

        if len(batches) == 1:
            # the usual case, without a task and without sorting
            return await self._publish_alone(batches[0])
        async with anyio.create_task_group() as tasks:
            for batch in batches:
                tasks.start_soon(run, batch)
        receipts = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
        if len(receipts) < len(outcomes):
            raise BatchFailed(outcomes)
        return receipts

    async def _publish_alone(self, batch: Batch) -> list[Receipt]:
        try:
            return await self._publish(batch)
        except (TopicNotFound, LookupFailed):
            raise
        except NsqError as error:
            raise BatchFailed([error] * len(batch.indexes)) from error

    async def _publish(self, publication: Publication) -> list[Receipt]:
        started = time.monotonic()
        topic = publication.topic
        route = self._routes.get(topic)
        if route is None or route.view is not self._directory.peek(topic, "w") or not self._open:
            route = await self._route(topic)
        target: Target | None = None
        try:
            target = self._choose(route, publication)
            return await self._attempt(publication, route, target)
        except NsqError as error:
            first = error.at(topic=topic)

        async def again(last: NsqError) -> list[Receipt]:
            nonlocal route, target
            if last.refresh_lookup:
                await self._directory.refresh(topic, "w", failed=route.view)
            route = await self._route(topic)
            target = self._choose(route, publication, target)
            return await self._attempt(publication, route, target)

        return await self._retry.go_on(publication, first, again, started)

    def _choose(self, route: Route, publication: Publication, avoid: Target | None = None) -> Target:
        if publication.partition is not None:
            return route.at(publication.partition)
        if publication.key is not None:
            return route.at(route.keyed(publication.key, self._key_hash))
        return route.any(avoid)

    async def _attempt(self, publication: Publication, route: Route, target: Target) -> list[Receipt]:
        node = target.node
        connection = node.connection
        try:
            if connection is None or not connection.usable:
                connection = await self._pool.connection(node)
            verb, body = publication.encode(route.meta, node.negotiated)
            publication.in_doubt = True
            reply = await connection.request(sized(target.line(verb), body))
        except NsqError as error:
            publication.in_doubt = False
            raise error.at(topic=target.topic, partition=target.partition, node=node.node) from error.__cause__
        publication.in_doubt = False
        return publication.receipts(target, route.meta, reply)

    async def _route(self, topic: str) -> Route:
        if not self._open:
            raise InvalidState("the producer is not open", hint="use it inside 'async with Producer(...) as producer'")
        view = self._directory.peek(topic, "w") or await self._directory.resolve(topic, "w")
        route = self._routes.get(topic)
        if route is None or route.view is not view:
            route = self._routes[topic] = Route(topic, view, self._pool, route)
        return route
