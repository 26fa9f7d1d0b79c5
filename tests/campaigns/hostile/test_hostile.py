"""The short form of ``make hostile``: some attacks, for a second each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.campaigns.hostile.attacks import ATTACKS, Bounds, Result, honest_cluster, run
from tests.campaigns.hostile.meter import Usage

if TYPE_CHECKING:
    from nsqext.broker import Cluster

_SHORT = ("ignore-rdy", "flood-fin-failed", "nodes-1000", "full-window", "catastrophic-filters")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Honest servers."""
    with honest_cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("name", _SHORT)
@pytest.mark.timeout(120)
def test_bounds_hold_and_honest_peers_are_served(name: str, cluster: Cluster) -> None:
    (attack,) = (attack for attack in ATTACKS if attack.name == name)
    for seconds in (0.8, 4.0, 20.0):  # on a loaded machine the attacker may not get to send within the first of them
        result = run(attack, cluster, seconds)
        if result.sent:
            break
    assert result.connections
    assert result.sent
    assert result.broken(timed=False) == []


def test_a_broken_bound_is_reported() -> None:
    usage = Usage(rss=97, block=0.31, descriptors=9, log_lines=34, wait=2.1, served=1, recovered=True)
    result = Result(ATTACKS[0], usage, connections=1, sent=1, seconds=1.0)
    assert ATTACKS[0].bounds == Bounds()
    assert result.broken() == [
        "memory 97 MiB > 96",
        "turn 0.31 s > 0.3",
        "wait 2.10 s > 2.0",
        "34 log lines",
        "9 descriptors stay open",
    ]
    result = Result(ATTACKS[0], Usage(), connections=0, sent=0, seconds=1.0)
    assert result.broken() == ["no honest message was served", "not recovered"]
