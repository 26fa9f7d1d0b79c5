"""A fixed set of schedules; ``make simulate SEEDS=500`` runs more of them."""

from __future__ import annotations

from itertools import combinations
from unittest.mock import patch

import pytest
from attrs import evolve

from nsqext.client.consumer.subscriptions.key_buckets import KeyBuckets
from tests.campaigns.simulation import workload
from tests.campaigns.simulation.__main__ import measure, run_one, run_plan, text_of
from tests.campaigns.simulation.compare import SIZES, run_simulated
from tests.campaigns.simulation.mutations import MUTATIONS
from tests.campaigns.simulation.plan import BANK, FEATURES, FLOW, JOINS, KEY_TAGS, SHARES, TRIPLE, Size, draw_plan


@pytest.mark.parametrize("seed", [3, 8, 11])
def test_a_short_schedule_violates_no_guarantee(seed: int) -> None:
    assert text_of(run_one(seed, size="short").error) == ""


def test_a_long_schedule_violates_no_guarantee() -> None:
    """In 18, eight kinds of faults occur."""
    assert text_of(run_one(18, size="long").error) == ""


def test_a_node_may_stop_between_a_publish_and_the_sync_of_its_file() -> None:
    """What 63,419 showed.

    What 50,039, 54,347, 70,281 and 800,179 showed has tests of its own in `tests/client/producer` and `test_found.py`.
    """
    assert text_of(run_one(63_419).error) == ""


@pytest.mark.parametrize("seed", [1_036_134])
def test_a_schedule_ends_when_every_copy_of_a_message_was_handled(seed: int) -> None:
    """Nothing waited for requeues with a delay, or for a second copy on a half-open connection."""
    assert text_of(run_plan(draw_plan(seed, features=())).error) == ""


def test_a_schedule_ends_when_all_messages_are_handled_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,041,341 publishes to an ordered partition, which delivers eight messages a second."""
    monkeypatch.setattr(workload, "DRAIN", 3.0)
    plan = draw_plan(1_041_341, features=())
    run = run_plan(evolve(plan, faults=plan.faults[:2]))
    assert text_of(run.error) == ""
    assert run.seconds > plan.seconds + plan.rest + 2 * 3.0


def test_a_request_to_pause_may_arrive_after_the_one_to_resume() -> None:
    """What seed 2000732 showed: the first request timed out on a slow link, and was read after its successors."""
    assert text_of(run_one(2_000_732, features=("batch_handler",)).error) == ""


def test_each_feature_changes_a_schedule_and_all_repeat_their_trace() -> None:
    traces = set[str]()
    for features in ((), *((feature,) for feature in FEATURES)):
        run = run_one(4, size="short", features=features)
        assert text_of(run.error) == "", features
        traces.add(run.trace)
    assert len(traces) == 1 + len(FEATURES)
    first, second = (run_one(4, size="short", features=FEATURES) for _ in range(2))
    assert (text_of(first.error), first.trace) == ("", second.trace)


def test_a_message_whose_answer_was_refused_fails_with_its_batch() -> None:
    """1,059,352 finished a message of a lost connection, and rejected the rest of its batch."""
    assert text_of(run_plan(draw_plan(1_059_352)).error) == ""


def test_a_seed_draws_the_same_schedule_each_time() -> None:
    assert draw_plan(5) == draw_plan(5)
    forwards, backwards = ([draw_plan(seed) for seed in seeds] for seeds in (range(300), reversed(range(300))))
    assert forwards == backwards[::-1], "drawing one changed another one"
    assert draw_plan(5, faults=()).faults == ()
    assert {draw_plan(seed).size for seed in range(200)} == {"short", "long"}
    assert {feature for seed in range(300) for feature in draw_plan(seed).features} == {
        *FEATURES,
        TRIPLE,
        KEY_TAGS,
        JOINS,
        BANK,
        FLOW,
        *SHARES,
    }
    assert draw_plan(5, features=()).features == ()


@pytest.mark.parametrize("size", ["short", "long"])
def test_faults_of_three_kinds_are_drawn_for_the_same_time(size: Size) -> None:
    for seed in range(50):
        plan = draw_plan(seed, size, features=[TRIPLE])
        together = [
            chosen
            for chosen in combinations(plan.faults, 3)
            if len({fault.kind for fault in chosen}) == 3
            and max(fault.at for fault in chosen) < min(fault.at + fault.seconds for fault in chosen)
        ]
        assert together
        assert plan == evolve(draw_plan(seed, size, features=()), faults=plan.faults, features=(TRIPLE,))


@pytest.mark.parametrize(
    ("name", "seed", "checker"),
    [
        ("a message whose handler raised is finished", 1, "lost"),
        ("a reset connection raises in the event loop", 8, "no event loop"),
        ("messages of a key go to any lane", 3, "broken_promises"),
    ],
)
def test_a_bug_that_is_put_in_is_found_in_a_short_schedule(name: str, seed: int, checker: str) -> None:
    assert checker in measure(seed, name, "short").error


@pytest.mark.parametrize(
    ("name", "seed"), [("the files of channels are not synced", 128), ("files with fsync=interval are never synced", 1)]
)
def test_what_a_loss_of_power_undoes_is_found(name: str, seed: int) -> None:
    assert measure(seed, name).error


def test_there_are_twenty_mutations() -> None:
    assert len(MUTATIONS) >= 20


def test_a_schedule_as_large_as_one_of_chaos_violates_no_guarantee() -> None:
    """``python -m tests.campaigns.simulation.compare`` measures them."""
    cost = run_simulated(2, SIZES[0], 6)
    assert 40 < cost.operations < 160  # 80 in tests/campaigns/chaos


@pytest.mark.parametrize("seed", [8, 35])
def test_keys_that_are_shared_by_tags_keep_their_order(seed: int) -> None:
    assert text_of(run_one(seed, features=("key_tags",)).error) == ""


def test_a_bucket_with_two_owners_is_found() -> None:
    """Consumers that do not look before they request messages share buckets."""

    async def claim_all(self: KeyBuckets, tag: str) -> bool:
        return True

    with patch.object(KeyBuckets, "_is_alone", claim_all):
        assert "keyed" in text_of(run_one(1, features=("key_tags",)).error)


@pytest.mark.parametrize("features", [("joins",), ("joins", "key_tags")], ids=["command", "tags"])
def test_keys_have_one_owner_while_consumers_join_and_leave(features: tuple[str, ...]) -> None:
    assert text_of(run_one(2, features=features).error) == ""


def test_a_bucket_that_is_released_too_early_is_found() -> None:
    """With seed 2, two consumers handle messages of a key at once."""
    name = "a bucket of keys is released before its messages are answered"
    assert "two_owners_of_a_key" in measure(2, name, features=("joins", "key_tags")).error


@pytest.mark.parametrize("feature", SHARES)
def test_filters_long_delays_and_separated_followers_violate_no_guarantee(feature: str) -> None:
    assert text_of(run_one(2, features=[feature]).error) == ""


@pytest.mark.parametrize(
    ("name", "seed", "checker"),
    [
        ("nodes ignore header filters", 9, "wrong_header"),
        ("a message in twenty does not pass its header filter", 28, "lost"),
        ("long delays end too early", 2, "redelivered_early"),
        ("a follower catches up without the last record", 20, "receipts"),
    ],
)
def test_a_bug_of_filters_long_delays_or_separated_followers_is_found(name: str, seed: int, checker: str) -> None:
    assert checker in measure(seed, name, features=MUTATIONS[name].features).error


def test_every_transfer_of_the_bank_is_applied_once() -> None:
    assert text_of(run_one(1, features=[BANK]).error) == ""


def test_a_transfer_that_is_applied_twice_is_found() -> None:
    """``make mutate`` puts in the other bugs of outbox and inbox."""
    assert "not applied once" in measure(1, "a relay sends no identities", features=[BANK]).error


def test_a_consumer_of_many_connections_has_no_more_in_flight_than_allowed_and_no_connection_waits_too_long() -> None:
    """In 129 a backoff asked only the connection that had received last, which had no message."""
    assert text_of(run_one(129, features=[FLOW]).error) == ""


@pytest.mark.parametrize(
    ("name", "seed", "rule"),
    [
        ("what a connection has in flight is given to another one", 34, "bound"),
        ("a turn that has ended is not given to the connection that waits longest", 23, "turns"),
    ],
)
def test_a_bug_of_the_bound_or_of_turns_is_found(name: str, seed: int, rule: str) -> None:
    assert f"{rule}: " in measure(seed, name, features=[FLOW]).error
