"""`nsqext relay --to`: a standing mirror of a topic, through restarts of both clusters and of itself."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import httpx
import pytest

from nsqext import Admin, BatchFailed, Consumer, Message, MessageBatch, Producer, Receipt, Requeue, sync
from nsqext.broker import Cluster, ClusterOptions
from nsqext.cli import main
from nsqext.cli.connection import ServerAccess
from nsqext.cli.messages.mirror import Kept, Mirror, Placement
from nsqext.cli.messages.relay_run import RelayRun, Running
from nsqext.client.tasks import first_error
from nsqext.errors import MessageNotInFlight, NotSent, NsqError, OperationNotSupported
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import TopicMeta
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import Process, Terminal, lines, run, started
from tests.support.numbered_keys import KEYS, Publisher, disordered, lost

if TYPE_CHECKING:
    from nsqext.admin import NodeStatus

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def where(cluster: Cluster) -> tuple[str, str]:
    return "--lookupd", cluster.lookupd[0]


def to(cluster: Cluster) -> tuple[str, str]:
    return "--to-lookupd", cluster.lookupd[0]


def received(cluster: Cluster, topic: str, count: int) -> dict[str, list[int]]:
    """Return the numbers of each key as delivered, once each key has a count of them or nothing arrives for 10 s."""
    found: dict[str, list[int]] = {}
    last = time.monotonic()
    with sync.Consumer(topic, "ch", cluster.lookupd) as consumer:
        while len(found) < KEYS or min(len({*numbers}) for numbers in found.values()) < count:
            batch = consumer.fetch(200, timeout=0.1)
            for message in batch:
                content = json.loads(message.body)
                found.setdefault(content["customer"]["id"], []).append(content["number"])
                last = time.monotonic()
            batch.finish()
            if time.monotonic() - last > 10.0:
                break
    return found


@contextmanager
def relay(*words: str) -> Iterator[Process]:
    with started("relay", *words, "--report", "0.1") as process:
        yield process


def mirrors(process: Process, count: int = 100) -> None:
    """Wait until a relay has relayed further messages, by its reports."""
    assert process.stdout is not None
    first = None
    for line in process.stdout:
        report = json.loads(line)
        if "relayed" in report:
            first = report["relayed"] if first is None else first
            if report["relayed"] >= first + count:
                return
    pytest.fail("the relay has ended")


def moved(generation: str, restarts: str, end: int) -> tuple[dict[str, list[int]], int]:
    """Mirror a topic under load, while clusters restart and the relay ends; return numbers by key, and how many."""
    topic, redesigned = "orders", generation == "redesigned"
    with Cluster(nodes=1, generation=generation) as source, Cluster(nodes=1) as target:
        clusters = {"source": source, "target": target}
        source.create_topic(topic, 2 if redesigned else 1, extend=redesigned, channels=["ch", "relay"])
        words = [topic, "--to", topic, *to(target)]
        if redesigned:
            words += where(source)
        else:  # its keys are in the bodies
            target.create_topic(topic, partitions=2, extend=True, channels=["ch"])
            url = f"nsq://{source.lookupd[0]}?msg_timeout=2&redelivery_wait=2"
            words += ["--url", url, "--key-member", "customer.id"]
        with relay(*words) as process:
            publisher = Publisher(source, topic, keyed=redesigned)
            try:
                mirrors(process)
                for name in restarts.split():
                    clusters[name].restart(*clusters[name].nodes)
                    mirrors(process)
                process.send_signal(end)
                process.wait(20.0)
                with relay(*words) as again:
                    mirrors(again)
                    publisher.stop()
                    return received(target, topic, publisher.published), publisher.published
            finally:
                publisher.stop()


@pytest.mark.parametrize(
    ("generation", "restarts", "end"),
    [("redesigned", "source target", KILL), ("original", "target", TERM)],
)
def test_a_mirror_loses_nothing_and_keeps_the_order_of_keys(generation: str, restarts: str, end: int) -> None:
    found, published = moved(generation, restarts, end)
    assert (lost(found, published), disordered(found)) == ({}, {})
    repeated = sum(map(len, found.values())) - KEYS * published
    assert repeated <= 5000 * (len(restarts.split()) + 1), "only what was in flight is repeated"


def test_a_mirror_of_the_original_generation_loses_nothing_when_its_source_restarts_and_it_is_killed() -> None:
    """Without order: the server redelivers behind later messages what was in flight, and the relay may not know it."""
    found, published = moved("original", "source", KILL)
    assert lost(found, published) == {}


def test_a_missing_target_is_created_as_the_source_is() -> None:
    with Cluster(nodes=2) as source, Cluster(nodes=1) as target:
        source.create_topic("keyed", partitions=2, replicas=2, extend=True, channels=["relay", "ch", "x#ephemeral"])
        source.create_topic("ordered", partitions=2, ordered=True, channels=["relay"])
        with sync.Producer(source.lookupd) as producer:
            producer.publish("keyed", b"one", key="k", headers={"user": "42"}, tag="t", trace_id=7)
            producer.publish("ordered", b"one", partition=1)
        for topic in ("keyed", "ordered"):
            assert lines("relay", topic, "--to", topic, "--until-end", *where(source), *to(target))[-1]["relayed"] == 1
        shown = {one["topic"]: one for one in lines("topic", "list", *where(target))}
        (message,) = lines("tail", "keyed", "--channel", "ch", "--until-end", *where(target))
        (other,) = lines("tail", "ordered", "--start", "earliest", "--until-end", *where(target))
        (first,) = lines("tail", "keyed", "--start", "earliest", "--until-end", *where(source))
    assert [shown[name][word] for name in shown for word in ("partitions", "replicas", "extend", "ordered")] == [
        *(2, 1, True, False),
        *(2, 1, False, True),
    ]
    assert (shown["keyed"]["channels"], shown["ordered"]["channels"][0]) == (["ch"], "default")
    kept = ("body", "partition", "key", "headers", "tag", "trace_id")
    assert [message[name] for name in kept] == [first[name] for name in kept]
    assert (message["tag"], message["trace_id"], other["partition"]) == ("t", 7, 1)


def test_a_topic_of_the_original_generation_is_created_in_both() -> None:
    with Cluster(nodes=1, generation="original") as source, Cluster(nodes=1) as redesigned:
        source.create_topic("orders", channels=["relay", "ch"])
        for target, topic in ((source, "copy"), (redesigned, "orders")):
            with sync.Producer(source.lookupd) as producer:
                producer.publish("orders", b"one")
            done = lines("relay", "orders", "--to", topic, "--until-end", *where(source), *to(target))
            assert (done[0]["created"], done[0]["channels"], done[-1]["relayed"]) == (True, ["ch"], 1)
            assert lines("tail", topic, "--channel", "ch", "--until-end", *where(target))[0]["body"] == "one"


@pytest.mark.parametrize(
    ("topic", "words", "reason"),
    [
        ("keyed", (), "which plain cannot store"),
        ("ordered", (), "plain is not an ordered topic"),
        ("plain", ("--key-member", "id", "--without-headers"), "--without-headers does not"),
    ],
)
def test_what_the_target_cannot_store_is_refused(
    cluster: Cluster, topic: str, words: tuple[str, ...], reason: str
) -> None:
    if "plain" not in cluster.topics:
        cluster.create_topic("plain", channels=["ch"])
        cluster.create_topic("keyed", extend=True, channels=["relay"])
        cluster.create_topic("ordered", ordered=True, channels=["relay"])
    done = run("relay", topic, "--to", "plain", *words, *where(cluster))
    assert (done.returncode, reason in done.stderr.decode()) == (2, True), done.stderr
    if words == ():
        option = {"keyed": "--without-headers", "ordered": "--without-order"}[topic]
        assert lines("relay", topic, "--to", "plain", option, "--until-end", *where(cluster))[-1]["relayed"] == 0


def test_the_original_generation_has_no_keys_and_no_order(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, extend=True, channels=["relay"])
    with Cluster(nodes=1, generation="original") as original:
        done = run("relay", topic, "--to", "copy", *where(cluster), *to(original))
        keyed = run("relay", topic, "--to", "copy", "--key-member", "id", *where(cluster), *to(original))
    assert (done.returncode, b"the original NSQ has no such topics" in done.stderr) == (2, True), done.stderr
    assert (keyed.returncode, b"the original NSQ has no keys" in keyed.stderr) == (2, True), keyed.stderr


def test_a_start_of_the_original_generation_is_refused_before_a_topic_is_created(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic(topic)
        address = str(original.nodes["n1"].tcp)
        for source in (where(original), ("--nsqd", address)):
            done = run("relay", topic, "--to", topic, "--start", "earliest", *source, *to(cluster))
            assert (done.returncode, b"has no start positions" in done.stderr) == (2, True), done.stderr
    assert topic not in cluster.topics


def test_a_message_that_the_target_can_never_store_ends_the_relay_and_stays(cluster: Cluster) -> None:
    source, target = f"t_{token_hex(4)}", f"t_{token_hex(4)}"
    cluster.create_topic(source, channels=["relay"])
    cluster.create_topic(target, channels=["ch"])
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(source, b"x" * 2000)
    url = f"nsq://{cluster.lookupd[0]}?max_message_size=1000"
    done = run("relay", source, "--to", target, "--to-url", url, *where(cluster))
    assert (done.returncode, b"bytes" in done.stderr) == (2, True), done.stderr
    assert lines("lag", source, "relay", *where(cluster))[0]["lag"] == 1


def test_a_message_that_the_nodes_of_the_target_refuse_ends_the_relay_and_stays(cluster: Cluster) -> None:
    source = f"t_{token_hex(4)}"
    cluster.create_topic(source, channels=["relay"])
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(source, b"x" * 2000)
    with Cluster(nodes=1, options=ClusterOptions(limits=ServerLimits(max_msg_size=1000))) as target:
        done = run("relay", source, "--to", source, *where(cluster), *to(target))
    assert (done.returncode, b"E_BAD_MESSAGE" in done.stderr) == (2, True), done.stderr
    assert lines("lag", source, "relay", *where(cluster))[0]["lag"] == 1


def test_messages_with_an_empty_key_are_relayed(cluster: Cluster) -> None:
    source, target = f"t_{token_hex(4)}", f"t_{token_hex(4)}"
    cluster.create_topic(source, extend=True, channels=["relay"])
    cluster.create_topic(target, partitions=2, extend=True, channels=["ch"])
    with sync.Producer(cluster.lookupd) as producer:
        for member in (b'""', b"null", b"7"):
            producer.publish(source, b'{"customer": {"id": %b}}' % member)
        producer.publish(source, b"{}", header=b'{"##k": ""}')  # of another client
    words = ("--key-member", "customer.id", "--until-end", *where(cluster))
    assert lines("relay", source, "--to", target, *words)[-1] == {"topic": source, "relayed": 4}
    found = lines("tail", target, "--start", "earliest", "--until-end", *where(cluster))
    assert sorted(str(one["key"]) for one in found) == ["7", "None", "None", "None"]


def test_a_topic_is_not_relayed_to_itself_by_another_address(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["relay"])
    done = run("relay", topic, "--to", topic, *where(cluster), *to(cluster))
    assert (done.returncode, b"both clusters have the same nodes" in done.stderr) == (2, True), done.stderr
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic(topic, channels=["relay"])
        done = run("relay", topic, "--to", topic, *where(original), "--to-nsqd", str(original.nodes["n1"].tcp))
    assert (done.returncode, b"both clusters have the same nodes" in done.stderr) == (2, True), done.stderr


def test_a_target_is_not_created_before_the_channels_of_its_source_are_known() -> None:
    """Only leaders report channels: the target was created with the channel default alone."""
    with Cluster(nodes=2) as source, Cluster(nodes=1) as target:
        source.create_topic("t", channels=["billing", "audit"])
        leader = source.leader("t")
        source.kill(leader)
        eventually(lambda: not lines("topic", "show", "t", *where(source))[0]["leaders"])
        with started("relay", "t", "--to", "t", *where(source), *to(target)):
            time.sleep(2.0)
            assert target.topics == {}
            source.restart(leader)
            eventually(lambda: target.topics == {"t": ["audit", "billing"]})


def test_a_target_is_not_created_before_its_source_exists(cluster: Cluster) -> None:
    source, target = f"t_{token_hex(4)}", f"t_{token_hex(4)}"
    with relay(source, "--to", target, *where(cluster)) as process:
        assert process.stderr is not None
        assert source in process.stderr.readline().decode()
        assert target not in cluster.topics
        cluster.create_topic(source, partitions=2, extend=True, channels=["ch"])
        assert process.stdout is not None
        created = json.loads(process.stdout.readline())
    assert (created["topic"], created["partitions"], created["extend"]) == (target, 2, True)


def test_a_relay_shows_its_lag_and_serves_it(cluster: Cluster) -> None:
    source, target = f"t_{token_hex(4)}", f"t_{token_hex(4)}"
    cluster.create_topic(source, channels=["relay"])
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(source, b"one")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    words = ("relay", source, "--to", target, "--report", "0.1", "--http", address, *where(cluster))
    with Terminal(*words) as terminal:
        terminal.wait_for("1 message relayed, lag 0, 0 in flight")
        text = plain_http.get(f"http://{address}/metrics").text
        assert plain_http.get(f"http://{address}/readyz").status_code == 200
        terminal.type("\x03")
        assert terminal.end(20) == 0
    labels = f'channel="relay",target="{target}",topic="{source}",worker="1"'
    assert f"nsqext_relay_messages_total{{{labels}}} 1.0" in text
    assert f"nsqext_relay_lag_messages{{{labels}}} 0.0" in text


def test_the_lag_is_unknown_while_a_partition_reports_nothing(cluster: Cluster) -> None:
    with Cluster(nodes=2) as source:
        source.create_topic("orders", partitions=2, channels=["relay"])
        source.kill(source.leader("orders", 1))
        with relay("orders", "--to", f"t_{token_hex(4)}", *where(source), *to(cluster)) as process:
            assert process.stdout is not None
            reports = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [(one.get("created"), one.get("lag", 0)) for one in reports] == [(True, 0), (None, None)]


@pytest.mark.parametrize("http", [False, True])
def test_a_relay_whose_target_stores_nothing_is_not_ready(cluster: Cluster, http: bool) -> None:
    source = f"t_{token_hex(4)}"
    cluster.create_topic(source, channels=["relay"])
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(source, b"one")
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        address, target = ("{}:{}".format(*one.getsockname()) for one in (free, other))
    hook = f"http://ann:planted@{target}/hook?token=planted"
    place = ("--to-http", hook) if http else ("--to", source, "--to-url", f"nsqd://{target}?timeout=0.5")

    def reasons() -> str:
        with suppress(httpx.TransportError):
            answer = plain_http.get(f"http://{address}/readyz")
            return answer.text if answer.status_code == 503 else ""
        return ""

    with relay(source, *place, "--http", address, *where(cluster)):
        eventually(lambda: "stores no messages" in reasons())
        shown = reasons() + plain_http.get(f"http://{address}/metrics").text
        assert lines("lag", source, "relay", *where(cluster))[0]["lag"] == 1, "the message is not finished"
    assert (target in shown, "planted" in shown) == (True, False)


class _Body:
    """A message whose reads of the body are counted."""

    node, partition, id = "n1", None, b"1"

    def __init__(self) -> None:
        self.reads = 0

    def header_value(self, name: str) -> None:
        """Return no key."""

    @property
    def body(self) -> bytes:
        self.reads += 1
        return b'{"customer": {"id": 7}}'


class _Copied(_Body):
    """A message that counts how often it is finished."""

    finished = 0
    answered = taken_back = False

    async def finish(self) -> None:
        self.finished += 1
        if self.taken_back:
            raise MessageNotInFlight("the server has taken it back")

    def mark_answered(self) -> None:
        self.answered = True


def test_what_the_target_stored_of_a_batch_is_finished_and_an_outage_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, messages = RelayRun(ServerAccess(), "orders", "relay", "copies", Running()), [_Copied(), _Copied()]
    receipt, outage = Receipt("copies", 0, "n:1"), NotSent("no node")
    outcomes: list[Receipt | NsqError] = [receipt, outage]

    async def publish_many(*_: object, **__: object) -> list[Receipt]:
        if outage in outcomes:
            raise BatchFailed(outcomes)
        return [receipt, receipt]

    placement = Placement(TopicMeta(), TopicMeta(), Kept(without_headers=True))
    mirror = Mirror(run, cast("Producer", SimpleNamespace(publish_many=publish_many)), placement)
    for _ in range(2):
        with pytest.raises(Requeue):
            anyio.run(mirror.copy, cast("MessageBatch", messages))
    assert ([one.finished for one in messages], run.relayed, run.outage) == ([2, 0], 2, outage)
    assert caplog.text.count("copies stores no messages") == 1
    outcomes.clear()
    messages[1].taken_back = True
    anyio.run(mirror.copy, cast("MessageBatch", messages))
    assert run.outage is None
    assert [one.answered for one in messages] == [False, True], "its redelivery is not copied again"


def test_the_first_error_of_a_relay_ends_it() -> None:
    run, first = RelayRun(ServerAccess(), "orders", "relay", "copies", Running()), NotSent("first")
    run.give_up(first)
    run.give_up(NotSent("second"))
    assert run.error is first


@pytest.mark.parametrize(
    ("count", "key", "words", "expected"),
    [
        (2, "k", {}, 1),
        (4, "k", {}, None),
        (4, None, {}, 1),
        (1, None, {}, 0),
        (2, "7", {"key_member": "customer.id"}, None),
        (4, "k", {"without_headers": True}, 1),
    ],
)
def test_a_message_stays_in_its_partition_unless_its_key_may_be_of_another(
    count: int, key: str | None, words: dict[str, Any], expected: int | None
) -> None:
    placement = Placement(TopicMeta(partition_num=2), TopicMeta(partition_num=count), Kept(**words))
    message = cast("Message", SimpleNamespace(node="n1", partition=1))
    assert placement.partition(message, key) == expected


def test_a_relay_waits_for_the_nodes_of_its_target(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nodes, the target was the original NSQ."""
    known, looks = Admin.nodes, list[None]()

    async def nodes(admin: Admin) -> tuple[NodeStatus, ...]:
        looks.append(None)
        return () if len(looks) == 1 else await known(admin)

    source, target = f"t_{token_hex(4)}", f"t_{token_hex(4)}"
    cluster.create_topic(source, extend=True, channels=["relay"])
    monkeypatch.setattr(Admin, "nodes", nodes)
    with pytest.raises(SystemExit, match="0"):
        main(["relay", source, "--to", target, "--until-end", *where(cluster)])
    assert cluster.topics[target] == ["default"]


def test_a_relay_ends_with_an_error_that_another_consumer_would_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object, **__: object) -> None:
        raise OperationNotSupported("no such channels")

    def consumer() -> Consumer:
        opened.append(None)
        assert len(opened) == 1, "it is not opened again"
        return cast("Consumer", SimpleNamespace())

    opened = list[None]()
    run = RelayRun(ServerAccess(nsqd="h:1"), "orders", "relay", "copies", Running())
    monkeypatch.setattr(ServerAccess, "serve", serve)
    with pytest.raises(BaseExceptionGroup) as raised:
        anyio.run(run.serve, consumer)
    assert isinstance(first_error(raised.value), OperationNotSupported)


def test_a_body_is_read_once_for_the_lane_and_the_partition() -> None:
    source, target = TopicMeta(), TopicMeta(partition_num=2)
    placement = Placement(source, target, Kept(key_member="customer.id"))
    message = _Body()
    given = cast("Message", message)
    assert (placement.lane(given), placement.key(given), placement.lane(given)) == ("7", "7", "7")
    assert message.reads == 1
    placement.forget(given)
    assert (placement.key(given), message.reads) == ("7", 2)


def test_keys_of_lost_messages_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.cli.messages.mirror._MOST_READ", 2)
    placement = Placement(TopicMeta(), TopicMeta(partition_num=1), Kept(key_member="customer.id"))
    messages = [_Body() for _ in range(5)]
    for number, message in enumerate(messages):
        message.id = b"%d" % number
        assert placement.key(cast("Message", message)) == "7"
    for message in reversed(messages):
        assert placement.key(cast("Message", message)) == "7"
    assert [message.reads for message in messages] == [2, 2, 2, 1, 1]
