"""Merging: working leaders are kept, the order of answers does not matter, a refusal outweighs repeated answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import astuple, frozen
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import LookupFailed, LookupUnreachable, PartitionUnavailable, TopicNotFound
from nsqext.lookup.leaders import Leader, leader_of
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger, failure
from nsqext.types import Address, TopicMeta
from tests.support.fake_lookupd import failed, listing, tcp, unknown

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


def merged(table: PartitionMapMerger, answers: list[LookupAnswer]) -> PartitionMapDiff:
    """Merge the answers of a round; return the changes."""
    before = table.current
    table.merge(answers)
    return diff(before, table.current)


def table_of(*rounds: list[LookupAnswer]) -> PartitionMapMerger:
    """Return a merger after these rounds."""
    table = PartitionMapMerger("orders")
    for answers in rounds:
        table.merge(answers)
    return table


def leaders(table: PartitionMapMerger) -> dict[int, str]:
    """Return the leaders' names."""
    return {partition: address.host for partition, address in table.current.leaders.items()}


def test_an_empty_map() -> None:
    view = PartitionMapMerger("orders", "r").current
    assert (view.topic, view.access, view.version, view.partition_num) == ("orders", "r", 0, 0)
    assert not view.leaders
    assert not view.nodes
    assert not view.complete


def test_answers_are_merged_by_partition() -> None:
    table = table_of([listing("a", {0: "n1", 1: "n2"}, num=4), listing("b", {3: "n1", 2: "n3"}, num=4)])
    view = table.current
    assert list(view.leaders.items()) == [(0, tcp("n1")), (1, tcp("n2")), (2, tcp("n3")), (3, tcp("n1"))]
    assert view.complete
    assert view.version == 1
    assert view.http[tcp("n3")] == Address("n3", 4151)


def test_a_partial_answer_is_known_by_partition_num_and_removes_nothing() -> None:
    table = table_of([listing("a", {0: "n1", 1: "n2"}, num=2)])
    change = merged(table, [listing("a", {1: "n2"}, num=2)])
    assert leaders(table) == {0: "n1", 1: "n2"}
    assert table.current.unlisted == {0}
    assert not change
    assert table_of([listing("a", {1: "n2"}, num=2)]).current.complete is False


def test_a_leaderless_answer_removes_nothing() -> None:
    """The redesigned server sends this response to producers while a leader is lost."""
    table = table_of([listing("a", {0: "n1", 1: "n2"}, num=2)], [listing("a", {}, num=2)])
    assert leaders(table) == {0: "n1", 1: "n2"}
    assert table.current.unlisted == {0, 1}
    table.merge([listing("a", {0: "n3", 1: "n2"}, num=2)])
    assert leaders(table) == {0: "n3", 1: "n2"}
    assert table.current.unlisted == frozenset()


@pytest.mark.parametrize("answers", [[], [failed("a")], [unknown("a"), failed("b")], [unknown("a"), unknown("b")]])
def test_failed_rounds_change_nothing(answers: list[LookupAnswer]) -> None:
    table = table_of([listing("a", {0: "n1"}, num=1, nodes=["o1"])])
    before = table.current
    assert not merged(table, answers)
    assert table.current is before


def test_a_moved_leader_is_followed() -> None:
    table = table_of([listing("a", {0: "n1", 1: "n2"}, num=2)])
    change = merged(table, [listing("a", {0: "n3", 1: "n2"}, num=2)])
    assert (change.added, change.moved, change.gone) == (frozenset(), frozenset({0}), frozenset())
    assert table.current.version == 2


def test_more_partitions_are_added() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1)])
    change = merged(table, [listing("a", {0: "n1", 1: "n2"}, num=2)])
    assert (change.added, change.moved, change.meta_changed) == (frozenset({1}), frozenset(), True)
    assert table.current.partition_num == 2


def test_partitions_are_removed_when_the_topic_has_fewer() -> None:
    table = table_of([listing("a", {0: "n1", 1: "n2", 2: "n3"}, num=3)])
    change = merged(table, [listing("a", {0: "n1"}, num=2)])
    assert change.gone == {2}
    assert leaders(table) == {0: "n1", 1: "n2"}


def test_the_same_answers_again_are_no_change() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1)])
    before = table.current
    assert not merged(table, [listing("a", {0: "n1"}, num=1)])
    assert table.current is before


def test_only_the_lookup_nodes_that_answered_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.lookup.partition_map.MAX_SOURCES", 2)
    table = PartitionMapMerger("orders", "w")
    for number in (1, 2, 3, 1):
        merged(table, [listing(f"l{number}", {0: "n1"}, num=1)])
    assert set(table._sources) == {Address("l1", 4161), Address("l3", 4161)}


def test_partitions_of_nodes_that_are_left_out_are_led() -> None:
    found = PartitionMap("orders", "w", filtered=((None, Address("n1", 4150)), (0, Address("n2", 4150))))
    assert found.led == {0}


def test_lookup_nodes_that_list_the_same_nodes_share_the_list() -> None:
    table = table_of([listing(source, nodes=("n1", "n2")) for source in "abc"])
    table.merge([listing("a", nodes=("n1", "n3"))])
    assert table.current.nodes == (tcp("n1"), tcp("n3"))  # "a" removed n2, so b and c do not keep it


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


def test_the_higher_epoch_is_preferred() -> None:
    for answers in ([("a", "n1", 3), ("b", "n2", 4)], [("a", "n2", 4), ("b", "n1", 3)]):
        table = table_of([listing(source, {0: name}, num=1, epoch=epoch) for source, name, epoch in answers])
        assert leaders(table) == {0: "n2"}


def test_a_lower_epoch_does_not_win_because_the_higher_one_is_silent() -> None:
    agree = [listing("a", {0: "n1"}, num=1, epoch=3), listing("b", {0: "n2"}, num=1, epoch=4)]
    table = table_of(agree, [listing("a", {0: "n1"}, num=1, epoch=3), failed("b")])
    assert leaders(table) == {0: "n2"}


def test_a_lower_epoch_with_a_change_is_followed_if_the_higher_one_is_silent() -> None:
    table = table_of(
        [listing("a", {0: "n1"}, num=1, epoch=3), listing("b", {0: "n2"}, num=1, epoch=4)],
        [listing("a", {0: "n3"}, num=1, epoch=3), failed("b")],
    )
    assert leaders(table) == {0: "n3"}


def test_a_new_epoch_is_preferred_to_a_recent_change() -> None:
    table = table_of(
        [listing("a", {0: "n1"}, num=1, epoch=3), listing("b", {0: "n2"}, num=1, epoch=4)],
        [listing("a", {0: "n1"}, num=1, epoch=5), failed("b")],
    )
    assert leaders(table) == {0: "n1"}


def test_of_equal_epochs_the_latest_change_is_preferred() -> None:
    old = [listing("a", {0: "n1"}, num=1), listing("b", {0: "n1"}, num=1), listing("c", {0: "n1"}, num=1)]
    moved = [listing("a", {0: "n1"}, num=1), listing("b", {0: "n1"}, num=1), listing("c", {0: "n2"}, num=1)]
    table = table_of(old, moved)
    assert leaders(table) == {0: "n2"}
    table.merge(moved)
    assert leaders(table) == {0: "n2"}, "repeated stale answers are not preferred"


def test_a_leader_of_an_equal_epoch_does_not_replace_the_known_one_that_is_not_named_this_time() -> None:
    for known, other in (("n1", "n2"), ("n2", "n1")):
        both = [listing("a", {0: known}, num=1, epoch=3), listing("c", {0: known}, num=1, epoch=3)]
        stale = listing("b", {0: other}, num=1, epoch=3)
        table = table_of([*both, stale], [failed("a"), failed("c"), stale])
        assert leaders(table) == {0: known}, "what the others said before is as new"


def test_of_equal_answers_the_majority_is_preferred() -> None:
    answers = [listing("a", {0: "n1"}, num=1), listing("b", {0: "n2"}, num=1), listing("c", {0: "n1"}, num=1)]
    assert leaders(table_of(answers)) == {0: "n1"}


def test_a_suspect_is_not_preferred_while_another_is_named() -> None:
    disagree = [listing("a", {0: "n2"}, num=1), listing("b", {0: "n1"}, num=1), listing("c", {0: "n2"}, num=1)]
    table = table_of(disagree)
    assert leaders(table) == {0: "n2"}
    table.suspect(0, tcp("n2"))
    assert merged(table, disagree).moved == {0}
    assert leaders(table) == {0: "n1"}
    table.merge(disagree)
    assert leaders(table) == {0: "n1"}


def test_a_suspect_counts_before_the_epoch() -> None:
    disagree = [listing("a", {0: "n1"}, num=1, epoch=9), listing("b", {0: "n2"}, num=1, epoch=1)]
    table = table_of(disagree)
    table.suspect(0, tcp("n1"))
    table.merge(disagree)
    assert leaders(table) == {0: "n2"}


def test_a_suspect_is_accepted_when_all_answers_list_it() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1)])
    table.suspect(0, tcp("n1"))
    table.merge([listing("a", {0: "n1"}, num=1)])
    assert leaders(table) == {0: "n1"}


def test_a_suspicion_that_excludes_every_leader_is_forgotten() -> None:
    newer, older = listing("a", {0: "n1"}, num=1, epoch=2), listing("b", {0: "n2"}, num=1, epoch=1)
    table = table_of([newer, older])
    table.suspect(0, tcp("n1"))
    table.merge([newer])
    table.merge([newer, older])
    assert leaders(table) == {0: "n1"}


def test_a_leader_that_returns_is_not_suspected_any_more() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1), listing("b", {0: "n2"}, num=1)])
    table.suspect(0, tcp("n1"))
    table.merge([listing("a", {0: "n2"}, num=1), listing("b", {0: "n2"}, num=1)])
    assert leaders(table) == {0: "n2"}
    table.merge([listing("a", {0: "n1"}, num=1, epoch=3), listing("b", {0: "n2"}, num=1)])
    assert leaders(table) == {0: "n1"}


def test_a_change_clears_the_suspicion() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1), listing("b", {0: "n1"}, num=1)])
    table.suspect(0, tcp("n1"))
    table.merge([listing("a", {0: "n2"}, num=1), listing("b", {0: "n1"}, num=1)])
    table.merge([listing("a", {0: "n1"}, num=1), listing("b", {0: "n1"}, num=1)])
    assert leaders(table) == {0: "n1"}


def test_nodes_of_the_original_nsq_are_the_union() -> None:
    table = table_of([listing("a", nodes=["o2", "o1"]), listing("b", nodes=["o3", "o1"])])
    assert table.current.nodes == (tcp("o1"), tcp("o2"), tcp("o3"))
    assert table.current.complete
    assert table.current.partition_num == 0


def test_a_node_leaves_when_no_lookup_node_names_it() -> None:
    table = table_of([listing("a", nodes=["o1", "o2"]), listing("b", nodes=["o1", "o2"])])
    assert merged(table, [listing("a", nodes=["o2"]), listing("b", nodes=["o1", "o2"])]).left == frozenset()
    change = merged(table, [listing("a", nodes=["o2"]), listing("b", nodes=["o2"])])
    assert (change.left, change.joined) == (frozenset({tcp("o1")}), frozenset())


def test_nodes_of_a_lookup_node_that_is_silent_stay() -> None:
    table = table_of(
        [listing("a", nodes=["o1"]), listing("b", nodes=["o2"])], [listing("a", nodes=["o1"]), failed("b")]
    )
    assert table.current.nodes == (tcp("o1"), tcp("o2"))


def test_a_node_that_a_working_lookup_node_dropped_is_not_kept_by_a_silent_one() -> None:
    table = table_of(
        [listing("a", nodes=["o1", "o2"]), listing("b", nodes=["o1", "o2"])], [listing("a", nodes=["o2"]), failed("b")]
    )
    assert table.current.nodes == (tcp("o2"),)


def test_an_empty_answer_of_the_original_nsq_removes_nothing() -> None:
    table = table_of([listing("a", nodes=["o1"])], [listing("a")])
    assert table.current.nodes == (tcp("o1"),)


def test_mixed_clusters_have_both() -> None:
    table = table_of([listing("a", {0: "n1", 1: "n2"}, num=2), listing("old", nodes=["o1"])])
    assert (leaders(table), table.current.nodes) == ({0: "n1", 1: "n2"}, (tcp("o1"),))
    assert table.current.http.keys() == {tcp("n1"), tcp("n2"), tcp("o1")}


def test_a_node_that_leads_a_partition_is_not_listed_without() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1), listing("old", nodes=["n1", "o1"])])
    assert table.current.nodes == (tcp("o1"),)


def test_a_topic_that_moves_to_the_redesigned_nsq() -> None:
    table = table_of([listing("a", nodes=["n1"])])
    change = merged(table, [listing("a", {0: "n1"}, num=1)])
    assert (change.added, change.left) == (frozenset({0}), frozenset({tcp("n1")}))


def test_meta_is_kept_when_an_answer_lacks_it() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1, extend=True)], [listing("a", {0: "n1"})])
    assert table.current.meta == TopicMeta(partition_num=1, replica=1, extend_support=True)


def test_an_upgrade_is_visible_when_the_first_node_reports_it() -> None:
    table = table_of([listing("a", {0: "n1"}, num=1), listing("b", {0: "n1"}, num=1, extend=True)])
    assert table.current.meta.extend_support


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
    table, named = PartitionMapMerger("orders"), dict[int, set[Address]]()
    for answers in rounds:
        before = table.current
        change = merged(table, answers)
        for partition, info in (item for answer in answers for item in answer.partitions.items()):
            named.setdefault(partition, set()).add(info.tcp)
        assert table.current.leaders.keys() == named.keys()
        assert not change.gone
        assert all(address in named[partition] for partition, address in table.current.leaders.items())
        assert not before.nodes or table.current.nodes or table.current.leaders
        assert list(table.current.leaders) == sorted(table.current.leaders)
        assert (table.current.version > before.version) == (table.current != before)


@given(rounds=rounds_of(st.integers(0, 3)), seed=st.integers())
def test_the_order_of_answers_does_not_matter(rounds: list[list[LookupAnswer]], seed: int) -> None:
    straight, shuffled = PartitionMapMerger("orders"), PartitionMapMerger("orders")
    for answers in rounds:
        straight.merge(answers)
        shuffled.merge(random.Random(seed).sample(answers, len(answers)))
        assert straight.current == shuffled.current


@given(rounds=rounds_of(st.just(0)), useless=st.lists(st.lists(st.sampled_from(USELESS), max_size=3), min_size=1))
def test_useless_rounds_move_nothing(rounds: list[list[LookupAnswer]], useless: list[list[LookupAnswer]]) -> None:
    table = table_of(*rounds)
    before = table.current
    for answers in useless:
        table.merge(answers)
        assert (table.current.leaders, table.current.nodes, table.current.http) == (
            before.leaders,
            before.nodes,
            before.http,
        )


@given(rounds=rounds_of(st.just(0)), truth=st.lists(st.sampled_from(NODES), min_size=NUM, max_size=NUM))
def test_the_map_equals_the_answers_when_all_agree(rounds: list[list[LookupAnswer]], truth: list[str]) -> None:
    table = table_of(*rounds)
    table.merge([listing(source, dict(enumerate(truth)), num=NUM) for source in SOURCES])
    assert leaders(table) == dict(enumerate(truth))
    assert table.current.complete
    assert not table.current.unlisted


@given(rounds=rounds_of(st.just(0)), truth=st.sampled_from(NODES), lie=st.sampled_from(NODES))
def test_evidence_finds_a_leader_that_one_lookup_node_lists(
    rounds: list[list[LookupAnswer]], truth: str, lie: str
) -> None:
    table = table_of(*rounds)
    for _ in range(len(NODES)):
        table.merge(
            [listing("a", {0: lie}, num=NUM), listing("b", {0: truth}, num=NUM), listing("c", {0: lie}, num=NUM)]
        )
        if leaders(table)[0] == truth:
            return
        table.suspect(0, table.current.leaders[0])
    raise AssertionError(f"stays at {leaders(table)[0]}")


def test_errors_are_summarized() -> None:
    down = LookupFailed("no answer", node="a:4161")
    unknown = TopicNotFound("unknown", node="b:4161", hint="create it")
    assert isinstance(failure([down, unknown], "orders"), TopicNotFound)
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
