"""A short run of tasks on the embedded cluster in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from tests.campaigns.soak.tasks import FAULTS, FRAMEWORKS, run_tasks

_FAULTS = [fault for fault in FAULTS if fault in (("child_kill", ""), ("kill", "n1"), ("lookup_kill", ""))]
_COMMAND = ["taskiq", "worker", "tests.campaigns.soak.taskiq_tasks:broker", "--workers", "1", "--max-async-tasks", "4"]


@pytest.mark.timeout(180)
def test_every_task_runs_while_a_process_nsqd_and_lookup_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make soak-tasks` runs two workers with two processes each, kills more of them, and runs Celery's tasks too."""
    framework = evolve(FRAMEWORKS["taskiq"], command=lambda _: _COMMAND)
    settings = {"workers": ["one"], "injected": _FAULTS, "environment": monkeypatch.setenv}
    result = run_tasks(framework, "embedded", 120, 0.05, folder=tmp_path, **settings)  # type: ignore[arg-type]
    assert result.faults == ["child_kill", "kill", "lookup_kill"]
    assert (result.missing, result.waiting) == ([], 0)
