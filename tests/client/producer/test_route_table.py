"""Routes of topics: what lookup is asked, for how long answers are used, and what idle topics leave."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from nsqext.client.events import ClientEvent, ClientEvents
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.route import Route, RouteTable
from nsqext.client.tasks import BackgroundTasks
from nsqext.errors import (
    InvalidState,
    LookupFailed,
    NotLookupd,
    NsqError,
    PartitionUnavailable,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.lookup.partition_map import PartitionMap
from nsqext.lookup.responses import NodeInfo
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, TopicMeta
from tests.support.clock import Clock, replace_clock
from tests.support.sleeps import replace_sleep

if TYPE_CHECKING:
    from nsqext.lookup.metadata import MetadataCache

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    replace_clock(monkeypatch, clock)
    return clock


class Metadata:
    """Answers of lookup, as a test gives them."""

    def __init__(self) -> None:
        self.has_lookup = True
        self.addresses = (Address("lookup", 4161),)
        self.views: dict[str, PartitionMap] = {}
        self.answers: deque[PartitionMap | NsqError] = deque()
        self.known_nodes: tuple[NodeInfo, ...] | NsqError = ()
        self.asked: list[str] = []
        self.refreshed: list[int | None] = []
        self.watched: dict[str, Callable[[PartitionMap], None]] = {}

    def cached(self, topic: str, access: str) -> PartitionMap | None:
        assert access == "w"
        return self.views.get(topic)

    async def resolve(self, topic: str, access: str) -> PartitionMap:
        self.asked.append(f"{topic} {access}")
        answer = self.answers.popleft()
        if isinstance(answer, NsqError):
            raise answer
        self.views[topic] = answer
        return answer

    async def refresh(
        self, topic: str, access: str, *, failed: PartitionMap | None, partition: int | None = None
    ) -> None:
        assert failed is self.views.get(topic)
        self.refreshed.append(partition)
        await self.resolve(topic, access)

    async def lacks_channel(self, topic: str, partition: int) -> bool:
        self.asked.append(f"{topic} {partition}")
        if isinstance(self.known_nodes, NsqError):
            raise self.known_nodes
        return partition == 0

    async def nodes(self) -> tuple[NodeInfo, ...]:
        self.asked.append("nodes")
        if isinstance(self.known_nodes, NsqError):
            raise self.known_nodes
        return self.known_nodes

    def of_nodes(self, topic: str, nodes: list[NodeInfo]) -> PartitionMap:
        return PartitionMap(topic, nodes=tuple(node.tcp for node in nodes))

    def watch(self, topic: str, access: str, changed: Callable[[PartitionMap], None]) -> Callable[[], None]:
        self.watched[topic] = changed
        return lambda: cast("None", self.watched.pop(topic))


class Table:
    """A route table, its lookup, its connections and its events."""

    def __init__(self, *, has_lookup: bool = True, **options: float) -> None:
        self.events: list[ClientEvent] = []
        events = ClientEvents()
        events.add(self.events.append)
        self.metadata = Metadata()
        self.metadata.has_lookup = has_lookup
        self.pool = ConnectionPool(ConnectionOptions(), events)
        settings = ProducerOptions(**options)  # type: ignore[arg-type]
        self.table = RouteTable(settings, cast("MetadataCache", self.metadata), self.pool, events)


def view(
    leaders: dict[int, int] | None = None, *, num: int = 0, extend: bool = False, topic: str = "t"
) -> PartitionMap:
    """Return a partition map whose nodes are numbers."""
    found = {partition: Address("n", node) for partition, node in (leaders or {0: 1}).items()}
    return PartitionMap(topic, meta=TopicMeta(partition_num=num or len(found), extend_support=extend), leaders=found)


def original(number: int, version: str = "1.3.0") -> NodeInfo:
    """Return a node as lookup describes it."""
    return NodeInfo(Address("n", number), version=version)


class Started:
    """Background tasks that a test runs."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], Awaitable[object]]] = []

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Record a task."""
        self.tasks.append(partial(function, *args))

    async def nothing(self) -> None:
        """Close nothing."""


async def test_lookup_is_asked_in_the_background_once_at_a_time() -> None:
    tested, started, known = Table(), Started(), view()
    tested.metadata.views["t"] = known
    tested.metadata.answers.extend([known, NotLookupd("closed"), known, known])
    tested.table.tasks = cast("BackgroundTasks", started)
    for count in (1, 2, 3):
        tested.table.refresh_soon("t", known, None)
        tested.table.refresh_soon("t", known, None)
        assert len(started.tasks) == count
        await started.tasks[-1]()
    await tested.table.refresh("t", known, 3)
    assert tested.metadata.asked == ["t w"] * 4
    assert tested.metadata.refreshed == [None, None, None, 3]
    tested.table.tasks = None
    tested.table.refresh_soon("t", known, None)  # the producer is not open
    tested.table.tasks = BackgroundTasks("producer", started.nothing)
    tested.table.refresh_soon("t", known, None)
    assert len(started.tasks) == 3


async def test_a_route_is_used_until_the_map_of_its_topic_changes() -> None:
    tested = Table()
    assert tested.table.current("t") is None
    tested.metadata.answers.append(view({0: 1}))
    route = await tested.table.find("t")
    assert await tested.table.find("t") is route is tested.table.current("t")
    tested.metadata.views["t"] = view({0: 2})
    assert tested.table.current("t") is None
    other = await tested.table.find("t")
    assert other is not route
    assert other.at(0).node.address.port == 2
    assert tested.metadata.asked == ["t w"]


async def test_a_map_that_knows_no_leader_is_asked_for_again() -> None:
    tested = Table()
    tested.metadata.views["t"] = PartitionMap("t")
    tested.metadata.answers.append(view())
    assert (await tested.table.find("t")).partitions
    assert tested.metadata.asked == ["t w"]


async def test_nodes_are_used_for_half_a_second_for_a_topic_that_lookup_does_not_know(clock: Clock) -> None:
    tested = Table()
    tested.metadata.answers.extend([TopicNotFound("unknown"), TopicNotFound("unknown"), view()])
    tested.metadata.known_nodes = (original(1), original(2))
    route = await tested.table.find("t")
    assert {str(target.node.address) for target in route.targets} == {"n:1", "n:2"}
    clock.now += 0.49
    assert await tested.table.find("t") is route
    assert (tested.metadata.asked, tested.metadata.watched) == (["t w", "nodes"], {})
    clock.now += 0.01
    await tested.table.find("t")
    assert tested.metadata.asked == ["t w", "nodes", "t w", "nodes"]
    clock.now += 0.5
    assert (await tested.table.find("t")).partitions
    assert tested.metadata.asked[4:] == ["t w"]


async def test_unknown_topics_share_a_list_of_nodes_for_half_a_second(clock: Clock) -> None:
    tested = Table()
    tested.metadata.answers.extend([TopicNotFound("unknown")] * 4)
    tested.metadata.known_nodes = (original(1),)
    for topic, seconds in (("a", 0.0), ("b", 0.49), ("c", 0.01)):
        clock.now += seconds
        await tested.table.find(topic)
    assert tested.metadata.asked.count("nodes") == 2
    tested.metadata.known_nodes = ()
    clock.now += 0.5
    for _ in range(2):  # a list without nodes is not kept
        tested.metadata.answers.append(TopicNotFound("unknown"))
        with pytest.raises(PartitionUnavailable, match="knows no node"):
            await tested.table.find("d")
    assert tested.metadata.asked.count("nodes") == 4


async def test_redesigned_nodes_create_no_topic() -> None:
    tested = Table()
    tested.metadata.known_nodes = (original(1), original(2, "0.3.7-HA.1.9"))
    tested.metadata.answers.append(TopicNotFound("unknown"))
    with pytest.raises(TopicNotFound):
        await tested.table.find("t")


@pytest.mark.parametrize(
    ("error", "raised"), [(LookupFailed("down"), LookupFailed), (NotLookupd("a web page"), TopicNotFound)]
)
async def test_a_list_of_nodes_that_fails(error: NsqError, raised: type[NsqError]) -> None:
    tested = Table()
    tested.metadata.known_nodes = error
    tested.metadata.answers.append(TopicNotFound("unknown"))
    with pytest.raises(raised):
        await tested.table.find("t")


@pytest.mark.parametrize("answer", [TopicNotFound("unknown"), TopicNotReady("no channel"), view()])
async def test_a_publish_waits_for_lookup_as_long_as_its_own_timeout_once_it_has_answered(
    clock: Clock, answer: PartitionMap | NsqError
) -> None:
    tested = Table(lookup_timeout=5.0)
    tested.metadata.known_nodes = NotLookupd("a web page")
    assert tested.table.waits_for_lookup(LookupFailed("down"))
    tested.metadata.answers.append(answer)
    if isinstance(answer, NsqError):
        with pytest.raises(type(answer)):
            await tested.table.find("t")
    else:
        await tested.table.find("t")
    clock.now += 100.0
    assert tested.table.waits_for_lookup(LookupFailed("down"))
    assert not tested.table.waits_for_lookup(NotLookupd("a web page"))


async def test_a_publish_waits_for_the_first_answer_of_lookup_for_its_timeout(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tested = Table(lookup_timeout=5.0)
    with caplog.at_level(logging.WARNING, "nsqext.producer"):
        waits = []
        for seconds in (0.0, 3.0, 1.9, 0.1, 1.0):
            clock.now += seconds
            waits.append(tested.table.waits_for_lookup(LookupFailed("down")))
    assert waits == [True, True, True, False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "no lookup service answers yet; waiting up to 5 s for one of lookup:4161"
    ]


@pytest.mark.parametrize(
    ("before", "after", "partitions", "wanted"),
    [
        (view(), view(extend=True), 0, True),
        (view(), view(), 0, False),
        (view({0: 1}), view({0: 1}, num=2), 2, True),
        (view({0: 1}), view({0: 1}, num=3), 2, True),
        (view({0: 1}), view({0: 1}), 2, False),
        (view({0: 1}), view(extend=True), 2, False),
    ],
)
async def test_lookup_is_asked_once_a_second_at_most_whether_a_topic_was_upgraded(
    clock: Clock, before: PartitionMap, after: PartitionMap, partitions: int, wanted: bool
) -> None:
    tested = Table()
    tested.metadata.views["t"] = before
    tested.metadata.answers.extend([after, after])
    assert await tested.table.upgraded("t", partitions) is wanted
    clock.now += 0.99
    assert await tested.table.upgraded("t", partitions) is wanted
    assert tested.metadata.asked == ["t w"]
    clock.now += 0.01
    assert await tested.table.upgraded("t", partitions) is wanted
    assert tested.metadata.asked == ["t w"] * (1 if wanted else 2)


async def test_a_partition_lacks_a_channel_only_if_lookup_says_so() -> None:
    tested = Table()
    assert [await tested.table.lacks_channel("t", partition) for partition in (0, 1, None)] == [True, False, False]
    tested.metadata.known_nodes = LookupFailed("down")
    assert not await tested.table.lacks_channel("t", 0)
    assert tested.metadata.asked == ["t 0", "t 1", "t 0"]


async def test_a_topic_without_a_map_and_fixed_nodes_were_unchanged() -> None:
    tested = Table()
    assert not await tested.table.upgraded("t")
    fixed = Table(has_lookup=False)
    fixed.metadata.views["t"] = view(extend=True)
    assert not await fixed.table.upgraded("t")
    assert tested.metadata.asked == []


@pytest.mark.parametrize("use", [Route.any, Route.next, lambda route: route.at(0)], ids=["any", "next", "at"])
async def test_topics_that_are_not_used_are_forgotten_with_their_nodes(
    clock: Clock, use: Callable[[Route], object]
) -> None:
    tested = Table()
    tested.metadata.answers.extend([view({0: 1}, topic="a"), view({0: 1, 1: 2}, topic="b")])
    for topic in ("a", "b"):
        await tested.table.find(topic)
    assert set(tested.metadata.watched) == {"a", "b"}

    def wanted() -> set[int]:
        return {number for number in (1, 2) if tested.pool.node(Address("n", number)).wanted}

    tested.table.forget_idle()
    assert (set(tested.table.by_topic), wanted()) == ({"a", "b"}, {1, 2})
    use(tested.table.by_topic["a"])
    tested.table.forget_idle()
    assert (set(tested.table.by_topic), set(tested.metadata.watched), wanted()) == ({"a"}, {"a"}, {1})
    tested.metadata.views["b"] = view({0: 2, 1: 1}, topic="b")
    await tested.table.find("b")  # lookup is not asked
    assert tested.events == [], "its former leaders are not known any more"
    assert wanted() == {1, 2}
    assert set(tested.metadata.watched) == {"a", "b"}
    tested.table.close()
    assert tested.metadata.watched == {}
    tested.table.forget_idle()
    tested.table.forget_idle()
    assert tested.table.by_topic == {}


async def test_idle_topics_are_looked_for_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise InvalidState("it has seen enough")

    tested = Table(forget_after=7.0)
    tested.metadata.answers.append(view())
    await tested.table.find("t")
    replace_sleep(monkeypatch, sleep)
    with pytest.raises(InvalidState):
        await tested.table.run()
    assert (pauses, tested.table.by_topic) == ([7.0] * 3, {})


async def test_answers_that_are_out_of_date_are_not_kept(clock: Clock) -> None:
    tested = Table()
    tested.metadata.known_nodes = (original(1),)
    tested.metadata.answers.extend([TopicNotFound("unknown"), view(topic="u")])
    await tested.table.find("t")
    tested.metadata.views["u"] = view(topic="u")
    assert not await tested.table.upgraded("u")
    for seconds, kept in ((0.0, (1, 1)), (0.5, (0, 1)), (0.5, (0, 0))):
        clock.now += seconds
        tested.table.forget_idle()
        assert (len(tested.table._provisional), len(tested.table._unchanged)) == kept


async def test_nodes_of_the_former_map_are_not_wanted_any_more() -> None:
    tested = Table()
    wanted = []
    for leader in (1, 2, 1):
        tested.metadata.views["t"] = view({0: leader})
        await tested.table.find("t")
        wanted.append([tested.pool.node(Address("n", number)).wanted for number in (1, 2)])
    assert wanted[1:] == [[False, True], [True, False]]


async def test_leaders_that_move_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    tested = Table()
    tested.metadata.views["t"] = view({0: 1, 1: 2})
    await tested.table.find("t")
    changed = tested.metadata.watched["t"]
    with caplog.at_level(logging.INFO, "nsqext.producer"):
        changed(view({0: 3, 1: 2, 2: 1}))
        changed(view({0: 3, 1: 2, 2: 1}))
    assert tested.events == [ClientEvent("leader_moved", "t", 0, "n:3", "was n:1")]
    assert [record.getMessage() for record in caplog.records] == ["t partition 0: leader moved to n:3"]
    tested.metadata.views["t"] = view({0: 4, 1: 2, 2: 1})
    await tested.table.find("t")  # the same topic is not watched twice
    assert tested.metadata.watched["t"] is changed
