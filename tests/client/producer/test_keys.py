"""Locks of keys, and which waiting publishes of a key are sent as one batch, with their outcomes, without servers.

Locks of several keys are judged by `tests/client/test_schedules.py` too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest

from nsqext import DeliveryUnknown, OutgoingMessage, PublishFailed, Receipt
from nsqext.client.producer.keys import KeyGroups, KeyLock, Place
from nsqext.client.producer.request import MessageRequest
from nsqext.errors import ConnectionLost, InvalidBody, InvalidState, NsqError
from nsqext.errors.server import BadMessage, PubRefused
from nsqext.protocol.frames import encode_trace_reply
from nsqext.protocol.record import raw_size
from tests.support.commands import multi_items
from tests.support.consumers import eventually
from tests.support.publish_bench import Bench, Settling

pytestmark = pytest.mark.anyio

_KEY = ("t", b"1")
_OK = b"OK"


async def test_a_wait_that_takes_too_long_is_reported() -> None:
    lock, other = KeyLock(), ("t", b"other")
    first, second = lock.queue([other]), lock.queue([_KEY, other])
    with pytest.raises(PublishFailed, match="earlier publishes of its key are still running"):
        await second.enter(0.01)
    assert not lock.try_enter(_KEY)
    second.leave()
    assert lock.try_enter(_KEY)
    first.leave()
    assert lock.try_enter(other)


def test_the_last_place_of_a_key() -> None:
    lock = KeyLock()
    first = lock.queue([_KEY])
    assert lock.is_last(first, _KEY)
    second = lock.queue([_KEY])
    assert not lock.is_last(first, _KEY)
    assert lock.is_last(second, _KEY)
    second.leave()
    assert lock.is_last(first, _KEY)
    first.leave()
    assert not lock.is_last(first, _KEY)


class Groups:
    """Publishes of a key that wait for an earlier one of it.

    Attributes:
        outcomes: receipt or error of each publish, by its body.
        scopes: cancel a publish, by its body.
        closed: whether the producer starts no more tasks.
    """

    def __init__(self, *outcomes: bytes | NsqError, **settings: Any) -> None:
        self.bench = Bench(*outcomes, **settings)
        self.target = self.bench.routes.made.partitions[1]
        self.lock = KeyLock()
        self.outcomes: dict[bytes, object] = {}
        self.scopes: dict[bytes, anyio.CancelScope] = {}
        self.closed = False

    async def connect(self) -> Any:
        """Connect to the node of the key; return the connection."""
        return await self.bench.connections.connection(self.target.node)

    @asynccontextmanager
    async def begun(self, *messages: OutgoingMessage, ago: float = 0.0) -> AsyncIterator[anyio.CancelScope]:
        """Begin publishes, some seconds ago, behind one that ends with `first_ends`; yields the producer's scope."""
        assert self.lock.try_enter(_KEY)
        async with anyio.create_task_group() as producer:
            self.groups = KeyGroups(self.bench.sender, self.lock, self._start(producer.start_soon))
            async with anyio.create_task_group() as self._callers:
                self._callers.cancel_scope.shield = True  # it is not the callers that end with the producer
                self._callers.cancel_scope.deadline = anyio.current_time() + 25
                for message in messages:
                    await self.begin(message, ago)
                yield producer.cancel_scope
            producer.cancel_scope.cancel()
        assert not self._callers.cancel_scope.cancelled_caught
        assert len(self.lock) == 0

    async def begin(self, message: OutgoingMessage, ago: float = 0.0) -> None:
        """Begin a publish behind those before."""
        self._callers.start_soon(self._publish, message, time.monotonic() - ago)
        await anyio.wait_all_tasks_blocked()

    async def first_ends(self) -> None:
        """End the publish that all wait for."""
        self.lock.leave(_KEY)
        await anyio.wait_all_tasks_blocked()

    async def publish(
        self,
        *messages: OutgoingMessage,
        ago: float = 0.0,
        between: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[str]:
        """Publish messages that began some seconds ago, and one more behind ``between``; return the verbs."""
        before = len(self.commands)
        async with self.begun(*messages, ago=ago):
            if between is not None:
                self._callers.start_soon(between)
                await anyio.wait_all_tasks_blocked()
                await self.begin(OutgoingMessage(b"last"))
            await self.first_ends()
        return [command.split(b" ")[0].decode() for command in self.commands[before:]]

    @property
    def commands(self) -> list[bytes]:
        """The commands that were sent."""
        return [command for _, command, _ in self.bench.connections.commands]

    def _start(self, start_soon: Callable[..., object]) -> Callable[..., None]:
        def start(*task: Any) -> None:
            if self.closed:
                raise InvalidState("the producer is closed")
            start_soon(*task)

        return start

    async def _publish(self, message: OutgoingMessage, started: float) -> None:
        request = MessageRequest(self.bench.options, "t", message, key=_KEY[1], started=started)
        with anyio.CancelScope() as self.scopes[message.body]:
            try:
                self.outcomes[message.body] = await self.groups.publish(request, _KEY)
            except NsqError as error:
                self.outcomes[message.body] = error

    def kinds(self) -> list[type]:
        """Return the types of the outcomes, in the order of the bodies."""
        return [type(self.outcomes[body]) for body in sorted(self.outcomes)]


def _messages(*bodies: bytes) -> list[OutgoingMessage]:
    return [OutgoingMessage(body) for body in bodies]


async def test_a_publish_without_others_behind_it_is_no_batch() -> None:
    groups = Groups()
    await groups.connect()
    assert await groups.publish(*_messages(b"a")) == ["PUB"]
    assert await groups.publish(*_messages(b"a", b"b", b"c")) == ["MPUB"]
    receipts = cast("dict[bytes, Receipt]", groups.outcomes)
    assert {receipt.partition for receipt in receipts.values()} == {1}
    assert groups.bench.counts == (4, 0)


async def test_publishes_with_trace_ids_become_a_batch_and_know_their_places() -> None:
    sizes = [raw_size(len(body), 0, extend=False) for body in (b"a", b"bc", b"d")]
    groups = Groups(encode_trace_reply(7, 0, 1000, sum(sizes)))
    await groups.connect()
    messages = OutgoingMessage(b"a", trace_id=5), OutgoingMessage(b"bc", trace_id=6), OutgoingMessage(b"d")
    assert await groups.publish(*messages) == ["MPUB_TRACE"]
    receipts = [cast("Receipt", groups.outcomes[message.body]) for message in messages]
    assert [(receipt.message_id, receipt.trace_id, receipt.offset, receipt.size) for receipt in receipts] == [
        (7, 5, 1000, sizes[0]),
        (8, 6, 1000 + sizes[0], sizes[1]),
        (9, 0, 1000 + sizes[0] + sizes[1], sizes[2]),
    ]


@pytest.mark.parametrize(("ago", "verbs"), [(5.0, ["MPUB"]), (16.0, ["PUB", "PUB"])])
async def test_a_publish_with_little_time_left_is_sent_alone(ago: float, verbs: list[str]) -> None:
    groups = Groups(timeout=30.0)
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b"), ago=ago) == verbs


@pytest.mark.parametrize("hindrance", ["route", "no connection", "unusable", "rests", "given header", "no leader"])
async def test_without_a_ready_connection_each_is_sent_alone(hindrance: str) -> None:
    groups = Groups(timeout=0.2 if hindrance == "no leader" else 30.0)
    messages = _messages(b"a", b"b")
    if hindrance != "no connection":
        connection = await groups.connect()
        connection.usable = hindrance != "unusable"
    if hindrance == "route":
        groups.bench.routes.known = False
    elif hindrance == "rests":
        groups.target.rest_until = time.monotonic() + 100.0
    elif hindrance == "given header":
        messages[0] = OutgoingMessage(b"a", header=b"")
    elif hindrance == "no leader":
        del groups.bench.routes.leaders[1]
        groups.bench.routes.renewed()
    verbs = await groups.publish(*messages)
    if hindrance == "no leader":
        assert (verbs, groups.kinds()) == ([], [PublishFailed] * 2)
    else:
        assert (verbs, groups.kinds()) == (["PUB", "PUB"], [Receipt] * 2)


async def test_a_batch_ends_before_a_publish_that_cannot_join_it() -> None:
    groups = Groups(max_message_size=1000)
    await groups.connect()
    invalid = OutgoingMessage(b"c" * 1001)
    assert await groups.publish(*_messages(b"a", b"b"), invalid, *_messages(b"d")) == ["MPUB", "PUB"]
    assert groups.kinds() == [Receipt, Receipt, InvalidBody, Receipt]
    groups.outcomes.clear()
    assert await groups.publish(invalid, *_messages(b"d", b"e")) == ["MPUB"]
    assert groups.kinds() == [InvalidBody, Receipt, Receipt]


async def test_a_batch_ends_with_its_limits_and_before_a_call_of_many_messages() -> None:
    groups = Groups(max_batch_count=2)
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b", b"c")) == ["MPUB", "PUB"]
    many: list[Place] = []

    async def begin() -> None:
        many.append(groups.lock.queue([_KEY]))
        await many[0].enter(5.0)
        many[0].leave()

    groups = Groups()
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b"), between=begin) == ["MPUB", "PUB"]
    assert groups.kinds() == [Receipt] * 3


async def test_later_publishes_wait_for_a_batch() -> None:
    groups = Groups()
    await groups.connect()
    groups.bench.connections.hold = anyio.Event()
    async with groups.begun(*_messages(b"a", b"b")):
        await groups.first_ends()
        await groups.begin(OutgoingMessage(b"c"))
        assert len(groups.commands) == 1
        groups.bench.connections.hold.set()
    assert len(groups.commands) == 2


@pytest.mark.parametrize("cancelled", [b"a", b"b"])
async def test_a_cancelled_publish_takes_nothing_from_its_batch(cancelled: bytes) -> None:
    groups = Groups()
    await groups.connect()
    groups.bench.connections.hold = anyio.Event()
    async with groups.begun(*_messages(b"a", b"b", b"c")):
        await groups.first_ends()
        groups.scopes[cancelled].cancel()
        await anyio.wait_all_tasks_blocked()
        groups.bench.connections.hold.set()
    assert sorted(groups.outcomes) == sorted({b"a", b"b", b"c"} - {cancelled})
    assert groups.kinds() == [Receipt] * 2


@pytest.mark.parametrize(
    ("failure", "verbs", "kinds", "counts"),
    [
        (PubRefused("E_PUB_FAILED"), ["MPUB", "PUB", "PUB"], [Receipt] * 2, (2, 2)),
        (ConnectionLost("lost"), ["MPUB"], [DeliveryUnknown] * 2, (0, 0)),
        (BadMessage("E_BAD_MESSAGE"), ["MPUB", "PUB", "PUB"], [Receipt] * 2, (2, 0)),
    ],
)
async def test_a_failure_of_a_batch_counts_as_an_attempt_of_each_unless_it_is_about_the_batch(
    failure: NsqError, verbs: list[str], kinds: list[type], counts: tuple[int, ...]
) -> None:
    groups = Groups(failure, _OK, on_unknown="raise")
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b")) == verbs
    assert (groups.kinds(), groups.bench.counts) == (kinds, counts)


async def test_each_publish_of_a_batch_that_failed_has_an_outcome_of_its_own() -> None:
    groups = Groups(BadMessage("E_BAD_MESSAGE"), _OK, BadMessage("E_BAD_MESSAGE"))
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b")) == ["MPUB", "PUB", "PUB"]
    assert groups.kinds() == [Receipt, BadMessage]


@pytest.mark.parametrize("stored", [True, False])
async def test_a_batch_of_unknown_outcome_is_settled_as_one(stored: bool) -> None:
    groups = Groups(ConnectionLost("lost"), _OK, on_unknown="raise")
    receipt = groups.target.receipt
    settling = Settling([receipt] * 2 if stored else None)
    groups.bench.sender.settler = cast("Any", settling)
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b")) == ["MPUB"] * (1 if stored else 2)
    assert (groups.kinds(), settling.answers) == ([Receipt] * 2, [])
    assert groups.bench.counts[0] == 2


async def test_a_refusal_of_a_batch_that_could_be_settled_is_certain() -> None:
    groups = Groups(PubRefused("E_PUB_FAILED"), _OK, on_unknown="raise")
    settling = Settling()
    groups.bench.sender.settler = cast("Any", settling)
    await groups.connect()
    assert await groups.publish(*_messages(b"a", b"b")) == ["MPUB", "PUB", "PUB"]
    assert groups.kinds() == [Receipt] * 2


async def test_the_outcomes_of_a_batch_are_errors_of_their_own() -> None:
    groups = Groups(ConnectionLost("lost"), on_unknown="raise")
    unknown = DeliveryUnknown("it stays unknown")
    settling = Settling()
    groups.bench.sender.settler = cast("Any", settling)

    async def settle(request: Any, error: DeliveryUnknown) -> None:
        raise unknown

    settling.settle = settle  # type: ignore[assignment, method-assign]
    await groups.connect()
    await groups.publish(*_messages(b"a", b"b"))
    assert [str(error) for error in groups.outcomes.values()] == [str(unknown)] * 2
    assert len({id(error) for error in groups.outcomes.values()}) == 2


async def test_a_producer_that_closes_sends_no_batch() -> None:
    groups = Groups()
    await groups.connect()
    groups.closed = True
    assert await groups.publish(*_messages(b"a", b"b", b"c")) == []
    assert groups.kinds() == [InvalidState, PublishFailed, PublishFailed]
    assert "not sent: the producer was closed" in str(groups.outcomes[b"b"])


async def test_a_batch_that_is_cut_off_is_unknown_for_each() -> None:
    groups = Groups()
    await groups.connect()
    groups.bench.connections.hold = anyio.Event()
    async with groups.begun(*_messages(b"a", b"b")) as producer:
        await groups.first_ends()
        producer.cancel()
    assert groups.kinds() == [DeliveryUnknown] * 2


async def test_a_batch_has_the_time_of_its_oldest_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, ages = Groups(), list[float]()
    await groups.connect()
    send = groups.bench.sender.send

    async def record(batch: Any, *where: Any) -> list[Receipt]:
        ages.append(time.monotonic() - batch.started)
        return await send(batch, *where)

    monkeypatch.setattr(groups.bench.sender, "send", record)
    async with groups.begun():
        for body, ago in ((b"a", 3.0), (b"b", 9.0), (b"c", 6.0)):
            await groups.begin(OutgoingMessage(body), ago)
        await groups.first_ends()
    assert len(ages) == 1
    assert ages[0] >= 9.0


async def test_each_wait_for_a_key_has_a_time_limit() -> None:
    groups = Groups(timeout=0.01)
    async with groups.begun():
        for body in (b"a", b"b"):  # the timer of the first wait has ended when the second one begins
            await groups.begin(OutgoingMessage(body))
            await eventually(lambda body=body: body in groups.outcomes)  # type: ignore[misc]
            await anyio.wait_all_tasks_blocked()
        await groups.first_ends()
    assert (groups.kinds(), groups.commands) == ([PublishFailed] * 2, [])


async def test_a_cancelled_publish_that_waits_is_not_sent_and_leaves_no_time_limit() -> None:
    groups = Groups()
    await groups.connect()
    async with groups.begun(*_messages(b"a", b"b", b"c")):
        assert len(groups.groups._deadlines) == 3
        groups.scopes[b"b"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert len(groups.groups._deadlines) == 2
        await groups.first_ends()
        assert groups.groups._deadlines == {}
    (command,) = groups.commands
    assert multi_items(command.partition(b"\n")[2][4:]) == [b"a", b"c"]


async def test_a_message_that_needs_a_check_does_not_wait_for_its_key_first() -> None:
    groups = Groups(max_message_size=10)
    groups.bench.routes.by_topic = {"t": groups.bench.routes.made}
    async with groups.begun():
        waiting = [groups.groups.waiting(_KEY, b"x" * size, None, None, None) for size in (0, 1, 10, 11)]
        await groups.first_ends()
    assert [request is not None for request in waiting] == [False, True, True, False]
