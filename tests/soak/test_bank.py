"""A few seconds of the bank: every kind of kill happens, and nothing is lost or applied twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.bank import run_bank


@pytest.mark.timeout(240)
def test_every_transfer_is_applied_once_while_everything_is_killed(tmp_path: Path) -> None:
    result = run_bank("embedded", seconds=6.0, every=1.5, seed=3, folder=tmp_path)
    assert result.faults == []
    assert {"worker", "relay", "backend", "leader"} <= {kind for kind, count in result.kills.items() if count}
    assert result.transfers > 10
    assert result.sums > 2
