"""Judge a history by docs/explanation/guarantees.md alone.

Each checker returns a line for each violation. None of them knows how client or broker work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from tests.campaigns.simulation.history import Channel, Delivery, History, Letter, Publish
from tests.campaigns.simulation.promises import broken_promises

__all__ = ("CHECKERS", "judge")

_CLOSE = 45.0
"""Longest close: ``close_timeout`` of consumers is 30 s."""

_MOMENT = 0.01
_UNDERWAY = 0.3
"""Longest time that a message takes from a node to its consumer."""
_UNNOTICED = 30.0
"""Longest time until heartbeats show that a connection was lost without a sign."""
_DELIVERED = 100.0
"""Longest time from the end of the faults to the delivery of everything: timeouts of messages are 60 s."""
_ON_DISK = 900.0
"""Delays above this are kept on the disk, in seconds."""
_TASKS, _SOCKETS, _SESSIONS = 600, 600, 200

Checker = Callable[[History], Iterator[str]]


def lost(history: History) -> Iterator[str]:
    """*A publish that returned is stored*; *at least once*: each channel handles it, or its dead letter is handled."""
    handled = {(found.topic, found.channel, found.body) for found in history.deliveries if found.outcome == "returned"}
    for channel in history.channels:
        handled |= {(channel.topic, channel.name, body) for topic, _, body in handled if topic == channel.letters}
    for channel in history.channels:
        for publish in history.publishes:
            due = channel.wants(publish) and publish.outcome == "stored"
            if due and (channel.topic, channel.name, publish.body) not in handled:
                yield f"{publish.body!r}, stored at {publish.end:.3f} s, was never handled on {channel.name}"


def lost_after_creation(history: History) -> Iterator[str]:
    """The same for a topic that was deleted and created again, once the faults have ended."""
    handled = {found.body for found in history.deliveries if found.outcome == "returned"}
    for publish in history.publishes:
        due = publish.outcome == "stored" and history.is_of_new_topic(publish)
        if due and publish.body not in handled:
            yield f"{publish.body!r}, stored in the new topic at {publish.end:.3f} s, was never handled"


def changed(history: History) -> Iterator[str]:
    """Headers arrive as they were published."""
    yield from history.changed


def phantom(history: History) -> Iterator[str]:
    """*A publish that raised is not stored, or its outcome is unknown.*"""
    failed = {publish.body: publish for publish in history.publishes if publish.outcome == "failed"}
    for body in sorted({delivery.body for delivery in history.deliveries} & failed.keys()):
        yield f"{body!r} was delivered, and its publish had failed: {failed[body].error}"


def invented(history: History) -> Iterator[str]:
    """A message that is delivered was published to that topic."""
    known = {(publish.topic, publish.body) for publish in history.publishes}
    for channel in history.channels:
        known |= {(channel.letters, body) for topic, body in known if topic == channel.topic and channel.letters}
    for delivery in history.deliveries:
        if (delivery.topic, delivery.body) not in known:
            yield f"{delivery.body!r} was delivered on {delivery.channel}, and never published to {delivery.topic}"


def stored_twice(history: History) -> Iterator[str]:
    """*A message may be stored twice in one case only*: its outcome was unknown and it was sent again.

    The log of a topic that was deleted does not tell what it contained.
    """
    copies: dict[tuple[str, bytes], set[tuple[int, int]]] = defaultdict(set)
    for delivery in history.deliveries:
        copies[delivery.topic, delivery.body].add((delivery.partition, delivery.message_id))
    letters = {channel.letters for channel in history.channels}  # published by consumers, which repeat
    deleted = {publish.body for publish in history.publishes if history.may_be_of_deleted_topic(publish)}
    for (topic, body), found in copies.items():
        if len(found) > 1 and history.on_unknown != "retry" and topic not in letters and body not in deleted:
            yield f"{body!r} is stored {len(found)} times, although nothing may be sent again"


def _first_begins(history: History, topic: str, channel: str) -> dict[bytes, Delivery]:
    first: dict[bytes, Delivery] = {}
    for delivery in history.deliveries:
        if (delivery.topic, delivery.channel) == (topic, channel):
            first.setdefault(delivery.body, delivery)
    return first


def reordered(history: History) -> Iterator[str]:
    """Order within a key and partition, or within a partition, on channels that promise it."""
    for channel in history.channels:
        if not channel.order:
            continue
        first = _first_begins(history, channel.topic, channel.name)
        rows: dict[tuple[int, str], list[Publish]] = defaultdict(list)
        for publish in history.publishes:
            if publish.topic == channel.topic and publish.outcome == "stored" and publish.body in first:
                key = publish.key if channel.order == "key" else ""
                rows[first[publish.body].partition, key].append(publish)
        for (partition, key), row in rows.items():
            where = f"{channel.topic}[{partition}]/{channel.name} key {key!r}"
            if channel.order == "key" and not channel.shared:
                beginning = _beginning(history, channel, partition)
                row = [publish for publish in row if first[publish.body].message_id >= beginning]
            given_up = [
                when for topic, number, when in history.order_given_up if (topic, number) == (channel.topic, partition)
            ]
            yield from _overtaken(row, first, where, given_up)


def overtaken_while_it_failed(history: History) -> Iterator[str]:
    """A message that failed blocks *its partition* on ordered topics, and *its key* in lanes and with key_failover."""
    keys = {publish.body: publish.key for publish in history.publishes}
    for channel in history.channels:
        if not channel.order:
            continue
        waiting: dict[tuple[int, str], dict[int, Delivery]] = defaultdict(dict)
        for delivery in history.deliveries:
            if (delivery.topic, delivery.channel) != (channel.topic, channel.name):
                continue
            key = keys.get(delivery.body, "") if channel.order == "key" else ""
            row = waiting[delivery.partition, key]
            ended = [found for found in row.values() if found.outcome == "returned" and found.end <= delivery.begin]
            for earlier in ended:
                del row[earlier.message_id]
            earlier_ones = (number for number in row if number < delivery.message_id)
            blocking = min((number for number in earlier_ones if not _together(row[number], delivery)), default=None)
            if blocking is not None and not _disturbed(history, row[blocking].begin, delivery.begin):
                yield (
                    f"{channel.topic}[{delivery.partition}]/{channel.name} key {key!r}: {delivery.body!r} began at "
                    f"{delivery.begin:.3f} s, before {row[blocking].body!r} was handled"
                )
                break
            row[delivery.message_id] = delivery


def _together(one: Delivery, other: Delivery) -> bool:
    """Return whether two messages were handed out in the same batch, whose handler answers them in any order."""
    return one.batch == other.batch > 0


def _beginning(history: History, channel: Channel, partition: int) -> int:
    """Return the first message id that lanes received: *the guarantee begins with the first message*."""
    return next(
        (
            found.message_id
            for found in history.deliveries
            if (found.topic, found.channel, found.partition) == (channel.topic, channel.name, partition)
        ),
        0,
    )


def _overtaken(row: list[Publish], first: dict[bytes, Delivery], where: str, given_up: list[float]) -> Iterator[str]:
    """Compare publishes of which one ended before the other began, or that are of one batch.

    Inversions that a warning announced are excused: *then a warning is logged, and the later messages are handled*.
    """
    row = sorted(row, key=lambda publish: (publish.begin, publish.batch, publish.number))
    ended: list[tuple[float, int, Publish]] = []
    latest: Publish | None = None  # of what ended before, the one that was handled last
    batch: Publish | None = None  # the same for the batch of ``later``
    for later in row:
        if batch is not None and batch.batch != later.batch:
            batch = None
        while ended and ended[0][0] <= later.begin:
            latest = _handled_last(latest, heappop(ended)[2], first)
        for earlier in (latest, batch):
            if earlier is None or first[later.body].begin >= first[earlier.body].begin:
                continue
            if not any(earlier.begin <= when <= first[later.body].begin + _MOMENT for when in given_up):
                yield (
                    f"{where}: {later.body!r} was handled at {first[later.body].begin:.3f} s, before the earlier "
                    f"{earlier.body!r} at {first[earlier.body].begin:.3f} s"
                )
                return
        batch = _handled_last(batch, later, first) if later.batch else None
        heappush(ended, (later.end, later.number, later))


def _handled_last(one: Publish | None, other: Publish, first: dict[bytes, Delivery]) -> Publish:
    return other if one is None or first[other.body].begin >= first[one.body].begin else one


def receipts(history: History) -> Iterator[str]:
    """Receipts are unique, name the stored message, and offsets grow with time, unless the topic was created again."""
    owners: dict[tuple[str, int, int], bytes] = {}
    ids: dict[tuple[str, bytes], set[int]] = defaultdict(set)
    for delivery in history.deliveries:
        ids[delivery.topic, delivery.body].add(delivery.message_id)
    last: dict[tuple[str, int], Publish] = {}
    stored = [
        publish
        for publish in history.publishes
        if publish.outcome == "stored"
        and publish.message_id is not None
        and not (history.recreated and publish.topic == "recreated")
    ]
    for publish in sorted(stored, key=lambda publish: publish.end):
        place = publish.topic, publish.partition
        other = owners.setdefault((*place, publish.message_id or 0), publish.body)
        if other != publish.body:
            yield f"{publish.body!r} and {other!r} have the same message id {publish.message_id}"
        found = ids[publish.topic, publish.body]
        if found and publish.message_id not in found:
            yield f"{publish.body!r} has a receipt for {publish.message_id}, and was delivered as {sorted(found)}"
        before = last.get(place)
        if before is not None and before.end <= publish.begin and (before.offset or 0) >= (publish.offset or 0):
            yield f"{publish.body!r} has offset {publish.offset}, the earlier {before.body!r} has {before.offset}"
        last[place] = publish


def redelivered_without_cause(history: History) -> Iterator[str]:
    """A handled message is delivered again only because a consumer was lost, a timeout passed, or a leader changed."""
    handled: dict[tuple[str, str, int, int], Delivery] = {}
    published = {publish.body: publish for publish in history.publishes}
    for delivery in sorted(history.deliveries, key=lambda delivery: delivery.begin):
        key = delivery.topic, delivery.channel, delivery.partition, delivery.message_id
        before = handled.get(key)
        if (
            before is not None
            and before.end < delivery.begin
            and not _disturbed(history, before.begin, delivery.begin)
            and not history.may_be_read_again(published.get(delivery.body), delivery)
        ):
            yield (
                f"{delivery.body!r} was handled on {delivery.channel} at {before.end:.3f} s, and delivered again at "
                f"{delivery.begin:.3f} s without a cause"
            )
        if delivery.outcome == "returned":
            handled[key] = delivery


def redelivered_early(history: History) -> Iterator[str]:
    """A message that was requeued with a delay is not delivered before it has passed, unless its leader changed.

    A long delay is kept on the disk, and the next leader has it.
    """
    requeued: dict[tuple[str, str, int, int], Delivery] = {}
    for delivery in sorted(history.deliveries, key=lambda delivery: delivery.begin):
        key = delivery.topic, delivery.channel, delivery.partition, delivery.message_id
        before = requeued.get(key)
        due = 0.0 if before is None else before.end + before.delay - _MOMENT
        if before is not None and before.end <= delivery.begin < due and not _may_be_early(history, before, due):
            yield (
                f"{delivery.body!r} was requeued for {before.delay:g} s on {delivery.channel} at {before.end:.3f} s, "
                f"and delivered again at {delivery.begin:.3f} s"
            )
        requeued[key] = delivery


def _may_be_early(history: History, before: Delivery, due: float) -> bool:
    """Return whether the end of a connection or a new leader may have ended a delay; the request may be lost, too."""
    return _disturbed(history, before.end, before.end if before.delay > _ON_DISK else due)


def delivered_while_paused(history: History) -> Iterator[str]:
    """A channel that all nodes have paused delivers nothing; what was sent before may arrive a moment later."""
    for topic, channel, begin, end in history.pauses:
        if _faulty(history, begin, end):
            continue  # a new leader may not know it
        for delivery in history.deliveries:
            mine = (delivery.topic, delivery.channel) == (topic, channel)
            if mine and begin + _UNDERWAY < delivery.received < end:
                yield f"{delivery.body!r} arrived at {delivery.received:.3f} s, {channel} was paused at {begin:.3f} s"
                return


def _disturbed(history: History, begin: float, end: float) -> bool:
    settled = history.settle + (_UNNOTICED if history.half_open else 0.0)
    return any(first - 1.0 <= end and begin <= last + settled for first, last in history.disturbances)


def too_many_at_once(history: History) -> Iterator[str]:
    """A consumer runs as many handlers at once as it was allowed to."""
    changes: list[tuple[float, int, str]] = []
    for delivery in history.deliveries:
        changes.append((delivery.begin, 1, delivery.consumer))
        changes.append((delivery.end, -1, delivery.consumer))
    running: dict[str, int] = defaultdict(int)
    for moment, change, consumer in sorted(changes):
        running[consumer] += change
        if running[consumer] > history.concurrency.get(consumer, 1):
            yield f"{consumer} ran {running[consumer]} handlers at {moment:.3f} s"
            return


def unbounded_waits(history: History) -> Iterator[str]:
    """*A publish that takes longer than its timeout fails*; publishes after the last fault succeed; closing ends."""
    for publish in history.publishes:
        if publish.outcome == "pending":
            yield f"{publish.body!r}: the publish of {publish.begin:.3f} s never ended"
        elif publish.outcome != "killed" and publish.end - publish.begin > _longest(publish, history):
            yield f"{publish.body!r}: the publish took {publish.end - publish.begin:.3f} s"
        elif history.healed is None or publish.begin < history.healed + history.settle:
            continue
        elif publish.outcome != "stored" and not _discovers(publish, history):
            yield f"{publish.body!r}: the publish of {publish.begin:.3f} s, after all faults, failed: {publish.error}"
    if history.close_seconds > _CLOSE:
        yield f"closing took {history.close_seconds:.3f} s"


def _longest(publish: Publish, history: History) -> float:
    return history.timeout + history.settle_timeout + publish.patience + history.paused + 2.0


def _discovers(publish: Publish, history: History) -> bool:
    """Return whether a publish may be the first one on a lost connection, or to a node that does not lead any more.

    The log of an ordered partition is searched with one message a round trip, which may take longer than the timeout.
    That of a topic that was created again does not tell what the former leader stored before.
    """
    refused = "E_FAILED_ON_NOT_LEADER" in publish.error
    if history.on_unknown == "settle":
        late = "not stored within" in publish.error or "still unknown after" in publish.error
        replaced = refused and "the log was replaced" in publish.error
        return {"ordered": late, "recreated": history.recreated and replaced}.get(publish.topic, False)
    stale = history.half_open or history.misled or refused
    return stale and history.on_unknown == "raise" and publish.outcome == "unknown"


def late_deliveries(history: History) -> Iterator[str]:
    """Everything stored is handled within a bounded time after the faults ended.

    A partition that delivers one message at a time needs as long as its backlog: there the time counts from the
    message that the partition delivered before. Handlers that take seconds need as long as all of them together.
    """
    if history.healed is None:
        return
    busy: dict[str, float] = defaultdict(float)
    for delivery in history.deliveries:
        if delivery.outcome == "returned":
            busy[delivery.consumer] += delivery.end - delivery.begin
    first: dict[tuple[str, str, bytes], Delivery] = {}
    delays: dict[tuple[str, str, bytes], float] = defaultdict(float)
    for delivery in history.deliveries:
        place = delivery.topic, delivery.channel, delivery.body
        delays[place] += delivery.delay
        if delivery.outcome == "returned":
            first.setdefault(place, delivery)
    for channel in history.channels:
        before = _times_before(history, channel) if channel.order == "partition" else {}
        for publish in history.publishes:
            found = first.get((channel.topic, channel.name, publish.body))
            if publish.topic != channel.topic or publish.outcome != "stored" or found is None:
                continue
            late = found.begin - max(history.healed, publish.end, before.get(id(found), 0.0))
            if late > _DELIVERED + busy[found.consumer] + delays[channel.topic, channel.name, publish.body]:
                yield f"{publish.body!r} was handled on {channel.name} {late:.3f} s after all faults"


def _times_before(history: History, channel: Channel) -> dict[int, float]:
    """Return for each delivery of a channel, by its ``id()``, when its partition had delivered the previous one."""
    times: dict[int, float] = {}
    latest: dict[int, float] = {}
    for delivery in sorted(history.deliveries, key=lambda found: found.begin):
        if (delivery.topic, delivery.channel) == (channel.topic, channel.name):
            times[id(delivery)] = latest.get(delivery.partition, 0.0)
            latest[delivery.partition] = delivery.begin
    return times


def two_owners_of_a_key(history: History) -> Iterator[str]:
    """*key_failover*: the messages of a key are handled by one consumer at a time, unless a consumer was lost."""
    keys = {publish.body: publish.key for publish in history.publishes}
    for channel in history.channels:
        if not channel.shared:
            continue
        running: dict[tuple[int, str], Delivery] = {}
        for delivery in history.deliveries:
            if (delivery.topic, delivery.channel) != (channel.topic, channel.name):
                continue
            place = delivery.partition, keys.get(delivery.body, "")
            other = running.get(place)
            if (
                other is not None
                and other.consumer != delivery.consumer
                and other.end > delivery.begin
                and not _disturbed(history, other.begin, delivery.begin)
            ):
                yield (
                    f"{delivery.body!r} began on {delivery.consumer} at {delivery.begin:.3f} s, while {other.consumer} "
                    f"handled {other.body!r} of the same key"
                )
            if other is None or delivery.end > other.end:
                running[place] = delivery


def wrong_tag(history: History) -> Iterator[str]:
    """*A consumer with a tag receives messages of that tag*, and other consumers only while none of it is connected."""
    publishes = {publish.body: publish for publish in history.publishes}
    for delivery in history.deliveries:
        publish = publishes.get(delivery.body)
        if publish is None:
            continue
        tag = history.tags.get(delivery.consumer, "")
        if tag and tag != publish.tag:
            yield f"{delivery.body!r} of tag {publish.tag!r} was delivered to {delivery.consumer} of tag {tag!r}"
        if tag or not publish.tag:
            continue
        for wanted in history.wanted:
            missed = (wanted.topic, wanted.channel, wanted.tag) == (delivery.topic, delivery.channel, publish.tag)
            connected = wanted.begin <= publish.begin and delivery.begin <= wanted.end
            if missed and connected and not _faulty(history, wanted.begin, delivery.begin):
                yield (
                    f"{delivery.body!r} of tag {publish.tag!r} was delivered to {delivery.consumer} without a tag at "
                    f"{delivery.begin:.3f} s, and a consumer of its tag was connected since {wanted.begin:.3f} s"
                )


def wrong_header(history: History) -> Iterator[str]:
    """A consumer with a header filter receives messages with this header and no others."""
    publishes = {publish.body: publish for publish in history.publishes}
    channels = {(channel.topic, channel.name): channel for channel in history.channels if channel.color}
    for delivery in history.deliveries:
        channel, publish = channels.get((delivery.topic, delivery.channel)), publishes.get(delivery.body)
        if channel is not None and publish is not None and not channel.wants(publish):
            yield f"{delivery.body!r} with headers {publish.headers} was delivered to a filter of {channel.color}"


def _faulty(history: History, begin: float, end: float) -> bool:
    """Return whether a fault may have ended a connection; consumers that leave end only their own."""
    return any(first - 1.0 <= end and begin <= last + history.settle for first, last in history.faults)


def dead_letters(history: History) -> Iterator[str]:
    """A message is a dead letter after its last attempt failed, is not handled more often, and is not kept as well."""
    for channel in history.channels:
        if not channel.letters:
            continue
        mine = [found for found in history.deliveries if (found.topic, found.channel) == (channel.topic, channel.name)]
        for delivery in mine:
            if delivery.attempts > channel.max_attempts:
                yield f"{delivery.body!r} was handled in attempt {delivery.attempts}, at {delivery.begin:.3f} s"
        begins: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
        for delivery in mine:
            begins[delivery.partition, delivery.message_id].append(delivery)
        first: dict[tuple[int, int], Letter] = {}
        for letter in history.letters:
            place = letter.partition, letter.message_id
            before = [found for found in begins[place] if found.begin <= letter.begin]
            failed = any(found.outcome != "returned" and found.end <= letter.begin for found in before)
            if not failed and letter.attempts <= channel.max_attempts:
                yield f"{letter.body!r} has a letter at {letter.begin:.3f} s, {letter.error!r}, and did not fail"
            other = first.setdefault(place, letter)
            if other.copy != letter.copy and not _disturbed(history, _began(before), other.begin):
                yield f"{letter.body!r} has two letters without a cause, at {other.begin:.3f} and {letter.begin:.3f} s"
        for place, letter in first.items():
            again = [found.begin for found in begins[place] if found.begin > letter.begin]
            if again and not _disturbed(history, _began(begins[place]), again[0]):
                yield f"{letter.body!r} was delivered at {again[0]:.3f} s, after its letter, without a cause"


def _began(deliveries: list[Delivery]) -> float:
    return min((delivery.begin for delivery in deliveries), default=0.0)


def refused_answers(history: History) -> Iterator[str]:
    """An answer is refused only when a consumer was lost, a timeout passed, or a leader changed."""
    for when, error in history.refused:
        if not _disturbed(history, when, when):
            yield f"a message was not in flight any more at {when:.3f} s without a cause: {error}"


def unanswered(history: History) -> Iterator[str]:
    """A message is answered when its handler has ended, or its batch was finished."""
    yield from history.unanswered


def rdy_exceeded(history: History) -> Iterator[str]:
    """A node never has more messages in flight on a connection than its RDY count."""
    yield from history.rdy_exceeded


def unbounded_memory(history: History) -> Iterator[str]:
    """Tasks, sockets and sessions stay bounded, whatever happens."""
    for when, tasks, sockets, sessions in history.samples:
        if tasks > _TASKS or sockets > _SOCKETS or sessions > _SESSIONS:
            yield f"{tasks} tasks, {sockets} sockets and {sessions} sessions at {when:.3f} s"
            return


def undocumented_errors(history: History) -> Iterator[str]:
    """Publishes raise documented errors only."""
    for publish in history.publishes:
        if publish.outcome == "undocumented":
            yield f"{publish.body!r}: {publish.error}"


def left_over(history: History) -> Iterator[str]:
    """Closed clients leave no sockets and tasks."""
    yield from history.left_over


CHECKERS: dict[str, Checker] = {
    function.__name__: function
    for function in (
        lost,
        lost_after_creation,
        changed,
        phantom,
        invented,
        stored_twice,
        reordered,
        overtaken_while_it_failed,
        receipts,
        redelivered_without_cause,
        redelivered_early,
        delivered_while_paused,
        too_many_at_once,
        unbounded_waits,
        late_deliveries,
        two_owners_of_a_key,
        wrong_tag,
        wrong_header,
        dead_letters,
        refused_answers,
        unanswered,
        rdy_exceeded,
        unbounded_memory,
        undocumented_errors,
        left_over,
        broken_promises,
    )
}


def judge(history: History) -> list[str]:
    """Return every violation, with the name of its checker."""
    return [f"{name}: {text}" for name, checker in CHECKERS.items() for text in checker(history)]
