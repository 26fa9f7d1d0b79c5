"""The producer against scripted servers: what is retried, where it goes, what callers are told, and how it ends."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Mapping, Sized
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import (
    BatchFailed,
    ConnectionOptions,
    DeliveryUnknown,
    Draft,
    Producer,
    ProducerOptions,
    PublishFailed,
    Receipt,
)
from nsqext.errors import (
    BadMessage,
    DelayNotSupported,
    ExtendNotSupported,
    InvalidBody,
    InvalidHeader,
    InvalidInput,
    InvalidPartition,
    InvalidState,
    NotLeader,
    NsqError,
    ProtocolError,
    TopicNotFound,
)
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.compression import COMPRESS_HEADER, decompress_body
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.replies import encode_trace_reply
from tests.client.scripted import (
    PLAIN,
    Answer,
    ScriptedLookup,
    ScriptedNode,
    error,
    obey,
    ok,
    scripted_lookup,
    scripted_node,
    until,
)
from tests.lookup.answering import node_json

if TYPE_CHECKING:
    from nsqext.client.turns import Turn
    from nsqext.protocol.parser import Command

pytestmark = pytest.mark.anyio

_QUICK = LookupOptions(max_pause=0.02)


def _options(**members: Any) -> ProducerOptions:
    return ProducerOptions(**{"timeout": 5.0, "retry_wait": 0.005, "max_retry_wait": 0.05, "lookup": _QUICK, **members})


@asynccontextmanager
async def _bounded() -> AsyncIterator[None]:
    with anyio.fail_after(15):
        yield


def _bodies(node: ScriptedNode, verb: str = "PUB") -> list[bytes]:
    return [command.body or b"" for command in node.commands if command.words[0] == verb.encode()]


def _partition(command: Command) -> int:
    return int(command.words[2])


@asynccontextmanager
async def _cluster(
    *answers: dict[str, Answer | list[Answer]], options: ProducerOptions | None = None, extend: bool = False
) -> AsyncIterator[tuple[Producer, list[ScriptedNode], ScriptedLookup]]:
    """A producer, and a node for each of the answers that leads the partition of its number."""
    first, last = obey(answers[0]), obey(answers[-1])
    async with _bounded(), scripted_lookup() as lookup, scripted_node(first) as one, scripted_node(last) as two:
        nodes = [one, two][: len(answers)]
        lookup.tell(dict(enumerate(nodes)), num=len(nodes), extend=extend)
        async with Producer(str(lookup), options=options or _options()) as producer:
            yield producer, nodes, lookup


# Choice


async def test_partitions_take_turns() -> None:
    async with _cluster({}, {}) as (producer, nodes, _):
        receipts = [await producer.publish("t", b"x") for _ in range(6)]
        assert sorted(receipt.partition for receipt in receipts) == [0, 0, 0, 1, 1, 1]
        assert receipts[0].partition != receipts[1].partition
        assert {receipt.node for receipt in receipts} == {str(node) for node in nodes}


async def test_least_pending_avoids_the_busy_node() -> None:
    async with _cluster({"PUB": None}, {}, options=_options(balance="least_pending", close_timeout=0.0)) as setup:
        producer, nodes, _ = setup
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_swallow, producer, 0)
            await until(lambda: nodes[0].commands)
            receipts = [await producer.publish("t", b"x", partition=1)]
            receipts += [await producer.publish("t", b"x") for _ in range(6)]
            assert {receipt.partition for receipt in receipts} == {1}
            tasks.cancel_scope.cancel()


async def _swallow(producer: Producer, partition: int) -> None:
    with anyio.CancelScope():
        await producer.publish("t", b"stuck", partition=partition)


async def test_a_key_keeps_its_partition_and_a_chosen_one_is_kept() -> None:
    async with _cluster({}, {}) as (producer, _, _):
        keyed = {(await producer.publish("t", b"x", key="user:42")).partition for _ in range(4)}
        assert keyed == {1}
        assert (await producer.publish("t", b"x", partition=0)).partition == 0
        with pytest.raises(InvalidPartition):
            await producer.publish("t", b"x", partition=2)
        with pytest.raises(InvalidPartition):
            await producer.publish("t", b"x", partition=0, key="k")


async def test_a_key_needs_partitions() -> None:
    async with _bounded(), scripted_node(obey(), granted=PLAIN) as node, Producer(nsqd=str(node)) as producer:
        with pytest.raises(InvalidPartition, match="number of partitions"):
            await producer.publish("t", b"x", key="k")


# Errors decide


async def test_an_unkeyed_message_moves_to_another_partition() -> None:
    async with _cluster({"PUB": error("E_FAILED_ON_NOT_LEADER")}, {}) as (producer, nodes, _):
        receipts = [await producer.publish("t", b"%d" % number) for number in range(8)]
        assert {receipt.partition for receipt in receipts} == {1}
        assert len(_bodies(nodes[1])) == 8
        # a target that refused is left alone for a while
        assert len(_bodies(nodes[0])) <= 2


@pytest.mark.parametrize("choice", [{"key": "user:42"}, {"partition": 1}])
async def test_a_keyed_or_pinned_message_waits_for_its_partition(choice: dict[str, Any]) -> None:
    refusals: list[Answer] = [error("E_FAILED_ON_NOT_LEADER"), error("E_FAILED_ON_NOT_WRITABLE"), ok()]
    async with _cluster({}, {"PUB": refusals}) as (producer, nodes, lookup):
        receipt = await producer.publish("t", b"x", **choice)
        assert receipt.partition == 1
        assert _bodies(nodes[0]) == []
        assert len(_bodies(nodes[1])) == 3
        assert len([path for path in lookup.questions if path.startswith("/lookup")]) >= 2


async def test_a_moved_leader_is_found() -> None:
    async with _cluster({}, {"PUB": error("E_TOPIC_NOT_EXIST")}) as (producer, nodes, lookup):
        assert (await producer.publish("t", b"x", partition=0)).node == str(nodes[0])
        lookup.tell({0: nodes[0], 1: nodes[0]}, num=2)
        receipt = await producer.publish("t", b"x", partition=1)
        assert receipt.node == str(nodes[0])


@pytest.mark.parametrize(
    ("frame", "kind"),
    [("E_BAD_MESSAGE too big", BadMessage), ("E_SOMETHING_NEW", NsqError), ("INVALID_TRACE_ID x", NsqError)],
)
async def test_a_refusal_for_good_is_raised_at_once(frame: str, kind: type[NsqError]) -> None:
    async with _cluster({"PUB": error(frame)}) as (producer, nodes, _):
        with pytest.raises(kind) as caught:
            await producer.publish("t", b"x")
        assert caught.value.topic == "t"
        assert caught.value.node == str(nodes[0])
        assert len(_bodies(nodes[0])) == 1


async def test_time_runs_out_with_the_attempts_attached() -> None:
    async with _cluster({"PUB": error("E_FAILED_ON_NOT_LEADER")}, options=_options(timeout=0.3)) as (producer, _, _):
        for _ in range(5):
            with pytest.raises((PublishFailed, DeliveryUnknown), match=r"within 0\.3 s") as caught:
                await producer.publish("t", b"x")
            # a time limit that falls between request and answer leaves the outcome open, and rightly so
            if isinstance(caught.value, PublishFailed):
                break
        assert isinstance(caught.value, PublishFailed)
        assert len(caught.value.attempts) >= 2
        assert all(type(attempt) is NotLeader for attempt in caught.value.attempts)


async def test_overload_waits_before_it_tries_again() -> None:
    answers: list[Answer] = [error("E_PUB_TOO_MUCH_WAITING"), ok()]
    async with _cluster({"PUB": answers}) as (producer, nodes, _):
        await producer.publish("t", b"x")
        assert len(_bodies(nodes[0])) == 2
        assert len(nodes[0].peers) == 2


async def test_a_node_that_is_gone_is_left_alone() -> None:
    async with _cluster({}, {}) as (producer, nodes, lookup):
        async with scripted_node() as gone:
            pass
        lookup.tell({0: gone, 1: nodes[1]}, num=2)
        receipts = [await producer.publish("t", b"x") for _ in range(10)]
        assert {receipt.partition for receipt in receipts} == {1}


async def test_an_unknown_topic_is_told_at_once() -> None:
    async with _bounded(), scripted_lookup() as lookup, Producer(str(lookup), options=_options()) as producer:
        with pytest.raises(TopicNotFound):
            await producer.publish("t", b"x")
        with pytest.raises(TopicNotFound):
            await producer.publish_many("t", [b"x"])


# Unknown outcomes


def _hang_up(times: int) -> Callable[[Any], Any]:
    """A script that closes the connection instead of answering, so many times."""
    left = [times]
    well = obey()

    async def run(peer: Any) -> None:
        if not left[0]:
            await well(peer)
            return
        left[0] -= 1
        await peer.next()
        await peer.close()

    return run


async def test_an_unknown_outcome_is_retried_by_default() -> None:
    async with _bounded(), scripted_node(_hang_up(2)) as node, Producer(nsqd=str(node), options=_options()) as producer:
        assert (await producer.publish("t", b"x")).node == str(node)
        assert len(_bodies(node)) == 3


async def test_an_unknown_outcome_is_raised_on_demand() -> None:
    options = _options(on_unknown="raise")
    async with _bounded(), scripted_node(_hang_up(1)) as node, Producer(nsqd=str(node), options=options) as producer:
        with pytest.raises(DeliveryUnknown):
            await producer.publish("t", b"x")
        assert len(_bodies(node)) == 1
        await producer.publish("t", b"y")


async def test_no_answer_in_time_is_an_unknown_outcome() -> None:
    options = _options(timeout=0.3, close_timeout=0.0)
    async with _cluster({"PUB": None}, options=options) as (producer, nodes, _):
        for partition in (None, 0):
            with pytest.raises(DeliveryUnknown):
                await producer.publish("t", b"x", partition=partition)
        assert len(_bodies(nodes[0])) == 2


async def test_a_wrong_reply_is_an_unknown_outcome_and_ends_the_connection() -> None:
    answers: list[Answer] = [ok(), ok(b"nonsense"), ok()]
    async with _cluster({"PUB": answers}) as (producer, nodes, _):
        await producer.publish("t", b"x")
        with pytest.raises(DeliveryUnknown, match="nonsense"):
            await producer.publish("t", b"x")
        await producer.publish("t", b"x")
        assert len(nodes[0].peers) == 2


async def test_a_server_that_is_none_is_told_at_once() -> None:
    async def http(peer: Any) -> None:
        await peer.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with _bounded(), scripted_node(http, granted=None) as node, Producer(nsqd=str(node)) as producer:
        with pytest.raises(ProtocolError, match="HTTP"):
            await producer.publish("t", b"x")


async def test_a_silent_server_is_given_up() -> None:
    options = _options(timeout=0.4, connection=ConnectionOptions(connect_timeout=0.1))
    async with _bounded(), scripted_node(granted=None) as node, Producer(nsqd=str(node), options=options) as producer:
        with pytest.raises(PublishFailed, match="silent"):
            await producer.publish("t", b"x")


# Order


async def test_a_key_is_not_overtaken_by_its_retries() -> None:
    failures = ["E_PUB_FAILED x", "", "E_PUB_FAILED x", "E_FAILED_ON_NOT_LEADER", "", "", "", ""]
    stored: list[bytes] = []
    async with _bounded(), scripted_node() as node, scripted_lookup() as lookup:
        lookup.tell({0: node}, num=1)
        async with Producer(str(lookup), options=_options()) as producer, anyio.create_task_group() as tasks:
            turns = producer._turns._waiting
            for number in range(5):
                tasks.start_soon(_publish_keyed, producer, b"%d" % number)
                await until(partial(_waiting, turns, number))
            peer = await node.accept()
            for failure in failures[: 5 + 3]:
                body = (await peer.expect("PUB")).body
                await peer.raw(error(failure) if failure else ok())
                if not failure:
                    stored.append(body or b"")
    assert stored == [b"0", b"1", b"2", b"3", b"4"]


def _waiting(turns: Mapping[Turn, Sized], number: int) -> bool:
    return len(turns.get(("t", b"k"), "none")) == number


async def _publish_keyed(producer: Producer, body: bytes) -> None:
    await producer.publish("t", body, key="k")


# Many


async def test_many_go_as_batches_by_partition() -> None:
    async with _cluster({}, {}) as (producer, nodes, _):
        receipts = await producer.publish_many("t", [Draft(b"a", key="user:42"), Draft(b"b", key="order-1"), b"c"])
        assert [receipt.partition for receipt in receipts[:2]] == [1, 1]
        assert await producer.publish_many("t", []) == []
        assert sum(len(_bodies(node, "MPUB")) for node in nodes) == 2


async def test_the_outcome_of_every_message_is_told_apart() -> None:
    async with _cluster({}, {"MPUB": error("E_BAD_MESSAGE x")}) as (producer, _, _):
        drafts = [Draft(b"a", key=key) for key in ("polygenelubricants", "user:42", "polygenelubricants")]
        with pytest.raises(BatchFailed, match="1 of 3") as caught:
            await producer.publish_many("t", drafts)
        outcomes = caught.value.outcomes
        assert [type(outcome) for outcome in outcomes] == [Receipt, BadMessage, Receipt]


async def test_batches_of_a_key_stop_at_the_first_that_fails() -> None:
    options = _options(max_batch_count=2)
    answers: list[Answer] = [ok(), error("E_BAD_MESSAGE x"), ok()]
    async with _cluster({"MPUB": answers}, options=options) as (producer, nodes, _):
        with pytest.raises(BatchFailed) as caught:
            await producer.publish_many("t", [b"%d" % number for number in range(6)], key="k")
        kinds = [type(outcome) for outcome in caught.value.outcomes]
        assert kinds == [Receipt] * 2 + [BadMessage] * 2 + [PublishFailed] * 2
        assert len(_bodies(nodes[0], "MPUB")) == 2


async def test_nothing_is_sent_when_one_message_cannot_be_right() -> None:
    async with _cluster({}) as (producer, nodes, _):
        wrong: list[Any] = [[b"x", b""], [b"x", "y"], b"xy", [b"x" * 2_000_000]]
        for messages in wrong:
            with pytest.raises(InvalidBody):
                await producer.publish_many("t", messages)
        assert nodes[0].commands == []


async def test_the_message_that_cannot_be_right_is_named() -> None:
    async with _cluster({}) as (producer, nodes, _):
        wrong: list[tuple[type[InvalidInput], Any]] = [
            (InvalidBody, b""),
            (InvalidHeader, Draft(b"x", headers={"##no": "x"})),
            (ExtendNotSupported, Draft(b"x", headers={"a": "b"})),
            (ExtendNotSupported, Draft(b"x", tag="canary")),
        ]
        for kind, message in wrong:
            with pytest.raises(kind, match="message 2: ") as caught:
                await producer.publish_many("t", [b"a", b"b", message, b"c"])
            assert (caught.value.index, caught.value.topic) == (2, "t")
        assert nodes[0].commands == []


# Headers, traces, compression, delay


async def test_a_trace_gives_a_full_receipt() -> None:
    async with _cluster({"PUB_TRACE": ok(encode_trace_reply(7, 5, 100, 31))}) as (producer, nodes, _):
        receipt = await producer.publish("t", b"x", trace_id=5)
        assert receipt == Receipt("t", 0, str(nodes[0]), 7, 5, 100, 31)
        assert await producer.publish("t", b"y", trace_id=5) == receipt  # over the connection that is there now


@pytest.mark.parametrize("reply", [ok(), ok(b"NO" + bytes(28)), ok(encode_trace_reply(7, 5, 100, 31) + b"x")])
async def test_a_reply_without_the_trace_is_an_unknown_outcome(reply: bytes) -> None:
    options = _options(on_unknown="raise")
    async with _cluster({"PUB_TRACE": reply}, options=options) as (producer, _, _):
        for _ in range(2):
            await producer.publish("t", b"x")  # connects
            with pytest.raises(DeliveryUnknown, match="trace"):
                await producer.publish("t", b"x", trace_id=5)


async def test_headers_are_sent_as_they_are_given() -> None:
    headers = {"user": "42", "x.y": "\u00e9"}
    async with _cluster({}, extend=True) as (producer, nodes, _):
        for _ in range(2):
            await producer.publish("t", b"x", headers=headers, tag="canary")
        assert headers == {"user": "42", "x.y": "\u00e9"}
        sent = {body for node in nodes for body in _bodies(node, "PUB_EXT")}
        header = '{"user":"42","x.y":"\u00e9","##client_dispatch_tag":"canary"}'.encode()
        assert sent == {len(header).to_bytes(2, "big") + header + b"x"}
        for wrong in ({"##a": "b"}, {"a": 1}, {"a b": "c"}):
            with pytest.raises(InvalidHeader):
                await producer.publish("t", b"x", headers=wrong)  # type: ignore[arg-type]


async def test_headers_need_a_topic_that_takes_them() -> None:
    async with _cluster({}) as (producer, nodes, _):
        with pytest.raises(ExtendNotSupported):
            await producer.publish("t", b"x", headers={"a": "b"})
        assert nodes[0].commands == []


async def test_an_error_in_an_extended_batch_gives_the_connection_up() -> None:
    answers: list[Answer] = [error("E_INVALID_JSON_HEADER x"), ok()]
    async with _cluster({"MPUB_EXT": answers}, extend=True) as (producer, nodes, _):
        with pytest.raises(BatchFailed):
            await producer.publish_many("t", [Draft(b"x", headers={"a": "b"}), b"y"])
        receipts = await producer.publish_many("t", [Draft(b"x", headers={"a": "b"}), Draft(b"y", trace_id=3)])
        assert [receipt.trace_id for receipt in receipts] == [0, 3]
        assert b'{"##trace_id":"3"}' in _bodies(nodes[0], "MPUB_EXT")[1]
        assert len(nodes[0].peers) == 2


@pytest.mark.parametrize("extend", [False, True])
async def test_bodies_are_compressed_where_headers_can_tell(extend: bool) -> None:
    options = _options(compression="snappy", compression_min=100)
    body = b"all work and no play " * 50
    async with _cluster({}, extend=extend, options=options) as (producer, nodes, _):
        await producer.publish("t", body)
        await producer.publish("t", body[:50])
        await producer.publish_many("t", [body, b"small"])
        sent = nodes[0].commands
        assert sent[1].words[0] == b"PUB"
        if not extend:
            assert sent[0].body == body
            return
        packed = sent[0].body or b""
        size = int.from_bytes(packed[:2], "big")
        headers = decode_headers(packed[2 : 2 + size])
        assert headers[COMPRESS_HEADER] == "2"
        assert decompress_body(headers, packed[2 + size :]) == body
        assert [command.words[0] for command in sent] == [b"PUB_EXT", b"PUB", b"MPUB_EXT"]


async def test_a_delay_is_for_the_original_nsq() -> None:
    async with _bounded(), scripted_node(obey(), granted=PLAIN) as node, Producer(nsqd=str(node)) as producer:
        await producer.publish("t", b"x", delay=1.5)
        assert node.commands[0].words == [b"DPUB", b"t", b"1500"]
        with pytest.raises(DelayNotSupported):
            await producer.publish("t", b"x", delay=1, trace_id=1)
    async with _cluster({}) as (producer, nodes, _):
        with pytest.raises(DelayNotSupported):
            await producer.publish("t", b"x", delay=1)
        assert nodes[0].commands == []


# The original NSQ


async def test_a_topic_that_lookup_does_not_know_yet_goes_to_the_nodes_of_the_original_nsq() -> None:
    async with _bounded(), scripted_node(obey(), granted=PLAIN) as node, scripted_lookup() as lookup:
        lookup.tell_path("/nodes", {"producers": [node_json(str(node)) | {"version": "1.3.0"}]})
        async with Producer(str(lookup), options=_options()) as producer:
            assert (await producer.publish("new", b"x")).partition == -1
            lookup.tell(nodes=[node])
            assert (await producer.publish("new", b"y")).node == str(node)
        assert _bodies(node) == [b"x", b"y"]
        lookup.refuse()
        lookup.tell_path("/nodes", {"producers": [node_json(str(node))]})
        async with Producer(str(lookup), options=_options()) as producer:
            with pytest.raises(TopicNotFound):
                await producer.publish("new", b"x")


async def test_several_nodes_without_lookup() -> None:
    async with _bounded(), scripted_node(obey(), granted=PLAIN) as one, scripted_node(obey(), granted=PLAIN) as two:
        async with scripted_node() as gone:
            pass
        async with Producer(nsqd=[str(one), str(gone), str(two)], options=_options()) as producer:
            for _ in range(9):
                await producer.publish("t", b"x")
        assert len(one.commands) + len(two.commands) == 9
        assert min(len(one.commands), len(two.commands)) >= 3


# Life


async def test_closing_waits_for_what_is_under_way() -> None:
    async with _bounded(), scripted_node() as node, anyio.create_task_group() as tasks:
        receipts: list[Receipt] = []

        async def publish(producer: Producer) -> None:
            receipts.append(await producer.publish("t", b"x"))

        async def serve() -> None:
            peer = await node.accept()
            await peer.expect("PUB")
            taken.set()
            await leaving.wait()
            await peer.answer()

        taken, leaving = anyio.Event(), anyio.Event()
        tasks.start_soon(serve)
        async with Producer(nsqd=str(node)) as producer:
            tasks.start_soon(publish, producer)
            await taken.wait()
            leaving.set()
        assert len(receipts) == 1


async def test_closing_does_not_wait_for_ever() -> None:
    outcomes: list[NsqError] = []
    async with _bounded(), scripted_node(obey({"PUB": None})) as node, anyio.create_task_group() as tasks:

        async def publish(producer: Producer, **choice: Any) -> None:
            try:
                await producer.publish("t", b"x", **choice)
            except NsqError as failure:
                outcomes.append(failure)

        async with Producer(nsqd=str(node), options=_options(close_timeout=0.1, timeout=60)) as producer:
            for _ in range(3):
                tasks.start_soon(publish, producer)
            await until(lambda: len(node.commands) == 3)
    assert [type(outcome) for outcome in outcomes] == [DeliveryUnknown] * 3


async def test_a_closed_producer_refuses() -> None:
    async with _bounded(), scripted_node(obey()) as node:
        producer = Producer(nsqd=str(node))
        with pytest.raises(InvalidState):
            await producer.publish("t", b"x")
        async with producer:
            await producer.publish("t", b"x")
        for publish in (producer.publish("t", b"x"), producer.publish_many("t", [b"x"])):
            with pytest.raises(InvalidState):
                await publish
        with pytest.raises(InvalidState):
            async with producer:
                pass
        with pytest.raises(InvalidState):
            producer.batcher("t")


async def test_the_error_of_the_block_is_kept() -> None:
    async with _bounded(), scripted_node(obey()) as node:
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


async def test_an_open_producer_that_is_dropped_warns() -> None:
    producer = Producer(nsqd="127.0.0.1:1")
    producer._open = True
    with pytest.warns(ResourceWarning, match="dropped"):
        del producer
        gc.collect()


@pytest.mark.parametrize("steps", range(1, 14))
async def test_cancelling_a_publish_anywhere_leaves_all_in_order(steps: int) -> None:
    """Cancel after so many turns of the event loop: connecting, shaking hands, sending, waiting, trying again."""
    answers: list[Answer] = [error("E_FAILED_ON_NOT_LEADER"), ok()]
    async with _cluster({"PUB": answers}) as (producer, nodes, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_publish_keyed, producer, b"x")
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            if steps > 8:
                await anyio.sleep(0.002 * (steps - 8))
            tasks.cancel_scope.cancel()
        receipt = await producer.publish("t", b"y", key="k")
        assert receipt.partition == 0
        assert len(producer._turns) == 0
        assert not producer._sender.running
        await until(lambda: not producer._pool.in_flight)
        assert _bodies(nodes[0])[-1] == b"y"
