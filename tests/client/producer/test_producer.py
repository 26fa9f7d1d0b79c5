"""How a producer is made, opened and closed, and what it says about its health."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import DeliveryUnknown, Lookup, OutgoingMessage, Producer, ProducerStatistics, PublishFailed, Receipt
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.errors import (
    BatchFailed,
    ConnectionFailed,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    NsqError,
    PartitionUnavailable,
)
from nsqext.errors.server import BadMessage
from nsqext.middleware import Middleware
from tests.support.clock import run_in_virtual_time
from tests.support.fake_lookupd import node_json
from tests.support.fake_nsqd import PLAIN, REDESIGNED, Peer, error, obey, ok, scripted_lookup, scripted_node, until
from tests.support.producers import bodies, bounded, producing, quick, quick_direct
from tests.support.sleeps import settled

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvent
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


def test_outcomes_are_settled_with_lookup_only() -> None:
    with pytest.raises(InvalidSetting, match="needs lookupd"):
        Producer(nsqd="n:1", on_unknown="settle")


def test_a_size_for_compression_needs_compression() -> None:
    for compression in ("none", {"orders": "none"}):
        with pytest.raises(InvalidSetting, match="compression_min has no effect without compression"):
            Producer("127.0.0.1:1", compression=compression, compression_min=100)  # type: ignore[arg-type]
    Producer("127.0.0.1:1", compression={"orders": "gzip", "logs": "none"}, compression_min=100)


def test_middleware_knows_its_producer() -> None:
    attached: list[object] = []

    class Recorder(Middleware):
        def attach(self, client: object) -> None:
            attached.append(client)

    producer = Producer(nsqd="n:1", middleware=[Recorder(), Recorder()])
    assert attached == [producer, producer]


async def test_a_producer_uses_its_lookup_while_it_is_open_and_closes_at_once() -> None:
    lookup = Lookup("127.0.0.1:1")
    unused = Producer(lookup)
    await unused.aclose()
    with anyio.fail_after(25):
        async with Producer(lookup, close_timeout=60.0) as producer:
            assert lookup.metadata.users == 1
            assert producer.statistics().connections == 0
        with pytest.raises(InvalidState):
            await producer.start()
    assert lookup.metadata.users == 0
    for one, text in ((unused, "is not open"), (producer, "is closed")):
        for call in (one.ping(), one.meta("t"), one.publish("t", b"x"), one.publish_many("t", [])):
            with pytest.raises(InvalidState, match=text):
                await call
        with pytest.raises(InvalidState, match=text):
            one.batcher("t")


async def test_a_producer_that_closes_stops_its_polls_of_a_shared_lookup() -> None:
    async with bounded(), scripted_node(obey()) as node, scripted_lookup() as server:
        server.set_leaders({0: node}, num=1)
        lookup = Lookup(str(server))
        async with Producer(lookup), Producer(lookup) as producer:
            seen: list[ClientEvent] = []
            assert producer.on_event(seen.append) == seen.append
            await producer.publish("t", b"x")
            assert lookup.metadata.cached("t", "w") is not None
            assert [event.kind for event in seen] == ["connected"]
            await producer.aclose()
            assert lookup.metadata.cached("t", "w") is None
            assert [event.kind for event in seen] == ["connected", "disconnected"]


async def test_ping_connects_to_all_nodes() -> None:
    async with bounded(), scripted_node(obey()) as one, scripted_node(obey()) as two, scripted_lookup() as lookup:
        lookup.set_response("/nodes", {"producers": [node_json(str(one)), node_json(str(two))]})
        async with Producer(str(lookup), **quick()) as producer:
            assert producer.statistics().connections == 0
            await producer.ping()
            await producer.ping()
            assert producer.statistics().connections == 2
        assert len(one.peers) == len(two.peers) == 1


async def test_ping_raises_for_a_node_that_cannot_be_reached(closed_address: Address) -> None:
    async with (
        bounded(),
        scripted_node(obey()) as node,
        Producer(nsqd=[str(node), str(closed_address)], **quick_direct()) as producer,
    ):
        with pytest.raises(ConnectionFailed, match=str(closed_address)):
            await producer.ping()


async def test_a_ping_raises_at_once_if_lookup_does_not_answer_or_lists_no_node(closed_address: Address) -> None:
    waits: dict[str, Any] = {"timeout": 60.0, "lookup_timeout": 60.0}
    async with scripted_lookup() as lookup:
        async with Producer(str(closed_address), **waits) as producer:
            with anyio.fail_after(25), pytest.raises(LookupFailed, match=str(closed_address)):
                await producer.ping()
        lookup.set_response("/nodes", {"producers": []})
        async with Producer(str(lookup), **waits) as producer:
            with anyio.fail_after(25), pytest.raises(PartitionUnavailable, match="no node"):
                await producer.ping()


async def test_an_eager_producer_connects_when_it_is_opened_or_is_closed(closed_address: Address) -> None:
    lookup = Lookup(str(closed_address))
    async with bounded(), scripted_node(obey()) as node:
        async with Producer(nsqd=[str(node), str(closed_address)], connect=True, **quick_direct()) as producer:
            assert producer.settings["connect"]
            assert producer.statistics().connections == 1
        for failing, kind in (
            (Producer(nsqd=str(closed_address), connect=True, **quick_direct()), ConnectionFailed),
            (Producer(lookup, connect=True, lookup_timeout=0), LookupFailed),
        ):
            with pytest.raises(kind, match=str(closed_address)):
                await failing.start()
            with pytest.raises(InvalidState, match="closed"):
                await failing.publish("t", b"x")
    assert lookup.metadata.users == 0


async def test_a_start_that_is_cancelled_leaves_nothing_open() -> None:
    async with scripted_lookup() as lookup:
        lookup.delay = 60.0
        shared = Lookup(str(lookup))
        producer = Producer(shared, connect=True)
        with anyio.move_on_after(0.1) as scope:
            await producer.start()
        assert (scope.cancelled_caught, shared.metadata.users) == (True, 0)
        with pytest.raises(InvalidState, match="closed"):
            await producer.publish("t", b"x")


async def test_a_start_beside_aclose_leaves_nothing_open() -> None:
    """On trio, the order of the two tasks is random."""
    lookup = Lookup("127.0.0.1:1")

    async def start(producer: Producer) -> None:
        with suppress(InvalidState):
            await producer.start()

    async with bounded():
        for _ in range(20):
            producer = Producer(lookup)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(start, producer)
                tasks.start_soon(producer.aclose)
            await producer.aclose()
            assert lookup.metadata.users == 0


async def test_statistics_count_messages_by_outcome() -> None:
    answers: list[Any] = [ok(), error("E_FAILED_ON_NOT_LEADER"), ok(), error("E_BAD_MESSAGE x"), ok(b"nonsense"), ok()]
    many: list[Any] = [ok(), error("E_BAD_MESSAGE x")]
    async with producing({"PUB": answers, "MPUB": many}) as (producer, _, _):
        assert producer.statistics() == ProducerStatistics(
            connections=0,
            pending=0,
            stored=0,
            failed=0,
            unknown=0,
            retries=0,
            bytes_sent=0,
            lookup_age=None,
            lookup_failures=0,
        )
        await producer.publish("t", b"a")
        await producer.publish("t", b"b")
        with pytest.raises(BadMessage):
            await producer.publish("t", b"c")
        with pytest.raises(DeliveryUnknown):
            await producer.publish("t", b"d")
        await producer.publish("t", b"e", key="k")
        await producer.publish_many("t", [b"f", b"g"])
        with pytest.raises(BatchFailed):
            await producer.publish_many("t", [b"h", b"i"])
        await producer.publish("t", b"j")
        found = producer.statistics()
        assert (found.stored, found.failed, found.unknown, found.retries) == (6, 3, 1, 1)
        assert found.bytes_sent == 4 * len(b"PUB t 0\n\0\0\0\1a") + len(b"MPUB t 0\n\0\0\0\0\0\0\0\0\0\0\0\1f\0\0\0\1g")
        assert (found.connections, found.pending, found.lookup_failures) == (1, 0, 0)
        assert found.lookup_age is not None
        assert 0 <= found.lookup_age < 15


# What closing waits for


async def test_closing_after_a_cancellation_waits_no_longer_than_for_the_answer() -> None:
    async with bounded(), scripted_node() as node:
        async with anyio.create_task_group() as tasks:

            async def use() -> None:
                async with Producer(nsqd=str(node), **quick_direct(close_timeout=60)) as producer:
                    await producer.publish("t", b"x")

            tasks.start_soon(use)
            peer = await node.accept()
            await peer.expect("PUB")
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await peer.answer()
        await peer.expect_end()


async def test_requests_cut_off_by_closing_are_not_retried() -> None:
    outcomes: list[NsqError] = []

    async def publish(producer: Producer) -> None:
        with pytest.raises(DeliveryUnknown, match="before the producer was closed") as caught:
            await producer.publish("t", b"late")
        outcomes.append(caught.value)

    options = quick_direct(close_timeout=0.05, retry_wait=5.0)
    async with (
        bounded(),
        scripted_node(obey({"PUB": [ok(), None]})) as node,
        anyio.create_task_group() as tasks,
        Producer(nsqd=str(node), **options) as producer,
    ):
        await producer.publish("t", b"x")
        tasks.start_soon(publish, producer)
        await until(lambda: len(node.commands) == 2)
    assert len(outcomes) == 1
    assert bodies(node) == [b"x", b"late"]


async def test_a_producer_that_closes_accepts_no_more() -> None:
    async def unknown(producer: Producer) -> None:
        with pytest.raises(DeliveryUnknown):
            await producer.publish("t", b"pending")

    async with producing({"PUB": [ok(), None]}, on_unknown="raise") as (producer, (node,), _):
        await producer.publish("t", b"x")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unknown, producer)
            await until(lambda: len(node.commands) == 2)
            tasks.start_soon(producer.aclose)
            await until(lambda: "closing" in repr(producer))
            await anyio.wait_all_tasks_blocked()
            assert producer.statistics().pending == 1
            with pytest.raises(InvalidState, match="closed"):
                await producer.publish("t", b"late")
            await node.peers[0].close()
    assert bodies(node) == [b"x", b"pending"]


def test_batchers_and_publishes_share_the_time_of_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    async def close() -> None:
        producer = await Producer(nsqd="127.0.0.1:1", close_timeout=5.0, timeout=600.0).start()
        batcher = await producer.batcher("t").__aenter__()
        await batcher.add(b"x")
        began = anyio.current_time()
        await producer.aclose()
        assert anyio.current_time() - began == pytest.approx(5.0, abs=0.5)
        assert len(batcher.take_failed()) == 1

    run_in_virtual_time(monkeypatch, close)


async def test_publishes_that_wait_for_their_key_are_not_sent_after_closing() -> None:
    outcomes: list[NsqError] = []

    async def publish(producer: Producer, body: bytes) -> None:
        with pytest.raises(NsqError) as caught:
            await producer.publish("t", body, key="k")
        outcomes.append(caught.value)

    async with (
        anyio.create_task_group() as tasks,
        producing({"PUB": [ok(), None]}, close_timeout=0.05) as (producer, nodes, _),
    ):
        await producer.publish("t", b"x", key="k")
        tasks.start_soon(publish, producer, b"sent")
        await until(lambda: len(nodes[0].commands) == 2)
        tasks.start_soon(publish, producer, b"not sent")
        await anyio.wait_all_tasks_blocked()
    assert bodies(nodes[0]) == [b"x", b"sent"]
    assert [type(outcome) for outcome in outcomes] == [DeliveryUnknown, PublishFailed]
    assert "not sent: the producer was closed" in str(outcomes[1])
    assert (producer.statistics().unknown, producer.statistics().failed) == (1, 1)


@pytest.mark.parametrize("up", [True, False])
async def test_closing_waits_for_batches_that_wait_for_the_lookup_service(up: bool) -> None:
    outcomes: list[object] = []

    async def publish(producer: Producer) -> None:
        try:
            outcomes.append(await producer.publish_many("new", [b"x"]))
        except NsqError as failure:
            outcomes.append(str(failure))

    async with bounded(), scripted_node(obey(), granted=PLAIN) as node, scripted_lookup() as lookup:
        lookup.refuse(404, "TOPIC_NOT_FOUND")
        lookup.set_response("/nodes", {"producers": []})
        async with (
            anyio.create_task_group() as tasks,
            Producer(str(lookup), **quick(timeout=30.0, close_timeout=20.0 if up else 0.05)) as producer,
        ):
            tasks.start_soon(publish, producer)
            await until(lambda: sum(question.startswith("/nodes") for question in lookup.questions) > 1)
            tasks.start_soon(producer.aclose)
            await anyio.wait_all_tasks_blocked()
            if up:
                lookup.set_response("/nodes", {"producers": [node_json(str(node)) | {"version": "1.3.0"}]})
        assert len(node.commands) == up
    assert len(outcomes) == 1
    assert isinstance(outcomes[0], list) if up else "before the producer was closed" in str(outcomes[0])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a producer that closes look for publishes in each turn of the event loop."""
    monkeypatch.setattr("nsqext.client.producer.producer._CLOSE_POLL", 0)


@pytest.mark.usefixtures("impatient")
async def test_closing_waits_for_a_call_whose_batches_have_not_begun() -> None:
    receipts: list[Receipt] = []

    async def publish(producer: Producer) -> None:
        receipts.extend(await producer.publish_many("t", [b"x"] * 20))

    async with bounded(), scripted_node(obey()) as one, scripted_node(obey()) as two, scripted_lookup() as lookup:
        lookup.refuse(503, "starting")
        async with (
            anyio.create_task_group() as tasks,
            Producer(str(lookup), **quick(max_batch_count=1)) as producer,
        ):
            tasks.start_soon(publish, producer)
            await until(lambda: lookup.questions)
            tasks.start_soon(producer.aclose)
            await until(lambda: "closing" in repr(producer))
            await settled()
            lookup.set_leaders({0: one, 1: two}, num=2)
    assert len(receipts) == 20


async def test_closing_waits_for_a_call_that_connects_to_learn_what_the_node_accepts() -> None:
    identify = anyio.Event()

    async def late(peer: Peer) -> None:
        await identify.wait()
        await peer.handshake(REDESIGNED)
        await obey()(peer)

    async with bounded(), scripted_node(late, granted=None) as node:
        async with anyio.create_task_group() as tasks, Producer(nsqd=str(node), **quick_direct()) as producer:
            tasks.start_soon(producer.publish_many, "t", [OutgoingMessage(b"x", headers={"a": "b"})])
            await until(lambda: node.peers)
            tasks.start_soon(producer.aclose)
            await until(lambda: "closing" in repr(producer))
            await settled()
            identify.set()
        assert producer.statistics().stored == 1


@pytest.mark.usefixtures("impatient")
async def test_closing_waits_for_a_publish_between_two_attempts() -> None:
    async with bounded(), scripted_node() as node:
        async with anyio.create_task_group() as tasks, Producer(nsqd=str(node), **quick_direct()) as producer:
            for body in (b"stored", b"retried"):
                tasks.start_soon(producer.publish, "t", body)
            peer = await node.accept()
            for _ in range(2):
                await peer.expect("PUB")
            tasks.start_soon(producer.aclose)
            await until(lambda: "closing" in repr(producer))
            await settled()
            # on trio, the task that received both responses wakes the other one
            await peer.raw(ok() + error("E_PUB_FAILED"))
            await peer.expect("PUB")
            await peer.answer()
        assert producer.statistics().stored == 2


async def test_the_error_of_the_block_is_kept() -> None:
    async with bounded(), scripted_node(obey()) as node:
        with pytest.raises(KeyError):
            async with Producer(nsqd=str(node)) as producer:
                await producer.publish("t", b"x")
                raise KeyError
        with anyio.CancelScope() as scope:
            async with Producer(nsqd=str(node)) as producer:
                await producer.publish("t", b"x")
                scope.cancel()
                await anyio.sleep(10)
        assert scope.cancelled_caught


async def test_a_producer_that_was_not_closed_warns_and_its_tasks_end() -> None:
    before = {task.id for task in anyio.get_running_tasks()}
    producer = await Producer(nsqd="127.0.0.1:1").start()
    assert any(task.id not in before for task in anyio.get_running_tasks())
    with pytest.warns(ResourceWarning, match=r"Producer\(nsqd='127.0.0.1:1', open\) was not closed"):
        del producer
        gc.collect()
    await until(lambda: all(task.id in before for task in anyio.get_running_tasks()))


# Tasks and event loops


def test_a_producer_of_an_event_loop_that_has_ended_says_that_another_event_loop_opened_it() -> None:
    producer = Producer(nsqd="127.0.0.1:1")
    anyio.run(producer.start)
    with pytest.raises(InvalidState, match="another event loop opened this producer, and ended before") as failed:
        anyio.run(producer.publish, "t", b"x")
    assert "open one producer for each event loop" in str(failed.value)
    del failed  # its traceback refers to the producer
    with pytest.warns(
        ResourceWarning, match=r"Producer\(nsqd='127.0.0.1:1', ended with its event loop\) was not closed"
    ):
        del producer
        gc.collect()


async def test_a_producer_is_opened_in_one_task_and_closed_in_another() -> None:
    async with bounded(), scripted_node(obey()) as node:
        producers: list[Producer] = []

        async def open_one() -> None:
            producers.append(await Producer(nsqd=str(node)).start())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_one)
        (producer,) = producers
        await producer.publish("t", b"x")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.aclose)
            tasks.start_soon(producer.aclose)
        await producer.aclose()
        with pytest.raises(InvalidState, match="closed"):
            await producer.publish("t", b"y")
        with pytest.raises(InvalidState, match="opened before"):
            await producer.start()
    assert bodies(node) == [b"x"]


async def test_the_cancellation_of_the_task_that_opened_it_does_not_reach_a_producer() -> None:
    async with bounded(), scripted_node(obey()) as node:
        with anyio.CancelScope() as scope:
            producer = await Producer(nsqd=str(node)).start()
            scope.cancel()
            await anyio.sleep_forever()
        await producer.publish("t", b"x")
        async with producer.batcher("t") as batcher:
            await batcher.publish(b"y")
        await producer.aclose()


async def test_a_producer_in_another_event_loop_is_refused_before_anything_is_sent() -> None:
    async with (
        bounded(),
        scripted_node(obey()) as node,
        Producer(nsqd=str(node)) as producer,
        producer.batcher("t") as batcher,
    ):
        await producer.publish("t", b"x")

        async def use_it() -> None:
            for call in (
                lambda: producer.publish("t", b"y"),
                lambda: producer.publish("t", b"y", key="k"),
                lambda: producer.publish_many("t", [b"y"]),
                lambda: batcher.add(b"y"),
                producer.aclose,
            ):
                with pytest.raises(InvalidState, match="another event loop"):
                    await call()
            with pytest.raises(InvalidState, match="another event loop"):
                producer.batcher("t")

        for backend in ("asyncio", "trio"):
            await anyio.to_thread.run_sync(lambda: anyio.run(use_it, backend=backend))  # noqa: B023
        await producer.publish("t", b"z")
    assert bodies(node) == [b"x", b"z"]


async def test_a_background_task_that_fails_closes_the_producer_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: ConnectionPool) -> None:
        raise KeyError("broken")

    producer = Producer(nsqd="127.0.0.1:1")
    monkeypatch.setattr(ConnectionPool, "run", fail)
    with pytest.raises(KeyError, match="broken"):
        async with bounded(), producer:
            await until(lambda: "failed" in repr(producer))
            with pytest.raises(InvalidState, match="has failed: KeyError") as caught:
                await producer.publish("t", b"x")
            assert isinstance(caught.value.__cause__, KeyError)
    await producer.aclose()
