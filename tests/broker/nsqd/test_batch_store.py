"""Large batches are stored in parts, between which other clients are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import pack

import anyio
import pytest

from nsqext.broker import Cluster
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.broker.nsqd import publish_commands
from nsqext.broker.nsqd.node import Hosted, Node
from nsqext.broker.nsqd.publish_commands import is_large, store_in_parts
from nsqext.protocol.server.request_error import RequestError
from tests.support import plain_http
from tests.support.blocking_client import BlockingClient
from tests.support.commands import multi_body
from tests.support.engine_partition import Bench
from tests.support.nsqd_sessions import V1, Client, host, make_node, make_original, sized, web

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of a large batch to ten messages."""
    monkeypatch.setattr(publish_commands, "PART", 9)


def bodies(bench: Bench) -> list[str]:
    log = bench.partition.log
    entries = [log.at(number) for number in range(1, log.end_count + 1)]
    return [entry.record.body.decode() for entry in entries if entry is not None]


async def test_other_publishes_wait_and_other_tasks_run() -> None:
    bench = Bench()
    hosted = Hosted(bench.partition)
    seen: list[str] = []

    def put(part: Sequence[str]) -> Stored:
        seen.append(f"{len(part)}")
        return bench.partition.put([NewMessage(body.encode()) for body in part])

    async def publish(*names: str) -> Stored:
        return await store_in_parts(hosted, names, put)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish, *(f"a{number}" for number in range(20)))
        while hosted.storing is None:
            await anyio.lowlevel.checkpoint()
        assert is_large(hosted, ["b"]), "a small one waits for the large one"
        tasks.start_soon(publish, "b")
        while bench.partition.log.end_count < 21:
            seen.append("-")
            await anyio.lowlevel.checkpoint()
    assert bodies(bench) == [*(f"a{number}" for number in range(20)), "b"]
    assert [text for text in seen if text != "-"] == ["9", "9", "2", "1"]
    assert "-" in seen[seen.index("9") : seen.index("2")]
    assert not is_large(hosted, ["b"])


async def test_a_large_batch_is_stored_as_one() -> None:
    bench = Bench()
    stored = await store_in_parts(
        Hosted(bench.partition),
        [NewMessage(b"%d" % number) for number in range(20)],
        lambda part: bench.partition.put(list(part)),
    )
    assert (stored.message_id, stored.offset, len(stored.entries)) == (2, 0, 20)
    assert stored.size == bench.partition.log.end_offset
    assert [len(part.entries) for part in stored.parts] == [9, 9, 2]


@pytest.mark.parametrize("refusal", [Refusal("full"), RequestError("E_MPUB_FAILED", "full")])
async def test_a_batch_that_is_refused_in_the_middle_leaves_nothing(refusal: Exception) -> None:
    bench = Bench()
    bench.publish("before")
    hosted = Hosted(bench.partition)

    def put(part: Sequence[str]) -> Stored:
        if "9" in part:
            raise refusal
        return bench.partition.put([NewMessage(body.encode()) for body in part])

    with pytest.raises(type(refusal), match="full"):
        await store_in_parts(hosted, [f"{number}" for number in range(20)], put)
    assert bodies(bench) == ["before"]
    assert hosted.storing is None
    bench.publish("after")
    assert bench.consume(ready=9).bodies() == []
    assert bodies(bench) == ["before", "after"]


@pytest.mark.parametrize("make", [make_node, make_original])
async def test_messages_of_large_batches_count_for_their_publisher(make: Callable[[], Node]) -> None:
    node = make()
    host(node)
    client = Client(node)
    client.session.receive(sized("MPUB t", multi_body([b"x"] * 20)))
    waiting = client.session.step()
    assert waiting is not None
    await waiting
    assert client.session.published["t"].published == 20


@pytest.mark.parametrize("over", ["tcp", "http"])
async def test_a_batch_is_refused_when_another_leader_was_elected_while_it_was_stored(over: str) -> None:
    node = make_node()
    hosted = host(node)
    replicated: list[Stored] = []

    async def replicate(part: Stored) -> None:
        replicated.append(part)

    async def elect() -> None:
        while hosted.storing is None:
            await anyio.lowlevel.checkpoint()
        hosted.epoch += 1

    hosted.replicate = replicate
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(elect)
        await anyio.lowlevel.checkpoint()
        if over == "http":
            answer = await web(node).post("/mpub?topic=t", content=b"x\n" * 20, headers=V1)
            refusal = answer.json()["message"]
        else:
            client = Client(node)
            client.session.receive(sized("MPUB t", multi_body([b"x"] * 20)))
            waiting = client.session.step()
            assert waiting is not None
            await waiting
            refusal = client.receive()[0][1].decode().strip()
    assert (refusal, replicated, hosted.partition.readable) == ("E_FAILED_ON_NOT_WRITABLE", [], 0)


@pytest.fixture(scope="module", params=["redesigned", "original"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Servers of a generation; the redesigned ones replicate."""
    with Cluster(nodes=2 if request.param == "redesigned" else 1, generation=request.param) as cluster:
        cluster.create_topic("t", replicas=2 if request.param == "redesigned" else 1, channels=["ch"])
        yield cluster


def test_large_batches_arrive_over_tcp_and_http(cluster: Cluster) -> None:
    leader = cluster.nodes[cluster.leader("t") if len(cluster.nodes) > 1 else "n1"]
    wanted = [b"%03d" % number for number in range(150)]
    batch = pack(">I", 50) + b"".join(pack(">I", 3) + body for body in wanted[:50])
    with BlockingClient(leader.tcp) as client:
        assert client.ask("MPUB t", batch) == b"OK"
        lines = b"\n".join(wanted[50:100])
        assert plain_http.post(f"http://{leader.http}/mpub?topic=t", content=lines).text == "OK"
        binary = pack(">I", 50) + b"".join(pack(">I", 3) + body for body in wanted[100:])
        assert plain_http.post(f"http://{leader.http}/mpub?topic=t&binary=true", content=binary).text == "OK"
        assert client.ask("SUB t ch") == b"OK"
        client.send("RDY 200")
        found = []
        for _ in wanted:
            message_id, _, body = client.message()
            client.finish(message_id)
            found.append(body)
    assert sorted(found) == wanted
