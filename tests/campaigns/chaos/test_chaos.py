"""No message is lost or reordered and nothing leaks under faults: a short set of schedules.

``make chaos`` runs two hundred.
"""

from __future__ import annotations

import pytest

from nsqext.errors import DeliveryUnknown, PublishFailed
from tests.campaigns.chaos.__main__ import run_one
from tests.campaigns.chaos.ledger import Ledger
from tests.campaigns.chaos.plan import KINDS, make_plan

# together they contain every kind of fault, and each event loop has one that retries and one that raises
SEEDS = {"asyncio": (6, 12), "asyncio+uvloop": (1, 28), "trio": (11, 29)}


@pytest.mark.parametrize(("backend", "seed"), [(backend, seed) for backend, seeds in SEEDS.items() for seed in seeds])
def test_a_schedule(backend: str, seed: int) -> None:
    outcome, _ = run_one(seed, backend)
    assert outcome.violations == []
    assert outcome.published > 20


def test_plans_follow_their_seed_and_contain_every_fault() -> None:
    plans = [make_plan(seed) for seed in range(1, 201)]
    assert [(step.at, step.name) for step in plans[6].steps] == [(step.at, step.name) for step in make_plan(7).steps]
    assert min(plan.faults for plan in plans) >= 4
    text = " ".join(step.name for plan in plans for step in plan.steps)
    words = ("kill the leader", "move", "cut", "delay", "freeze", "refuses", "answers", "stale", "empty", "takes 0.")
    assert all(word in text for word in (*words, "kill l1", "kill l2"))
    assert len(KINDS) == len(words) + 1


class Owner:
    """Stands for a subscription."""


class Delivered:
    """Stands for a message whose handler returned."""

    def __init__(self, body: bytes, number: int, owner: Owner, attempts: int = 1) -> None:
        self.body, self.id, self.owner, self.attempts = body, number.to_bytes(16, "big"), owner, attempts


def published(ledger: Ledger, topic: str, count: int) -> list[bytes]:
    """Record acknowledged publishes of one key."""
    bodies = []
    for number in range(count):
        body, entry = ledger.begin(topic, "k", number, None)
        entry.ended = entry.began + 1
        bodies.append(body)
    return bodies


def consume(ledger: Ledger, *messages: Delivered) -> None:
    for message in messages:
        ledger.consumed(message)  # type: ignore[arg-type]


def test_the_ledger_finds_lost_messages() -> None:
    ledger, owner = Ledger("retry"), Owner()
    first, second = published(ledger, "plain", 2)
    consume(ledger, Delivered(second, 2, owner))
    assert ledger.missing == 1
    found = ledger.outcome().violations
    assert [line.partition(",")[0] for line in found] == [f"lost: {first.decode()}"]


def test_the_ledger_finds_reordered_messages() -> None:
    ledger, owner = Ledger("retry"), Owner()
    first, second, third = published(ledger, "ordered", 3)
    consume(ledger, Delivered(first, 1, owner), Delivered(third, 3, owner), Delivered(second, 2, owner))
    assert ledger.outcome().violations == ["reordered: ordered/k: 1 after 2"]


def test_a_redelivery_is_not_out_of_order() -> None:
    ledger, owner, other = Ledger("raise"), Owner(), Owner()
    first, second = published(ledger, "ordered", 2)
    consume(
        ledger, *(Delivered(body, number, own) for own in (owner, other) for number, body in enumerate((first, second)))
    )
    outcome = ledger.outcome()
    assert outcome.violations == []
    assert (outcome.redelivered, outcome.twice_stored) == (2, 0)


def test_a_subscription_is_not_taken_for_an_earlier_one_whose_memory_it_has() -> None:
    ledger = Ledger("retry")
    (body,) = published(ledger, "plain", 1)
    for _ in range(20):
        consume(ledger, Delivered(body, 1, Owner()))
    assert ledger.outcome().violations == []


def test_the_ledger_finds_unexplained_duplicates() -> None:
    ledger, owner = Ledger("raise"), Owner()
    first, second = published(ledger, "plain", 2)
    consume(ledger, Delivered(first, 1, owner), Delivered(first, 1, owner), Delivered(second, 2, owner))
    consume(ledger, Delivered(second, 3, owner))
    found = ledger.outcome().violations
    assert [text.partition(" ")[0] for text in found] == ["unexplained:", "unexplained:"]


def test_the_ledger_finds_failed_publishes_that_were_stored() -> None:
    ledger, owner = Ledger("retry"), Owner()
    failed, unknown = published(ledger, "plain", 2)
    ledger.entries[failed].error = PublishFailed("not stored")
    ledger.entries[unknown].error = DeliveryUnknown("connection lost")
    consume(ledger, Delivered(failed, 1, owner), Delivered(unknown, 2, owner))
    outcome = ledger.outcome()
    assert [text.partition(":")[0] for text in outcome.violations] == ["stored_after_failure"]
    assert (outcome.failed, outcome.unknown) == (1, 1)
