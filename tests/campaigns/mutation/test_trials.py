"""Trials of bugs that need an interpreter of their own."""

from __future__ import annotations

from tests.campaigns.mutation.__main__ import end, started


def test_what_a_program_has_started_ends_with_it() -> None:
    """Servers of tests outlived trials that reached their time limit."""
    process = started(["sh", "-c", "sleep 3600 & echo started; wait"])
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    end(process)
    assert process.stdout.closed
