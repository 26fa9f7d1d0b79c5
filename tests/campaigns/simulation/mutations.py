"""Bugs that are put into client and broker, to measure whether the schedules find them.

A mutation replaces one function while it is applied. ``python -m tests.campaigns.simulation.mutate`` prints how many
seeds each of them takes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

from attrs import frozen

from tests.campaigns.simulation.plan import BANK, FILTERS, FLOW, LATE, PARTED

__all__ = ("MUTATIONS", "Mutation")


@frozen
class Mutation:
    """A bug.

    Attributes:
        name: what goes wrong.
        where: module, and path of the function in it.
        change: returns the broken function, given the right one.
        features: what all schedules use in which it is looked for; None for those of their seeds.
        importers: other modules that import the function.
    """

    name: str
    where: str
    change: Callable[[Any], Any]
    features: tuple[str, ...] | None = None
    importers: tuple[str, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the bug in for a while."""
        module, _, path = self.where.partition(":")
        owner: Any = import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        broken = self.change(vars(owner)[name])
        with ExitStack() as patches:
            for place in (owner, *map(import_module, self.importers)):
                patches.enter_context(patch.object(place, name, broken))
            yield


def _sometimes(share: float, broken: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a change that calls ``broken(right, *args)`` for a share of the calls, ``right`` for the others."""

    def change(right: Any) -> Any:
        def function(*args: Any, **settings: Any) -> Any:
            if random.random() < share:
                return broken(right, *args, **settings)
            return right(*args, **settings)

        return function

    return change


def _always(broken: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **settings: broken(right, *args, **settings)


def _loss_as_unsent(right: Any, self: Any, unsent: bool = True) -> Any:
    return right(self, True)


def _give_up_without_doubt(right: Any, self: Any, reason: str, in_doubt: bool = False) -> Any:
    self.unknown = False
    return right(self, reason, False)


async def _ignore_failure(right: Any, self: Any, message: Any, error: Exception) -> None:
    """Finish a message whose handler raised."""
    if not message.answered:
        message.finish_now()


def _start_twice(right: Any, self: Any, *args: Any) -> None:
    right(self, *args)
    right(self, *args)


def _other_receipt(right: Any, target: Any, response: bytes, trace_id: int) -> Any:
    from nsqext import Receipt

    found = right(target, response, trace_id)
    topic, partition, node, message_id, *rest = found
    return Receipt(topic, partition, node, message_id + 1, *rest) if message_id else found


def _send_without_rest(right: Any, self: Any, data: Any, requests: int = 0) -> None:
    """Forget what the kernel did not take."""
    right(self, data, requests)
    self._rest = b""


async def _commit_at_once(right: Any, node: Any, hosted: Any, stored: Any, epoch: int, code: str) -> None:
    """Acknowledge before the replicas have the record."""
    hosted.partition.commit(stored)


def _finish_without_effect(right: Any, self: Any, subscriber: Any, internal_id: int) -> None:
    """Lose the acknowledgement: the message is in flight until it times out."""


def _forget_in_flight(right: Any, self: Any, client: Any) -> None:
    """Drop what a lost client had in flight."""
    for delivery in self._in_flight.of(client):
        self._in_flight.remove(delivery.entry.record.internal_id)


def _acknowledge_too_far(right: Any, old: Any, new: Any) -> None:
    """Skip what is in flight when the leader moves."""
    right(old, new)
    for channel in new.channels.values():
        channel.cursor.jump(new.log.end_offset, new.log.end_count)


def _ends_without_sign(right: Any, self: Any) -> None:
    """Fail in the callback of the event loop, as under ``asyncio.run`` with sniffio before it was fixed."""
    if self._watch is not None:
        self.closed = True
        self._watch.end()
        self._watch = None
        raise RuntimeError("no event loop")
    right(self)


def _drop_received(right: Any, self: Any, frames: list[bytes]) -> None:
    """Lose a message that was received: it is neither handled nor requeued."""
    right(self, frames[1:] if len(frames) > 1 else frames)


def _skip_follower(right: Any, self: Any, name: str, target: Any, stored: Any) -> None:
    """Count a follower as complete without a copy."""


def _requeue_as_finish(right: Any, self: Any, subscriber: Any, internal_id: int, delay: float) -> None:
    self.finish(subscriber, internal_id)


def _store_twice(right: Any, self: Any, messages: Any) -> Any:
    right(self, messages)
    return right(self, messages)


def _refusal_as_answer(right: Any, self: Any, error: Any) -> None:
    """Take the refusal of a publish for its acknowledgement."""
    if self.pending and type(error).__name__.startswith(("FailedOnNot", "NotLeader", "NotWritable", "Pub")):
        reply = self.pending.popleft()
        reply.data = b"OK"
        if reply.wake is not None:
            reply.wake()
        return
    right(self, error)


def _elect_any(right: Any, coordinator: Any, replicas: Any) -> bool:
    """Elect a reachable replica, whether it is in sync or not; the preferred one is behind."""
    state = replicas.state
    reachable = [name for name in state.replicas if coordinator.reachable(name) and name in replicas.hosts]
    reachable.sort(key=lambda name: name in state.in_sync)
    if not reachable:
        return False
    coordinator.elect(replicas, reachable[0])
    return True


def _no_wait(right: Any, self: Any, message: Any) -> None:
    """Lanes continue with later messages of a key while the server holds one of it."""
    right(self, message)
    for (key, order), wait in list(self._waits.items()):
        if wait.message is message:
            del self._waits[key, order]
            wait.lane.messages.extend(wait.behind)
            wait.lane.wake()


async def _nothing_later(right: Any, self: Any, *args: Any, **settings: Any) -> None:
    """Do nothing, in a later turn of the event loop."""
    from anyio.lowlevel import checkpoint

    await checkpoint()


def _exceed_rdy(right: Any, self: Any, count: int) -> Any:
    return right(self, count + 2 if count else count)


def _append_without_sync(right: Any, self: Any, entries: Any) -> None:
    from attrs import evolve

    options, self._options = self._options, evolve(self._options, fsync="never")
    try:
        right(self, entries)
    finally:
        self._options = options


def _replace_without_sync(right: Any, path: Any, data: bytes, *, sync: bool) -> None:
    """Sync neither the file nor the name."""
    right(path, data, sync=False)


async def _acknowledge_before_publishing(right: Any, self: Any, batch: Any) -> None:
    from nsqext import NsqError, Receipt

    entries, self._flying = list(batch), []
    self._settle(entries, [Receipt(self._topic, None, "")] * len(entries))
    with suppress(NsqError):
        await self._publisher.publish_many(self._topic, [entry.message for entry in entries])


def _finish_all_but_one(right: Any, messages: Any, requeue_after: Any = None, **settings: Any) -> None:
    right((messages[:-1] if requeue_after is None else None) or messages, requeue_after, **settings)


async def _finish_the_whole_batch(right: Any, self: Any, last: Any) -> None:
    await right(self, len(self) - 1)


def _finish_unanswered(right: Any, messages: Any) -> None:
    """Finish what a loop over batches left."""
    for message in messages:
        if not message.answered and not message.expired:
            message.finish_now()


async def _fetch_too_few(right: Any, self: Any, limits: Any, deadline: float = float("inf")) -> Any:
    """Lose the last message of a batch that is handed out at its timeout."""
    messages = await right(self, limits, deadline)
    return messages[:-1] if len(messages) > 1 and deadline < float("inf") else messages


async def _finish_before_the_letter(right: Any, self: Any, message: Any, error: Any) -> None:
    message.finish_now()
    await right(self, message, error)


async def _finish_without_letter(right: Any, self: Any, message: Any, error: Any) -> None:
    """Finish a message that was delivered too often."""
    if error is None:
        message.finish_now()
    else:
        await right(self, message, error)


def _ignore_tag(right: Any, self: Any, tag: str) -> Any:
    """Give messages with a tag to any client without one, as if no client had requested the tag."""
    return right(self, "")


def _forget_tag(right: Any, self: Any, client: Any) -> None:
    client.tag = ""
    right(self, client)


def _keep_queue_of_tag(right: Any, self: Any, client: Any) -> None:
    """Keep the tag of the last client that leaves."""
    right(self, client)
    if client.tag:
        self._queues.setdefault(client.tag, deque())


def _delete_at_once(right: Any, self: Any, *args: Any) -> Any:
    """Delete messages from the outbox before they are published."""
    rows = right(self, *args)
    self.delete([row.sequence for row in rows])
    return rows


async def _commit_identity_at_once(right: Any, self: Any, session: Any, *args: Any) -> Any:
    """Commit the identity of a message before its handler has run."""
    found = await right(self, session, *args)
    await session.execute("COMMIT")
    await session.execute("BEGIN IMMEDIATE")
    return found


async def _finish_before_the_commit(right: Any, self: Any, handling: Any, call_next: Any) -> Any:
    handling.message.finish_now()
    return await right(self, handling, call_next)


async def _always_new(right: Any, self: Any, *args: Any) -> Any:
    return await right(self, *args) or ("SELECT 1", {})


def _give_turns_to_the_first(right: Any, self: Any, able: Any, most: int, in_flight: Any, now: float) -> None:
    for key in able:
        self._members[key].order = 0
    right(self, able, most, in_flight, now)


def _later_is_sooner(right: Any, self: Any, delivery: Any, delay: float) -> Any:
    """Keep a long delay on the disk as a tenth of it."""
    return right(self, delivery, delay / 10)


def _forget_delayed(right: Any, old: Any, new: Any) -> None:
    """Hand the channels over without their delayed queues."""
    right(old, new)
    for channel in new.channels.values():
        channel.cursor.delayed.clear()


def _copy_all_but_one(right: Any, source: Any, target: Any, *args: Any) -> bool:
    """Leave out the last record of a follower that catches up."""
    if source.log.end_count - target.log.end_count <= 1:
        return True
    return bool(right(source, target, source.log.end_count - target.log.end_count - 1))


_CLIENT = "nsqext.client"
_BROKER = "nsqext.broker"
_TRANSACTIONS = "nsqext.transactions"
_DISTRIBUTOR = "nsqext.client.consumer.subscriptions.rdy_distributor"


def _never_sync(right: Any, self: Any) -> None:
    self._dirty = False


_ALL = (
    Mutation(
        "unknown outcomes count as not stored",
        f"{_CLIENT}.producer.attempt_errors:outcome_unknown",
        _always(lambda right, error: False),
    ),
    Mutation(
        "publishes that are given up are reported as failed",
        f"{_CLIENT}.producer.attempt_errors:AttemptErrors.given_up",
        _always(_give_up_without_doubt),
    ),
    Mutation(
        "requests on a lost connection count as unsent",
        "nsqext.protocol.client.client_protocol:ClientProtocol.loss",
        _always(_loss_as_unsent),
    ),
    Mutation(
        "on_unknown=raise is ignored",
        f"{_CLIENT}.producer.attempt_errors:AttemptErrors.final",
        _always(lambda right, self: not self.last.retryable),
    ),
    Mutation(
        "partly sent commands lose their rest",
        "nsqext.transport.connection:Connection._send",
        _always(_send_without_rest),
    ),
    Mutation(
        "a reset connection raises in the event loop",
        "nsqext.transport.connection:Connection._release",
        _always(_ends_without_sign),
    ),
    Mutation(
        "receipts name another message",
        f"{_CLIENT}.producer.request:read_receipt",
        _always(_other_receipt),
    ),
    Mutation(
        "a message whose handler raised is finished",
        f"{_CLIENT}.consumer.handlers.failure_policy:FailurePolicy.failed",
        _always(_ignore_failure),
    ),
    Mutation(
        "twice as many handlers run",
        f"{_CLIENT}.consumer.handlers.workers:Workers.start",
        _always(_start_twice),
    ),
    Mutation(
        "messages of a key go to any lane",
        f"{_CLIENT}.consumer.handlers.key_lanes:lane_number",
        _always(lambda right, key, count: random.randrange(count)),
    ),
    Mutation(
        "one received message in a burst is lost",
        f"{_CLIENT}.consumer.subscriptions.subscription:Subscription._receive",
        _sometimes(0.2, _drop_received),
    ),
    Mutation(
        "publishes are acknowledged before replicas have them",
        f"{_BROKER}.nsqd.publish_commands:commit",
        _always(_commit_at_once),
    ),
    Mutation(
        "followers count as complete without a copy",
        f"{_BROKER}.coordinator.replication:ReplicaSet._push_to",
        _sometimes(0.3, _skip_follower),
    ),
    Mutation(
        "REQ is taken for FIN",
        f"{_BROKER}.engine.channel.channel:Channel.requeue",
        _always(_requeue_as_finish),
    ),
    Mutation(
        "messages that time out are lost",
        f"{_BROKER}.engine.channel.in_flight:InFlight.pop_due",
        _always(lambda right, self, now: []),
    ),
    Mutation(
        "a message in fifty is stored twice",
        f"{_BROKER}.engine.partition:Partition.put",
        _sometimes(0.02, _store_twice),
    ),
    Mutation(
        "closed connections keep their sockets",
        "nsqext.transport.connection:Connection.close",
        _always(lambda right, self: None),
    ),
    Mutation(
        "a refused publish counts as stored",
        "nsqext.protocol.client.client_protocol:ClientProtocol._receive_error",
        _always(_refusal_as_answer),
    ),
    Mutation(
        "a new leader skips what was in flight",
        f"{_BROKER}.coordinator.coordinator:hand_over_channels",
        _always(_acknowledge_too_far),
    ),
    Mutation(
        "messages in flight at a lost client are dropped",
        f"{_BROKER}.engine.channel.channel:Channel._requeue_all_of",
        _always(_forget_in_flight),
    ),
    Mutation(
        "a FIN in fifty has no effect",
        f"{_BROKER}.engine.channel.channel:Channel.finish",
        _sometimes(0.02, _finish_without_effect),
    ),
    Mutation(
        "a new leader counts ids from the beginning",
        f"{_BROKER}.engine.partition:Partition._continue_counter",
        _always(lambda right, self: None),
    ),
    Mutation(
        "a bucket of keys is released before its messages are answered",
        f"{_CLIENT}.consumer.subscriptions.key_buckets:KeyBuckets._wait_answered",
        _always(_nothing_later),
    ),
    Mutation(
        "a replica that is not in sync is elected",
        f"{_BROKER}.coordinator.membership:_elect",
        _always(_elect_any),
    ),
    Mutation(
        "lanes do not wait for messages that the server holds",
        f"{_CLIENT}.consumer.handlers.key_lanes:KeyLanes.expired",
        _always(_no_wait),
    ),
    Mutation(
        "requests do not expire",
        "nsqext.transport.connection:Connection.tick",
        _always(lambda right, self: None),
    ),
    Mutation(
        "an error does not refresh lookup",
        "nsqext.lookup.metadata:MetadataCache.refresh",
        _always(_nothing_later),
    ),
    Mutation(
        "a node sends more messages than RDY allows",
        f"{_BROKER}.nsqd.session:Session._apply_ready",
        _always(_exceed_rdy),
    ),
    Mutation(
        "the files of channels are not synced",
        f"{_BROKER}.engine.storage.partition_store:write_atomically",
        _always(_replace_without_sync),
    ),
    Mutation(
        "records are acknowledged before they are on the disk",
        f"{_BROKER}.engine.storage.segments:SegmentStore.append",
        _always(_append_without_sync),
    ),
    Mutation(
        "files with fsync=interval are never synced",
        f"{_BROKER}.engine.storage.segments:SegmentStore.sync",
        _always(_never_sync),
    ),
    Mutation(
        "a batcher acknowledges before it publishes",
        f"{_CLIENT}.producer.batcher:Batcher._publish",
        _always(_acknowledge_before_publishing),
    ),
    Mutation(
        "finishing a batch forgets its last message",
        f"{_CLIENT}.consumer.handlers.batches:_answer",
        _always(_finish_all_but_one),
    ),
    Mutation(
        "finish_up_to finishes the whole batch",
        f"{_CLIENT}.consumer.handlers.batches:MessageBatch.finish_up_to",
        _always(_finish_the_whole_batch),
    ),
    Mutation(
        "leaving a loop over batches finishes its messages",
        f"{_CLIENT}.consumer.handlers.batches:requeue_unanswered",
        _always(_finish_unanswered),
    ),
    Mutation(
        "a fetch that times out loses a message",
        f"{_CLIENT}.consumer.handlers.iteration:MessageIteration.collect",
        _always(_fetch_too_few),
    ),
    Mutation(
        "a message is finished before its dead letter is stored",
        f"{_CLIENT}.consumer.handlers.failure_policy:FailurePolicy.dead_letter",
        _always(_finish_before_the_letter),
    ),
    Mutation(
        "messages delivered too often are finished without a dead letter",
        f"{_CLIENT}.consumer.handlers.failure_policy:FailurePolicy.dead_letter",
        _always(_finish_without_letter),
    ),
    Mutation(
        "nodes ignore the tags of messages",
        f"{_BROKER}.engine.channel.in_flight:TagSelector.pick",
        _always(_ignore_tag),
    ),
    Mutation(
        "nodes ignore the tags of consumers",
        f"{_BROKER}.engine.channel.in_flight:TagSelector.add",
        _always(_forget_tag),
    ),
    Mutation(
        "messages wait for a tag whose consumers have left",
        f"{_BROKER}.engine.channel.in_flight:TagSelector.remove",
        _always(_keep_queue_of_tag),
    ),
    Mutation(
        "nodes ignore header filters",
        f"{_BROKER}.engine.channel.rules:passes_filters",
        _always(lambda right, client, delivery, partition: True),
        (FILTERS,),
        (f"{_BROKER}.engine.channel.channel",),
    ),
    Mutation(
        "a message in twenty does not pass its header filter",
        f"{_BROKER}.engine.channel.rules:passes_filters",
        _sometimes(0.05, lambda right, client, delivery, partition: False),
        (FILTERS,),
        (f"{_BROKER}.engine.channel.channel",),
    ),
    Mutation(
        "long delays end too early",
        f"{_BROKER}.engine.channel.cursor:Cursor.delay",
        _always(_later_is_sooner),
        (LATE,),
    ),
    Mutation(
        "a new leader has no delayed queues",
        f"{_BROKER}.coordinator.coordinator:hand_over_channels",
        _always(_forget_delayed),
        (LATE,),
    ),
    Mutation(
        "a follower catches up without the last record",
        f"{_BROKER}.coordinator.replication:copy_records",
        _always(_copy_all_but_one),
        (PARTED,),
        (f"{_BROKER}.coordinator.coordinator",),
    ),
    Mutation(
        "followers keep records that their leader lacks",
        f"{_BROKER}.coordinator.replication:cut_tail",
        _always(lambda right, source, target: None),
        (PARTED,),
    ),
    Mutation(
        "a relay deletes messages before it publishes them",
        f"{_TRANSACTIONS}.store:OutboxStore.rows",
        _always(_delete_at_once),
        (BANK,),
    ),
    Mutation(
        "a relay sends no identities",
        f"{_TRANSACTIONS}.relay:_message",
        _always(lambda right, row, *, extend: right(row, extend=False)),
        (BANK,),
    ),
    Mutation(
        "an inbox commits an identity before the handler has run",
        f"{_TRANSACTIONS}.inbox:Inbox._record",
        _always(_commit_identity_at_once),
        (BANK,),
    ),
    Mutation(
        "an inbox commits after the message is finished",
        f"{_TRANSACTIONS}.inbox:HandlerTransaction.handle",
        _always(_finish_before_the_commit),
        (BANK,),
    ),
    Mutation(
        "an inbox knows no message again",
        f"{_TRANSACTIONS}.inbox:Inbox._record",
        _always(_always_new),
        (BANK,),
    ),
    Mutation(
        "what a connection has in flight is given to another one",
        f"{_DISTRIBUTOR}:_Member.settle",
        _always(lambda right, member, in_flight, now: setattr(member, "claim", member.share)),
        (FLOW,),
    ),
    Mutation(
        "a turn that has ended is not given to the connection that waits longest",
        f"{_DISTRIBUTOR}:RdyDistributor._take_turns",
        _always(_give_turns_to_the_first),
        (FLOW,),
    ),
)

MUTATIONS: dict[str, Mutation] = {mutation.name: mutation for mutation in _ALL}
