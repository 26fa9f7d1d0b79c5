"""Merging: working leaders are kept, the order of answers does not matter, a refusal outweighs repeated answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import astuple, frozen
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import (
    LookupFailed,
    LookupUnreachable,
    NotLookupd,
    PartitionUnavailable,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.lookup.leaders import Leader, leader_of
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger, failure
from nsqext.types import Address, TopicMeta
from tests.support.fake_lookupd import failed, listing, tcp, unknown
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.lookup.responses import LookupAnswer


@frozen
class PartitionMapDiff:
    """Changes from one map to the next.

    Attributes:
        added: partitions that had no leader before.
        moved: partitions with another leader.
        gone: removed partitions.
        joined: added nodes without partitions.
        left: removed nodes without partitions.
        meta_changed: whether the topic's meta changed.
    """

    added: frozenset[int]
    moved: frozenset[int]
    gone: frozenset[int]
    joined: frozenset[Address]
    left: frozenset[Address]
    meta_changed: bool

    def __bool__(self) -> bool:
        return any(astuple(self, recurse=False))


def diff(old: PartitionMap, new: PartitionMap) -> PartitionMapDiff:
    """Return the changes from ``old`` to ``new``."""
    return PartitionMapDiff(
        added=frozenset(new.leaders.keys() - old.leaders.keys()),
        moved=frozenset(key for key in new.leaders.keys() & old.leaders.keys() if new.leaders[key] != old.leaders[key]),
        gone=frozenset(old.leaders.keys() - new.leaders.keys()),
        joined=frozenset(new.nodes) - frozenset(old.nodes),
        left=frozenset(old.nodes) - frozenset(new.nodes),
        meta_changed=old.meta != new.meta,
    )


def merged(merger: PartitionMapMerger, answers: list[LookupAnswer]) -> PartitionMapDiff:
    """Merge the answers of a round; return the changes."""
    before = merger.current
    merger.merge(answers)
    return diff(before, merger.current)


def table_of(*rounds: list[LookupAnswer]) -> PartitionMapMerger:
    """Return a merger after these rounds."""
    merger = PartitionMapMerger("orders")
    for answers in rounds:
        merger.merge(answers)
    return merger


def leaders(merger: PartitionMapMerger) -> dict[int, str]:
    """Return the leaders' names."""
    return {partition: address.host for partition, address in merger.current.leaders.items()}


def test_an_empty_map() -> None:
    view = PartitionMapMerger("orders", "r").current
    assert (view.topic, view.access, view.version, view.partition_num) == ("orders", "r", 0, 0)
    assert not view.leaders
    assert not view.nodes
    assert not view.complete


def test_answers_are_merged_by_partition() -> None:
    merger = table_of([listing("a", {0: "n1", 1: "n2"}, num=4), listing("b", {3: "n1", 2: "n3"}, num=4)])
    view = merger.current
    assert list(view.leaders.items()) == [(0, tcp("n1")), (1, tcp("n2")), (2, tcp("n3")), (3, tcp("n1"))]
    assert view.complete
    assert view.version == 1
    assert view.http[tcp("n3")] == Address("n3", 4151)


def test_a_partial_answer_is_known_by_partition_num_and_removes_nothing() -> None:
    merger = table_of([listing("a", {0: "n1", 1: "n2"}, num=2)])
    change = merged(merger, [listing("a", {1: "n2"}, num=2)])
    assert leaders(merger) == {0: "n1", 1: "n2"}
    assert merger.current.unlisted == {0}
    assert not change
    assert table_of([listing("a", {1: "n2"}, num=2)]).current.complete is False


def test_a_leaderless_answer_removes_nothing() -> None:
    """The redesigned server sends this response to producers while a leader is lost."""
    merger = table_of([listing("a", {0: "n1", 1: "n2"}, num=2)], [listing("a", {}, num=2)])
    assert leaders(merger) == {0: "n1", 1: "n2"}
    assert merger.current.unlisted == {0, 1}
    merger.merge([listing("a", {0: "n3", 1: "n2"}, num=2)])
    assert leaders(merger) == {0: "n3", 1: "n2"}
    assert merger.current.unlisted == frozenset()


@pytest.mark.parametrize("answers", [[], [failed("a")], [unknown("a"), failed("b")], [unknown("a"), unknown("b")]])
def test_failed_rounds_change_nothing(answers: list[LookupAnswer]) -> None:
    merger = table_of([listing("a", {0: "n1"}, num=1, nodes=["o1"])])
    before = merger.current
    assert not merged(merger, answers)
    assert merger.current is before


def test_a_moved_leader_is_followed() -> None:
    merger = table_of([listing("a", {0: "n1", 1: "n2"}, num=2)])
    change = merged(merger, [listing("a", {0: "n3", 1: "n2"}, num=2)])
    assert (change.added, change.moved, change.gone) == (frozenset(), frozenset({0}), frozenset())
    assert merger.current.version == 2


def test_more_partitions_are_added() -> None:
    merger = table_of([listing("a", {0: "n1"}, num=1)])
    change = merged(merger, [listing("a", {0: "n1", 1: "n2"}, num=2)])
    assert (change.added, change.moved, change.meta_changed) == (frozenset({1}), frozenset(), True)
    assert merger.current.partition_num == 2


def test_partitions_are_removed_when_the_topic_has_fewer() -> None:
    merger = table_of([listing("a", {0: "n1", 1: "n2", 2: "n3"}, num=3)])
    change = merged(merger, [listing("a", {0: "n1"}, num=2)])
    assert change.gone == {2}
    assert leaders(merger) == {0: "n1", 1: "n2"}


def test_an_added_partition_has_its_leader_before_lookup_counts_it() -> None:
    assert leaders(table_of([listing("a", {0: "n1", 1: "n2"}, num=1)])) == {0: "n1", 1: "n2"}


def test_the_same_answers_again_are_no_change() -> None:
    merger = table_of([listing("a", {0: "n1"}, num=1)])
    before = merger.current
    assert not merged(merger, [listing("a", {0: "n1"}, num=1)])
    assert merger.current is before


def test_only_the_lookup_nodes_that_answered_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.lookup.partition_map.MAX_SOURCES", 2)
    merger = table_of(*([listing(f"l{number}", nodes=[f"o{number}"])] for number in (1, 2, 3, 1)))
    assert merger.current.nodes == (tcp("o1"), tcp("o3"))


def test_partitions_of_nodes_that_are_left_out_are_led() -> None:
    found = PartitionMap("orders", "w", filtered=((None, Address("n1", 4150)), (0, Address("n2", 4150))))
    assert found.led == {0}


@pytest.mark.parametrize(
    ("leaders", "http", "text"),
    [
        ({}, {}, "no leader"),
        ({0: tcp("n1")}, {}, "HTTP address"),
        ({0: tcp("n1")}, {tcp("n1"): Address("n1", 4151)}, None),
    ],
)
def test_a_leader_has_two_addresses(leaders: Any, http: Any, text: str | None) -> None:
    view = PartitionMap("orders", meta=TopicMeta(1), leaders=leaders, http=http)
    if text is None:
        assert leader_of(view, 0) == Leader(tcp("n1"), Address("n1", 4151))
        return
    with pytest.raises(PartitionUnavailable, match=text) as caught:
        leader_of(view, 0)
    assert (caught.value.topic, caught.value.partition) == ("orders", 0)


def one(source: str, name: str, epoch: int = 0) -> LookupAnswer:
    """Return the response of a lookup node in which a node leads the only partition."""
    return listing(source, {0: name}, num=1, epoch=epoch)


_DISAGREE = [one("a", "n1", 3), one("b", "n2", 4)]
_SAME = [one("a", "n1"), one("b", "n1"), one("c", "n1")]
_MOVED = [one("a", "n1"), one("b", "n1"), one("c", "n2")]


@table(
    ("rounds", "leader"),
    [
        pytest.param([_DISAGREE], "n2", id="the higher epoch"),
        pytest.param([[one("a", "n2", 4), one("b", "n1", 3)]], "n2", id="the higher epoch, in another order"),
        pytest.param([_DISAGREE, [one("a", "n1", 3), failed("b")]], "n2", id="a lower epoch, the higher one is silent"),
        pytest.param([_DISAGREE, [one("a", "n3", 3), failed("b")]], "n3", id="a lower epoch with a change"),
        pytest.param([_DISAGREE, [one("a", "n1", 5), failed("b")]], "n1", id="a new epoch before a recent change"),
        pytest.param(
            [[one("a", "n1", 3), one("b", "n1", 4)], [one("a", "n2", 3), one("b", "n1", 4)]],
            "n1",
            id="the higher epoch before a change at a lower one",
        ),
        pytest.param([_SAME, _MOVED], "n2", id="the latest change of equal epochs"),
        pytest.param([_SAME, _MOVED, _MOVED], "n2", id="repeated stale answers are not preferred"),
        *(
            pytest.param(
                [[one("a", known, 3), one("c", known, 3), one("b", other, 3)], [failed("a"), one("b", other, 3)]],
                known,
                id="what silent ones said before is as new",
            )
            for known, other in (("n1", "n2"), ("n2", "n1"))
        ),
        pytest.param([[one("a", "n1"), one("b", "n2"), one("c", "n1")]], "n1", id="the majority of equal answers"),
    ],
)
def test_which_leader_is_preferred(rounds: list[list[LookupAnswer]], leader: str) -> None:
    assert leaders(table_of(*rounds)) == {0: leader}


def test_a_suspect_is_not_preferred_while_another_is_named() -> None:
    disagree = [one("a", "n2"), one("b", "n1"), one("c", "n2")]
    merger = table_of(disagree)
    assert leaders(merger) == {0: "n2"}
    merger.suspect(0, tcp("n2"))
    assert merged(merger, disagree).moved == {0}
    merger.merge(disagree)
    assert leaders(merger) == {0: "n1"}


@table(
    ("before", "after", "found"),
    [
        pytest.param([one("a", "n1", 9), one("b", "n2", 1)], None, ["n2"], id="it counts before the epoch"),
        pytest.param([one("a", "n1")], None, ["n1"], id="it is accepted when all answers list it"),
        pytest.param(
            [one("a", "n1", 2), one("b", "n2", 1)],
            [[one("a", "n1", 2)], [one("a", "n1", 2), one("b", "n2", 1)]],
            ["n1", "n1"],
            id="it is forgotten when it excludes every leader",
        ),
        pytest.param(
            [one("a", "n1"), one("b", "n2")],
            [[one("a", "n2"), one("b", "n2")], [one("a", "n1", 3), one("b", "n2")]],
            ["n2", "n1"],
            id="it is forgotten when the leader returns",
        ),
        pytest.param(
            [one("a", "n1"), one("b", "n1")],
            [[one("a", "n2"), one("b", "n1")], [one("a", "n1"), one("b", "n1")]],
            ["n2", "n1"],
            id="it is forgotten with a change",
        ),
    ],
)
def test_how_long_the_first_leader_is_suspected(
    before: list[LookupAnswer], after: list[list[LookupAnswer]] | None, found: list[str]
) -> None:
    merger, seen = table_of(before), []
    merger.suspect(0, tcp("n1"))
    for answers in after or [before]:
        merger.merge(answers)
        seen.append(leaders(merger)[0])
    assert seen == found


_BOTH = [listing("a", nodes=["o1", "o2"]), listing("b", nodes=["o1", "o2"])]


@table(
    ("rounds", "nodes"),
    [
        pytest.param([[listing("a", nodes=["o2", "o1"]), listing("b", nodes=["o3", "o1"])]], "123", id="the union"),
        pytest.param(
            [[listing("a", nodes=["o1"]), listing("b", nodes=["o2"])], [listing("a", nodes=["o1"]), failed("b")]],
            "12",
            id="those of a silent lookup node stay",
        ),
        pytest.param([_BOTH, [listing("a", nodes=["o2"]), failed("b")]], "2", id="unless another dropped them"),
        pytest.param([_BOTH, [listing("a", nodes=["o1", "o3"])]], "13", id="whose list others share"),
        pytest.param([[listing("a", nodes=["o1"])], [listing("a")]], "1", id="an empty answer removes nothing"),
        pytest.param([[one("a", "o3"), listing("b", nodes=["o3", "o1"])]], "1", id="a leader is none of them"),
    ],
)
def test_which_nodes_have_no_partitions(rounds: list[list[LookupAnswer]], nodes: str) -> None:
    view = table_of(*rounds).current
    assert view.nodes == tuple(tcp(f"o{number}") for number in nodes)
    assert (view.complete, view.partition_num) == (True, len(view.leaders))


def test_a_node_leaves_when_no_lookup_node_names_it() -> None:
    merger = table_of([listing("a", nodes=["o1", "o2"]), listing("b", nodes=["o1", "o2"])])
    assert merged(merger, [listing("a", nodes=["o2"]), listing("b", nodes=["o1", "o2"])]).left == frozenset()
    change = merged(merger, [listing("a", nodes=["o2"]), listing("b", nodes=["o2"])])
    assert (change.left, change.joined) == (frozenset({tcp("o1")}), frozenset())


def test_mixed_clusters_have_both() -> None:
    merger = table_of([listing("a", {0: "n1", 1: "n2"}, num=2), listing("old", nodes=["o1"])])
    assert (leaders(merger), merger.current.nodes) == ({0: "n1", 1: "n2"}, (tcp("o1"),))
    assert merger.current.http.keys() == {tcp("n1"), tcp("n2"), tcp("o1")}


def test_a_topic_that_moves_to_the_redesigned_nsq() -> None:
    merger = table_of([listing("a", nodes=["n1"])])
    change = merged(merger, [listing("a", {0: "n1"}, num=1)])
    assert (change.added, change.left) == (frozenset({0}), frozenset({tcp("n1")}))


def test_meta_is_kept_when_an_answer_lacks_it() -> None:
    merger = table_of([listing("a", {0: "n1"}, num=1, extend=True)], [listing("a", {0: "n1"})])
    assert merger.current.meta == TopicMeta(partition_num=1, replica=1, extend_support=True)


_EXPANDED = [listing("a", {0: "n1", 1: "n2"}, num=2), listing("b", {0: "n1"}, num=1)]


@table(
    ("rounds", "count"),
    [
        pytest.param([[_EXPANDED[1]], _EXPANDED], 2, id="one node knows the added partition"),
        pytest.param([_EXPANDED, [_EXPANDED[1], failed("a")]], 2, id="and is silent in the next round"),
        pytest.param([_EXPANDED, [listing("a", {0: "n1"}, num=1)]], 1, id="a topic that was created again has fewer"),
        pytest.param([_EXPANDED, [failed("a"), listing("b", {0: "n1"}, num=1, epoch=1)]], 1, id="by a new epoch"),
    ],
)
def test_how_many_partitions_a_topic_has_while_lookup_nodes_disagree(
    rounds: list[list[LookupAnswer]], count: int
) -> None:
    view = table_of(*rounds).current
    assert (view.partition_num, len(view.leaders)) == (count, count)


def test_an_upgrade_is_visible_when_the_first_node_reports_it() -> None:
    merger = table_of([listing("a", {0: "n1"}, num=1), listing("b", {0: "n1"}, num=1, extend=True)])
    assert merger.current.meta.extend_support


# Properties

NODES = ["n1", "n2", "n3", "n4"]
SOURCES = ["a", "b", "c"]
NUM = 3

leader_maps = st.dictionaries(st.integers(0, NUM - 1), st.sampled_from(NODES))
old_nodes = st.lists(st.sampled_from(["o1", "o2"]), unique=True)


def answers_of(source: str, epochs: st.SearchStrategy[int]) -> st.SearchStrategy[LookupAnswer]:
    """Return answers of one lookup node: listing, partial, empty, unknown, failed."""
    full = st.fixed_dictionaries({partition: st.sampled_from(NODES) for partition in range(NUM)})
    return st.one_of(
        st.builds(lambda found, epoch: listing(source, found, num=NUM, epoch=epoch), full | leader_maps, epochs),
        st.builds(lambda nodes: listing(source, nodes=nodes), old_nodes),
        st.sampled_from([failed(source), unknown(source), listing(source, {}, num=NUM)]),
    )


def rounds_of(epochs: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[LookupAnswer]]]:
    """Return rounds with answers of some lookup nodes each."""
    one = st.tuples(*(st.none() | answers_of(source, epochs) for source in SOURCES))
    return st.lists(one.map(lambda found: [answer for answer in found if answer is not None]), max_size=6)


USELESS = [answer for source in SOURCES for answer in (failed(source), unknown(source), listing(source, {}, num=NUM))]
"""Answers without partitions and nodes."""


@given(rounds=rounds_of(st.integers(0, 3)))
def test_a_partition_that_was_known_is_never_lost(rounds: list[list[LookupAnswer]]) -> None:
    merger, named = PartitionMapMerger("orders"), dict[int, set[Address]]()
    for answers in rounds:
        before = merger.current
        change = merged(merger, answers)
        for partition, info in (item for answer in answers for item in answer.partitions.items()):
            named.setdefault(partition, set()).add(info.tcp)
        assert merger.current.leaders.keys() == named.keys()
        assert not change.gone
        assert all(address in named[partition] for partition, address in merger.current.leaders.items())
        assert not before.nodes or merger.current.nodes or merger.current.leaders
        assert list(merger.current.leaders) == sorted(merger.current.leaders)
        assert (merger.current.version > before.version) == (merger.current != before)


@given(rounds=rounds_of(st.integers(0, 3)), seed=st.integers())
def test_the_order_of_answers_does_not_matter(rounds: list[list[LookupAnswer]], seed: int) -> None:
    straight, shuffled = PartitionMapMerger("orders"), PartitionMapMerger("orders")
    for answers in rounds:
        straight.merge(answers)
        shuffled.merge(random.Random(seed).sample(answers, len(answers)))
        assert straight.current == shuffled.current


@given(rounds=rounds_of(st.just(0)), useless=st.lists(st.lists(st.sampled_from(USELESS), max_size=3), min_size=1))
def test_useless_rounds_move_nothing(rounds: list[list[LookupAnswer]], useless: list[list[LookupAnswer]]) -> None:
    merger = table_of(*rounds)
    before = merger.current
    for answers in useless:
        merger.merge(answers)
        assert (merger.current.leaders, merger.current.nodes, merger.current.http) == (
            before.leaders,
            before.nodes,
            before.http,
        )


@given(rounds=rounds_of(st.just(0)), truth=st.lists(st.sampled_from(NODES), min_size=NUM, max_size=NUM))
def test_the_map_equals_the_answers_when_all_agree(rounds: list[list[LookupAnswer]], truth: list[str]) -> None:
    merger = table_of(*rounds)
    merger.merge([listing(source, dict(enumerate(truth)), num=NUM) for source in SOURCES])
    assert leaders(merger) == dict(enumerate(truth))
    assert merger.current.complete
    assert not merger.current.unlisted


@given(rounds=rounds_of(st.just(0)), truth=st.sampled_from(NODES), lie=st.sampled_from(NODES))
def test_evidence_finds_a_leader_that_one_lookup_node_lists(
    rounds: list[list[LookupAnswer]], truth: str, lie: str
) -> None:
    merger = table_of(*rounds)
    for _ in range(len(NODES)):
        merger.merge(
            [listing("a", {0: lie}, num=NUM), listing("b", {0: truth}, num=NUM), listing("c", {0: lie}, num=NUM)]
        )
        if leaders(merger)[0] == truth:
            return
        merger.suspect(0, merger.current.leaders[0])
    raise AssertionError(f"stays at {leaders(merger)[0]}")


def test_errors_are_summarized() -> None:
    down = LookupFailed("no answer", node="a:4161")
    unknown = TopicNotFound("unknown", node="b:4161", hint="create it")
    assert isinstance(failure([down, unknown], "orders"), TopicNotFound)
    assert isinstance(failure([unknown, TopicNotReady("no channel")], "orders"), TopicNotReady)
    wrong, silent = NotLookupd("HTML"), LookupUnreachable("no answer")
    kinds = [type(failure(errors)) for errors in ([wrong, wrong], [silent, silent], [wrong, silent], [silent, wrong])]
    assert kinds == [NotLookupd, LookupUnreachable, LookupFailed, LookupFailed]
    both = failure([down, LookupFailed("HTML", node="c:4161")], "orders")
    assert isinstance(both, LookupFailed)
    assert both.__cause__ is down
    assert all(text in str(both) for text in ("a:4161", "c:4161", "HTML", "orders"))
    for count, end in ((4, "n3:4161)"), (5, "n4:4161)"), (6, "n4:4161); and 1 more"), (64, "n4:4161); and 59 more")):
        errors = [LookupFailed("no answer", node=f"n{number}:4161") for number in range(count)]
        assert failure(errors).message.endswith(end)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("no response: refused", "refused"), ("no response within 2 s", "not within 2 s"), ("busy", "busy")],
)
def test_the_error_of_all_lookup_nodes_says_once_that_there_was_no_response(reason: str, shown: str) -> None:
    error = failure([LookupUnreachable(reason, node="a:4161")])
    assert str(error) == f"no lookup node returned a usable response: {shown} (node a:4161)"
