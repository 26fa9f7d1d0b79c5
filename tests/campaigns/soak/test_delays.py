"""A short attack on delayed messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.soak.delays import GENERATIONS, Attack, attack


@pytest.mark.parametrize("generation", GENERATIONS)
def test_no_message_is_early_lost_or_delivered_after_its_cancellation(generation: str, tmp_path: Path) -> None:
    found = attack(Attack(generation, messages=60, seconds=1.0, seed=3, margin=-1.5), tmp_path)
    assert (found.early, found.lost, found.after_cancel) == (0, 0, 0), found.late
    assert found.events["clock set"] > 1
    assert found.delivered > 30
