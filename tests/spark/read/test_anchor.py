"""Anchor channels: where a query begins, and what follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext.errors import (
    DataLoss,
    InvalidInput,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    TopicNotFound,
)
from nsqext.errors.server import AuthFailed
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.anchor import Anchors
from nsqext.spark.read.planning import PartitionState
from tests.support.spark_admin import FakeAdmin, Log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.spark.read.offsets import Key

pytestmark = pytest.mark.anyio

ORDERS = {("orders", 0): (10, 50), ("orders", 1): (0, 30)}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


def options(**given: str) -> SourceOptions:
    return SourceOptions.parse(
        {"lookupd": "127.0.0.1:1", "subscribe": "orders", "channel": "spark", **given}
        if "assign" not in given
        else {"lookupd": "127.0.0.1:1", "channel": "spark", **given},
        streaming=True,
    )


def pretended(**anchors: int) -> FakeAdmin:
    return FakeAdmin({key: Log(start, end, anchors.get(f"p{key[1]}")) for key, (start, end) in ORDERS.items()})


async def test_a_new_query_begins_at_the_end() -> None:
    servers = pretended()
    assert await Anchors(servers.admin, options()).begin() == {("orders", 0): 50, ("orders", 1): 30}
    assert [log.anchor for log in servers.logs.values()] == [50, 30]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"startingOffsets": "earliest"}, {0: 10, 1: 0}),
        ({"startingOffsets": '{"orders": {"0": 20, "1": -2}}'}, {0: 20, 1: 0}),
        ({"startingOffsets": '{"orders": {"0": -1, "1": 30}}'}, {0: 50, 1: 30}),
        ({"startingTimestamp": "1700000000000"}, {0: 17, 1: 17}),
    ],
)
async def test_a_new_query_begins_where_the_options_say(given: dict[str, str], expected: dict[int, int]) -> None:
    servers = pretended()
    servers.times[1_700_000_000_000] = 17
    assert await Anchors(servers.admin, options(**given)).begin() == {
        ("orders", number): count for number, count in expected.items()
    }


async def test_it_restarts_there_in_spite_of_messages_received_meanwhile() -> None:
    """A crash in the first batch makes Spark ask again, for a batch whose end it wrote down."""
    servers = pretended()
    begun = await Anchors(servers.admin, options()).begin()
    servers.logs["orders", 0].end += 100
    assert await Anchors(servers.admin, options()).begin() == begun
    assert len(servers.moves) == 2


async def test_after_a_crash_between_two_anchors_both_are_created_again() -> None:
    """No batch was planned: the query begins where the options say, and not at the first anchor."""
    servers = pretended(p0=50)
    servers.incomplete = True
    servers.logs["orders", 0].end = 57
    assert await Anchors(servers.admin, options()).begin() == {("orders", 0): 57, ("orders", 1): 30}
    assert [log.anchor for log in servers.logs.values()] == [57, 30]
    assert not servers.incomplete


@pytest.mark.parametrize("given", [{}, {"startingOffsets": '{"orders": {"0": 20}}'}, {"startingOffsets": "latest"}])
async def test_a_partition_that_is_added_before_the_first_batch_is_complete(given: dict[str, str]) -> None:
    """It is read from its first message, like later ones; a topic without anchors begins where the options say."""
    servers = pretended(p0=20)
    if not given:
        servers.logs["bills", 0] = Log(0, 9)
        begun = await Anchors(servers.admin, options(subscribe="bills,orders")).begin()
        assert begun == {("bills", 0): 9, ("orders", 0): 20, ("orders", 1): 0}
        return
    for _ in range(2):
        assert await Anchors(servers.admin, options(**given)).begin() == {("orders", 0): 20, ("orders", 1): 0}
    servers.logs["orders", 1].anchor = 7
    if "latest" not in given["startingOffsets"]:
        with pytest.raises(InvalidState, match="is at message 7, but startingOffsets begins at 0"):
            await Anchors(servers.admin, options(**given)).begin()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"startingOffsets": "earliest"}, "is at message 44, but startingOffsets begins at 10"),
        ({"startingOffsets": '{"orders": {"0": 43, "1": 0}}'}, "is at message 44, but startingOffsets begins at 43"),
        ({"startingTimestamp": "1700000000000"}, "is at message 44, but startingTimestamp begins at 17"),
    ],
)
async def test_a_channel_is_not_where_a_new_checkpoint_wants_to_begin(given: dict[str, str], expected: str) -> None:
    servers = pretended(p0=44)
    servers.times = {1_700_000_000_000: 17}
    with pytest.raises(InvalidState, match=expected) as caught:
        await Anchors(servers.admin, options(**given)).begin()
    assert "resetChannel=true" in str(caught.value)
    assert "existingChannel=continue" in str(caught.value)
    assert servers.logs["orders", 1].anchor is None, "nothing was created"
    continued = await Anchors(servers.admin, options(**given, existingChannel="continue")).begin()
    assert continued["orders", 0] == 44


async def test_a_channel_is_elsewhere_although_a_survey_has_seen_it() -> None:
    """With availableNow, a survey freezes the ends before Spark requests the start: the query began at 44."""
    servers = pretended(p0=44)
    anchors = Anchors(servers.admin, options(startingOffsets="earliest"))
    await anchors.survey()
    with pytest.raises(InvalidState, match="is at message 44, but startingOffsets begins at 10"):
        await anchors.begin()


async def test_a_query_that_failed_in_its_first_batch_begins_again() -> None:
    """Spark requests its start once more; the anchors are there."""
    servers = pretended(p0=10)
    for _ in range(2):
        begun = await Anchors(servers.admin, options(startingOffsets="earliest")).begin()
        assert begun == {("orders", 0): 10, ("orders", 1): 0}


async def test_a_channel_is_reset_on_demand() -> None:
    servers = pretended(p0=44, p1=3)
    begun = await Anchors(servers.admin, options(startingOffsets="earliest", resetChannel="true")).begin()
    assert begun == {("orders", 0): 10, ("orders", 1): 0}
    assert [log.anchor for log in servers.logs.values()] == [10, 0]


@pytest.mark.parametrize("given", [{}, {"startingOffsets": "latest"}, {"startingOffsets": '{"orders": {"0": -1}}'}])
async def test_a_channel_is_not_reset_to_a_place_that_moves(given: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match="resetChannel cannot start at the latest"):
        Anchors(pretended().admin, options(resetChannel="true", **given))


async def test_a_start_before_the_retained_messages() -> None:
    given = {"startingOffsets": '{"orders": {"0": 4, "1": 0}}'}
    with pytest.raises(DataLoss, match="startingOffsets is 4, but the first retained message is 10"):
        await Anchors(pretended().admin, options(**given)).begin()
    lenient = Anchors(pretended().admin, options(failOnDataLoss="false", **given))
    assert await lenient.begin() == {("orders", 0): 10, ("orders", 1): 0}
    behind = {"startingOffsets": '{"orders": {"0": 51, "1": 0}}', "failOnDataLoss": "false"}
    assert await Anchors(pretended().admin, options(**behind)).begin() == {("orders", 0): 50, ("orders", 1): 0}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"startingOffsets": '{"orders": {"0": 51, "1": 0}}'}, InvalidSetting, "the partition ends at 50"),
        ({"startingOffsets": '{"orders": {"0": 50}}'}, InvalidSetting, "has no offset for this partition"),
        ({"startingOffsets": '{"orders": {"0": 50, "1": 0, "2": 0}}'}, InvalidSetting, "partition that is not read"),
        ({"startingOffsetsByTimestamp": '{"orders": {"0": 50}}'}, InvalidSetting, "has no time for this partition"),
        ({"startingOffsetsByTimestamp": '{"orders": {"0": 1, "1": 1, "2": 1}}'}, InvalidSetting, "that is not read"),
        ({"startingOffsetsByTimestamp": "{}"}, InvalidSetting, "has no time for this partition"),
        ({"assign": '{"orders": [0, 2]}'}, InvalidPartition, "assign names a partition that does not exist"),
    ],
)
async def test_invalid_starts_are_refused(given: dict[str, str], kind: type[Exception], text: str) -> None:
    servers = pretended()
    servers.times[50] = 20
    with pytest.raises(kind, match=text):
        await Anchors(servers.admin, options(**given)).begin()


async def test_only_assigned_partitions_get_an_anchor() -> None:
    servers = pretended()
    anchors = Anchors(servers.admin, options(assign='{"orders": [1]}'))
    assert await anchors.begin() == {("orders", 1): 30}
    assert await anchors.survey() == {("orders", 1): PartitionState(0, 30, 30)}


async def test_anchors_only_move_forward() -> None:
    servers = pretended()
    anchors = Anchors(servers.admin, options(startingOffsets="earliest"))
    await anchors.begin()
    servers.moves.clear()
    await anchors.advance({("orders", 0): 30, ("orders", 1): 0})
    await anchors.advance({("orders", 0): 30, ("orders", 1): 5})
    await anchors.advance({("orders", 0): 20, ("orders", 1): 5})
    assert servers.moves == [("orders", 0, 30), ("orders", 1, 5)]


async def test_a_restarted_query_moves_the_anchors_that_lag_behind() -> None:
    servers = pretended(p0=20, p1=5)
    await Anchors(servers.admin, options()).advance({("orders", 0): 30, ("orders", 1): 4})
    assert servers.moves == [("orders", 0, 30)]


@pytest.mark.parametrize("end", [40, 30], ids=["of the next batch", "of the same batch"])
async def test_an_anchor_that_could_not_be_moved_is_moved_by_the_next_call(end: int) -> None:
    servers = pretended(p0=20, p1=5)
    anchors = Anchors(servers.admin, options())
    servers.broken.add(("orders", 0))
    await anchors.advance({("orders", 0): 30, ("orders", 1): 10})
    servers.broken.clear()
    for _ in range(2):
        await anchors.advance({("orders", 0): end, ("orders", 1): 10})
    assert servers.moves == [("orders", 1, 10), ("orders", 0, end)]
    assert servers.move_requests == 3, "no request for an anchor that is there already"


async def test_an_anchor_that_was_deleted_cannot_be_moved() -> None:
    servers = pretended(p0=20, p1=5)
    servers.logs["orders", 0].anchor = None
    with pytest.raises(InvalidState, match="gone"):
        await Anchors(servers.admin, options()).advance({("orders", 0): 30, ("orders", 1): 10})
    await Anchors(servers.admin, options(failOnDataLoss="false")).advance({("orders", 0): 30, ("orders", 1): 12})
    assert servers.logs["orders", 1].anchor == 12


async def test_anchors_of_a_deleted_topic_are_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    """A query without new messages moves anchors five times a second, and would log each refusal."""
    servers = pretended(p0=20, p1=5)
    servers.logs["bills", 0] = Log(0, 9, 4)
    anchors = Anchors(servers.admin, options(subscribe="bills,orders", failOnDataLoss="false"))
    await anchors.survey()
    del servers.logs["bills", 0]
    await anchors.survey()
    caplog.clear()
    await anchors.advance({("bills", 0): 9, ("orders", 0): 30})
    assert (servers.moves, caplog.records) == ([("orders", 0, 30)], [])
    servers.logs["bills", 0] = Log(0, 9, 4)
    await anchors.survey()
    await anchors.advance({("bills", 0): 9})
    assert servers.moves == [("orders", 0, 30), ("bills", 0, 9)]


async def test_positions_that_are_known_are_not_requested_before_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = pretended(p0=20, p1=5)
    anchors = Anchors(servers.admin, options())
    pushed: list[int] = []

    async def push(admin: FakeAdmin, topic: str, partition: int, channel: str, count: int) -> None:
        pushed.append(count)  # the server did not do it, or its new leader does not know of it

    monkeypatch.setattr(FakeAdmin, "push_anchor", push)
    await anchors.survey()
    await anchors.advance({("orders", 0): 21})
    assert (pushed, servers.moves) == ([21], [])
    await anchors.survey()
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", -1.0)
    await anchors.advance({("orders", 0): 21})
    assert (pushed, servers.moves) == ([21], [("orders", 0, 21)])
    await anchors.advance({("orders", 0): 21})
    assert len(servers.moves) == 1


async def test_a_new_partition_whose_error_remains_ends_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a partition that is not served yet, and its messages were never read."""
    servers = pretended(p0=20, p1=5)
    anchors = Anchors(servers.admin, options())
    await anchors.survey()
    servers.logs["orders", 2] = Log(0, 4)

    async def refuse(*_: object) -> None:
        raise AuthFailed("no permission")

    monkeypatch.setattr(FakeAdmin, "create_anchor", refuse)
    with pytest.raises(AuthFailed, match="no permission"):
        await anchors.survey(known=ORDERS)


async def test_a_new_partition_whose_node_does_not_respond_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = pretended(p0=20, p1=5)
    anchors, bounds = Anchors(servers.admin, options()), FakeAdmin.bounds
    servers.logs["orders", 2] = Log(0, 4)

    async def wait(admin: FakeAdmin, topic: str, partition: int, *patience: float) -> Log:
        if partition == 2:
            await anyio.sleep_forever()
        return await bounds(admin, topic, partition, *patience)

    monkeypatch.setattr(FakeAdmin, "bounds", wait)
    monkeypatch.setattr("nsqext.spark.read.anchor._JOIN", 0.01)
    with anyio.fail_after(25):
        assert (await anchors.survey(known=ORDERS)).keys() == ORDERS.keys()


async def test_a_topic_of_the_same_name_without_anchors_is_another_one() -> None:
    servers = pretended(p0=20, p1=5)
    anchors = Anchors(servers.admin, options(failOnDataLoss="false"))
    await anchors.survey()
    before = dict(servers.logs)
    servers.logs.clear()
    assert await anchors.survey() == {}
    servers.logs.update({("orders", 0): Log(0, 9), ("orders", 1): Log(0, 9)})
    assert [state.recreated for state in (await anchors.survey()).values()] == [True, True]
    servers.logs["orders", 0].anchor = 0
    assert [state.recreated for state in (await anchors.survey()).values()] == [False, True]
    servers.logs.clear()
    await anchors.survey()
    servers.logs.update(before)
    assert [state.recreated for state in (await anchors.survey()).values()] == [False, False]
    servers.logs["orders", 1].anchor = None
    assert [state.recreated for state in (await anchors.survey()).values()] == [False, False], "it is the old topic"


@pytest.mark.parametrize("quick", [False, True])
async def test_a_topic_that_is_deleted_during_a_survey(monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    survey = FakeAdmin.survey

    async def delete(admin: FakeAdmin, keys: Iterable[Key], *_: float) -> dict[Key, Log]:
        if admin.logs:
            admin.logs.clear()
            raise TopicNotFound("it was deleted", topic="orders")
        return await survey(admin, keys)

    monkeypatch.setattr(FakeAdmin, "survey", delete)
    assert await Anchors(pretended().admin, options(failOnDataLoss="false")).survey(quick=quick) == {}
    with pytest.raises(TopicNotFound, match="it was deleted"):
        await Anchors(pretended().admin, options()).survey(quick=quick)


async def test_a_topic_that_lookup_does_not_know_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted nsqlookupd: the survey asks again, with pauses in which other tasks run."""
    servers, asked, refused = pretended(), 0, anyio.Event()
    known = dict(servers.logs)
    servers.logs.clear()

    async def is_deleted(_: FakeAdmin, topic: str) -> bool:
        nonlocal asked
        asked += 1
        assert (topic, asked) == ("orders", 1)
        refused.set()
        return False

    monkeypatch.setattr(FakeAdmin, "is_deleted", is_deleted)
    monkeypatch.setattr("nsqext.spark.read.anchor._UNKNOWN_PAUSE", 0.01)
    async with anyio.create_task_group() as tasks:

        async def learn() -> None:
            await refused.wait()
            servers.logs.update(known)

        tasks.start_soon(learn)
        found = await Anchors(servers.admin, options(failOnDataLoss="false")).survey()
    assert found.keys() == known.keys()


async def test_an_anchor_of_a_topic_that_is_deleted_before_it_is_created(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object) -> None:
        raise TopicNotFound("it was deleted", topic="orders")

    monkeypatch.setattr(FakeAdmin, "create_anchor", refuse)
    with pytest.raises(TopicNotFound):
        await Anchors(pretended().admin, options()).create(("orders", 0), 10)
    await Anchors(pretended().admin, options(failOnDataLoss="false")).create(("orders", 0), 10)
    assert "the anchor channel was not created: it was deleted" in caplog.text


async def test_anchors_are_not_requested_for_each_batch() -> None:
    servers = pretended(p0=20, p1=5)
    anchors = Anchors(servers.admin, options())
    await anchors.survey(quick=True)
    servers.logs["orders", 0].anchor = None
    assert (await anchors.survey(quick=True))["orders", 0].anchor == 20
    assert (await anchors.survey())["orders", 0].anchor is None


async def test_positions_at_the_start_are_used_for_one_survey() -> None:
    servers = pretended(p0=20, p1=5)
    anchors = Anchors(servers.admin, options())
    await anchors.begin()
    servers.logs["orders", 0].anchor = None
    assert [(await anchors.survey())["orders", 0].anchor for _ in range(2)] == [20, None]


async def test_an_anchor_that_is_set_back_is_requested_again() -> None:
    servers = pretended(p0=44, p1=5)
    anchors = Anchors(servers.admin, options())
    await anchors.survey(quick=True)
    await anchors.set_back(("orders", 0), 20)
    assert (await anchors.survey(quick=True))["orders", 0].anchor == servers.logs["orders", 0].anchor == 20


async def test_another_query_on_the_same_channel_is_noticed() -> None:
    servers = pretended(p0=20, p1=5)
    mine, other = Anchors(servers.admin, options()), Anchors(servers.admin, options())
    await mine.survey()
    await other.survey()
    await mine.advance({("orders", 0): 30})
    assert (await mine.survey())["orders", 0].anchor == 30
    with pytest.raises(InvalidState, match="moved the anchor channel spark from 20 to 30"):
        await other.survey()


async def test_a_survey_reports_partitions_without_an_anchor() -> None:
    servers = pretended(p0=20)
    assert await Anchors(servers.admin, options()).survey() == {
        ("orders", 0): PartitionState(10, 50, 20),
        ("orders", 1): PartitionState(0, 30, None),
    }


async def test_a_latest_start_that_is_ignored_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It may be the restart of a query that failed in its first batch: the latest message was another one then."""
    servers = pretended(p0=20, p1=5)
    await Anchors(servers.admin, options()).begin()
    assert caplog.records == []
    assert await Anchors(servers.admin, options(startingOffsets="latest")).begin() == {
        ("orders", 0): 20,
        ("orders", 1): 5,
    }
    (record,) = caplog.records
    assert "option startingOffsets is ignored: the channel spark exists at 2 partitions" in record.getMessage()


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_a_start_that_is_used_is_not_logged_when_spark_asks_again(
    start: str, caplog: pytest.LogCaptureFixture
) -> None:
    anchors = Anchors(pretended().admin, options(startingOffsets=start))
    assert await anchors.begin() == await anchors.begin()
    assert caplog.records == []


async def test_a_time_for_each_partition() -> None:
    servers = pretended()
    servers.times = {1000: 15, 2000: 7}
    times = '{"orders": {"0": 1000, "1": 2000}}'
    begun = await Anchors(servers.admin, options(startingOffsetsByTimestamp=times)).begin()
    assert begun == {("orders", 0): 15, ("orders", 1): 7}
    servers = pretended()
    servers.times = {1000: 15, 2000: 30}
    strict = options(startingOffsetsByTimestamp=times, startingOffsetsByTimestampStrategy="error")
    with pytest.raises(InvalidInput, match=r"no message was published since startingOffsetsByTimestamp=2000 .*latest"):
        await Anchors(servers.admin, strict).begin()
    with pytest.raises(InvalidSetting, match="no time for this partition"):
        await Anchors(servers.admin, options(startingOffsetsByTimestamp='{"orders": {"0": 1000}}')).begin()


async def test_many_anchors_are_requested_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.spark.read.anchor._FEW", 2)
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", 0.0)
    servers = FakeAdmin({("orders", partition): Log(0, 5, anchor=0) for partition in range(2)})
    asked: list[int] = []
    anchor_count = FakeAdmin.anchor_count

    async def count(admin: FakeAdmin, topic: str, partition: int, *given: Any) -> int | None:
        asked.append(partition)
        return await anchor_count(admin, topic, partition, *given)

    monkeypatch.setattr(FakeAdmin, "anchor_count", count)
    few = Anchors(servers.admin, options())
    await few.survey()
    await few.survey(quick=True)
    assert asked == [0, 1, 0, 1]
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", 20.0)
    monkeypatch.setattr("nsqext.spark.read.anchor._FEW", 0.001)
    asked.clear()
    await few.survey(quick=True)
    assert asked == []
    await few.survey()
    assert asked == [0, 1], "a complete survey requests all"
