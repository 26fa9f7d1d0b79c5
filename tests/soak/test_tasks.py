"""A short run of tasks on the embedded cluster in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.tasks import FAULTS, FRAMEWORKS, run_tasks


@pytest.mark.timeout(180)
def test_every_task_runs_while_workers_nsqd_and_lookup_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make soak-tasks` runs those of Celery too."""
    result = run_tasks(FRAMEWORKS["taskiq"], "embedded", 400, 0.05, folder=tmp_path, environment=monkeypatch.setenv)
    assert result.faults == [kind for kind, _ in FAULTS]
    assert (result.missing, result.waiting) == ([], 0)
