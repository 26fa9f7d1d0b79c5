"""A fixed set of schedules; ``make simulate SEEDS=500`` runs more of them."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import measure, run_one, text_of
from tests.simulation.mutations import MUTATIONS

SEEDS = (2, 3, 28)
"""2 and 28 kill and restart nodes while clients are partitioned from others."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_violates_no_guarantee(seed: int) -> None:
    assert text_of(run_one(seed).error) == ""


@pytest.mark.parametrize(
    "name",
    [
        "a message whose handler raised is finished",
        "a reset connection raises in the event loop",
    ],
)
def test_a_bug_that_is_put_in_is_found_within_three_seeds(name: str) -> None:
    assert any(measure(seed, name).error for seed in range(1, 4))


def test_a_rename_that_a_loss_of_power_undoes_is_found() -> None:
    """What seed 9 found: the folder of a replaced file was not synced, and all channels of a partition were lost."""
    assert measure(9, "the files of channels are not synced").error


def test_there_are_twenty_mutations() -> None:
    assert len(MUTATIONS) >= 20
