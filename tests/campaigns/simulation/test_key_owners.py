"""Keys that consumers share while they are killed, with few messages; `key_owners.py` runs 20,000."""

from __future__ import annotations

from math import inf

import pytest

from tests.campaigns.simulation.key_owners import Handled, KeyOwners, run_key_owners


@pytest.mark.parametrize("by_tags", [False, True], ids=["command", "tags"])
@pytest.mark.parametrize("fault", ["kill", "cut", "leader"])
def test_a_key_has_one_owner_and_keeps_its_order(fault: str, *, by_tags: bool) -> None:
    owners = KeyOwners(fault, by_tags, messages=300, keys=25, seconds=12.0, tags=6)
    run = run_key_owners(owners, 1)
    assert run.error is None, run.error
    assert {(call.key, call.number) for call in owners.handled} == {
        (f"k{key}", number) for key in range(25) for number in range(12)
    }


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (Handled(1, "k", 1, 1.5, 1.8, returned=True), "k is at the consumers 0 and 1 at 1.500 s"),
        (Handled(0, "k", 1, 1.5, 1.8, returned=True), None),
        (Handled(1, "k", 1, 2.5, 2.8, returned=True), None),
        (Handled(1, "k", -1, 2.5, inf), "k is handled in the order [0, -1]"),
    ],
)
def test_two_owners_and_wrong_order_are_found(second: Handled, found: str | None) -> None:
    owners = KeyOwners("kill", True, messages=2, keys=1)
    owners.handled = [Handled(0, "k", 0, 1.0, 2.0, returned=True), second]
    assert next(owners.violations(), None) == found
