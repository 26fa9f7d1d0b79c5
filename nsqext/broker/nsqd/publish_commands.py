"""Publish commands of the redesigned generation: check, store, replicate, answer.

Both generations store large batches in parts, so that other clients are served between them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.broker.nsqd.validation import recheck_auth
from nsqext.protocol.frames import OK, encode_trace_reply
from nsqext.protocol.record import raw_size
from nsqext.protocol.server.command_parser import Command, PublishItem, parse_publish
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Hosted, Node
    from nsqext.broker.nsqd.session import Session

T = TypeVar("T")
_Store = Callable[["Node", "Hosted", Sequence[Any], str], Stored]

PART: int = 2000
"""Messages stored in one turn of the event loop."""
logger: logging.Logger = logging.getLogger("nsqext.broker.nsqd")
_LENGTH = 4
_RECORD_HEAD = 26


def is_large(hosted: Hosted, items: Sequence[object]) -> bool:
    """Return whether a publish needs `store_in_parts`: it, or the publish in progress, is large."""
    return len(items) > PART or hosted.storing is not None


async def store_in_parts(hosted: Hosted, items: Sequence[T], put: Callable[[Sequence[T]], Stored]) -> Stored:
    """Store a batch; other publishes to the partition wait, so that its ids and offsets are consecutive.

    If ``put``, which stores a part, raises `RequestError` or `Refusal`, nothing is stored.
    """
    while hosted.storing is not None:
        await hosted.storing.wait()
    hosted.storing = done = anyio.Event()
    parts: list[Stored] = []
    try:
        for start in range(0, len(items), PART):
            if parts:
                await checkpoint()
            parts.append(put(items[start : start + PART]))
    except (RequestError, Refusal):
        if parts:
            hosted.partition.rollback(parts[0])
        raise
    finally:
        hosted.storing = None
        done.set()
    entries = [entry for part in parts for entry in part.entries]
    return Stored(parts[0].message_id, parts[0].offset, sum(part.size for part in parts), entries, parts)


@frozen(eq=False)
class Deferred:
    """The rest of a command; never awaited if the node is killed before."""

    start: Callable[[], Coroutine[Any, Any, None]]

    def __await__(self) -> Generator[Any, Any, None]:
        return self.start().__await__()


def store(node: Node, hosted: Hosted, items: Sequence[PublishItem], code: str) -> Stored:
    """Append messages, which `commit` makes readable."""
    if node.exiting or not (hosted.writable and node.may_write(hosted)):
        hosted.failed += 1
        node.publish_failed += 1
        if node.exiting:
            raise RequestError(code, "exiting", fatal=False)
        led = node.may_write(hosted)
        raise RequestError("E_FAILED_ON_NOT_WRITABLE" if led else "E_FAILED_ON_NOT_LEADER", "", fatal=False)
    if hosted.partition.extend:
        _check_sizes(node, hosted, items, code)
    try:
        stored = node.put(hosted, [NewMessage(item.body, item.trace_id, item.header, item.version) for item in items])
    except Refusal as refusal:
        raise RequestError(code, refusal.text, fatal=False) from None
    hosted.traffic.note([len(item.body) for item in items], node.options.wall())
    if hosted.traced:
        first, partition = stored.entries[0].record, hosted.partition
        logger.info(
            "TOPIC(%s-%d): stored %d messages from id %d, trace id %d, at offset %d",
            *(partition.topic, partition.partition, len(items), first.internal_id, first.trace_id, stored.offset),
        )
    return stored


def _check_sizes(node: Node, hosted: Hosted, items: Sequence[PublishItem], code: str) -> None:
    """Refuse records that the extend part makes too long for the disk, as late as the real server.

    Their ids are used up. Unlike the real server, this server accepts messages afterwards.
    """
    longest = node.limits.max_msg_size + _RECORD_HEAD
    for item in items:
        size = raw_size(len(item.body), len(item.header), True, item.version) - _LENGTH
        if size > longest:
            hosted.failed += 1
            node.publish_failed += 1
            hosted.partition.skip_ids(len(items))
            text = f"ErrType:7 ErrCode:0 : invalid message write size ({size}) maxMsgSize={longest}"
            raise RequestError(code, text, fatal=False)


def _replicator(hosted: Hosted, epoch: int) -> Callable[[Stored], Awaitable[None]]:
    if hosted.replicate is None or hosted.epoch != epoch:
        raise RequestError("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)
    return hosted.replicate


async def commit(
    node: Node, hosted: Hosted, stored: Stored, epoch: int, code: str, answer: Callable[[], None] = lambda: None
) -> None:
    """Wait until every in-sync replica has the entries, answer, and deliver.

    ``epoch`` is the partition's at storing: a later leader may lack the entries.

    Raises:
        RequestError: E_FAILED_ON_NOT_WRITABLE when the leader changed or lost its majority; for single publishes
            E_FAILED_ON_NOT_LEADER if the node is not the leader any more (source: protocol_v2.go of the redesigned
            server); ``code`` for a full disk. The entries may survive in each case.
    """
    # a node that is killed loses its role, with its replicas, before its connections end
    if hosted.replicate is not None or hosted.epoch != epoch or not hosted.leader:
        size = stored.size
        hosted.waiting += size
        try:
            for part in stored.parts or [stored]:
                await _replicator(hosted, epoch)(part)
                if stored.parts:
                    await checkpoint()
        except (RequestError, Refusal) as error:
            hosted.failed += 1
            node.publish_failed += 1
            if isinstance(error, Refusal):
                raise RequestError(code, error.text, fatal=False) from None
            if code == "E_PUB_FAILED" and not node.may_write(hosted):
                raise RequestError("E_FAILED_ON_NOT_LEADER", "", fatal=False) from error
            raise
        finally:
            hosted.waiting -= size
    answer()
    hosted.partition.commit(stored, flushed=not node.faults.flush_held)


def publish(session: Session, command: Command) -> Awaitable[None] | None:
    """Run PUB, PUB_TRACE, PUB_EXT."""
    rules = session.rules
    verb, hosted = command.words[0], rules.hosted
    if verb == b"PUB":
        item = PublishItem(command.body or b"")
    else:
        item = parse_publish(verb, command.body or b"", session.node.limits, rules.target)[0]
    return put(session, hosted, [item], "E_PUB_FAILED", item.trace_id if item.traced else None, store)


def publish_batch(session: Session, command: Command) -> Awaitable[None] | None:
    """Run MPUB, MPUB_TRACE, MPUB_EXT."""
    trace_id = 0 if command.words[0] == b"MPUB_TRACE" else None
    return put(session, session.rules.hosted, command.items or [], "E_MPUB_FAILED", trace_id, store)


def put(
    session: Session, hosted: Hosted | None, items: Sequence[Any], code: str, trace_id: int | None, store: _Store
) -> Awaitable[None] | None:
    """Store messages and answer, with a trace reply if ``trace_id`` is set; return what must be awaited."""
    if hosted is None:
        raise RequestError("E_TOPIC_NOT_EXIST")
    if session.rules.stale_auth:
        session.rules.stale_auth = False
        again = partial(put, session, hosted, items, code, trace_id, store)
        return recheck_auth(session, "PUB", hosted.partition.topic, "", again)
    if is_large(hosted, items):
        return Deferred(partial(_put_in_parts, session, hosted, items, code, trace_id, store))
    stored = store(session.node, hosted, items, code)
    session.count_published(hosted, len(stored.entries))
    reply = _reply(stored, trace_id)
    if hosted.replicate is None:
        session.answer(reply)
        hosted.partition.commit(stored, flushed=not session.node.faults.flush_held)
        return None
    return Deferred(partial(_commit_and_answer, session, hosted, stored, hosted.epoch, code, reply))


def _reply(stored: Stored, trace_id: int | None) -> bytes:
    return OK if trace_id is None else encode_trace_reply(stored.message_id, trace_id, stored.offset, stored.size)


async def _put_in_parts(
    session: Session, hosted: Hosted, items: Sequence[Any], code: str, trace_id: int | None, store: _Store
) -> None:
    epoch = hosted.epoch
    try:
        stored = await store_in_parts(hosted, items, lambda part: store(session.node, hosted, part, code))
    except RequestError as error:
        session.refuse(error)
    else:
        session.count_published(hosted, len(stored.entries))
        await _commit_and_answer(session, hosted, stored, epoch, code, _reply(stored, trace_id))


async def _commit_and_answer(
    session: Session, hosted: Hosted, stored: Stored, epoch: int, code: str, answer: bytes
) -> None:
    try:
        await commit(session.node, hosted, stored, epoch, code, partial(session.answer, answer))
    except RequestError as error:
        session.refuse(error)
