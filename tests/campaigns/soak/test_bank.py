"""How the bank kills and reports; ``make soak-bank`` runs it, and `tests/transactions/test_bank.py` one on SQLite."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from attrs import define, field

from nsqext import Admin
from nsqext.broker import Cluster
from tests.campaigns.soak import bank
from tests.campaigns.soak.bank import BankResult, main
from tests.campaigns.soak.clusters import OriginalProcesses
from tests.transactions.bank import Bank

if TYPE_CHECKING:
    from nsqext.testing.simulation import Fault

_TOPICS = ("transfers", "confirmations")


@define
class _Servers:
    """A cluster in this process, as the bank kills its leaders; `begun` has the nodes, and whether they led."""

    cluster: Cluster
    shortest: float = 0.0
    kinds: tuple[str, ...] = ("kill", "move")
    begun: list[tuple[str, bool]] = field(factory=list)

    def leader(self, topic: str, partition: int) -> str:
        return self.cluster.leader(topic, partition)

    def begin(self, fault: Fault, topics: Sequence[str]) -> Callable[[], None]:
        leads = {self.cluster.leader(topic, partition) for topic in topics for partition in range(2)}
        self.begun.append((fault.target, fault.target in leads))
        self.cluster.kill(fault.target)
        return lambda: self.cluster.restart(fault.target)


class _Run:
    """Counts kills of the processes of a bank."""

    def __init__(self, lookupd: list[str]) -> None:
        self.bank = Bank(lookupd, "", "")
        self.killed: Counter[str] = Counter()

    def kill(self, chance: random.Random, role: str) -> int:
        self.killed[role] += 1
        return 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_every_kind_of_kill_happens_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader is killed when all replicas have everything, and the node runs again at the end."""

    async def terminate(disaster: bank.Disaster) -> int:
        return 2

    for kind in ("_backend", "_only_reads", "_use_up"):
        monkeypatch.setattr(bank.Disaster, kind, terminate)
    monkeypatch.setattr(bank, "DOWN", (0.0, 0.1))
    with Cluster(nodes=3) as cluster:
        for topic in _TOPICS:
            cluster.create_topic(topic, partitions=2, replicas=3, extend=True, channels=["bank"])
        servers, run = _Servers(cluster), _Run(cluster.lookupd)
        disaster = bank.Disaster(cast("Any", run), cast("Any", servers), "", 0.01, random.Random(3))
        kinds = ("worker", "relay", "backend", "leader")
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(disaster.cause)
                while min(disaster.kills[kind] for kind in kinds) < 2:  # noqa: ASYNC110 - tasks of the bank change it
                    await anyio.sleep(0.01)
                disaster.over = True
        assert {leads for _, leads in servers.begun} == {True}
        assert disaster.kills["leader"] == len(servers.begun)
        assert disaster.kills["backend"] % 2 == 0
        assert (disaster.kills["worker"], disaster.kills["relay"]) == (run.killed["work"], run.killed["relay"])
        with anyio.fail_after(60):
            async with Admin(cluster.lookupd) as admin:
                await bank.until_in_sync(admin, _TOPICS)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_nodes_of_the_original_nsq_are_stopped_in_each_way_that_loses_nothing(
    forgets: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node runs again before another one is stopped, and at the end."""
    begun, stopped = Counter[str](), list[str]()

    def begin(servers: OriginalProcesses, fault: Fault, topics: Sequence[str]) -> Callable[[], None]:
        assert not stopped
        begun[fault.kind] += 1
        stopped.append(fault.target)
        return stopped.clear

    monkeypatch.setattr(OriginalProcesses, "begin", begin)
    monkeypatch.setattr(bank, "DOWN", (0.0, 0.01))
    servers, run = OriginalProcesses(tmp_path), _Run([])
    servers.forgets = forgets
    disaster = bank.Disaster(cast("Any", run), servers, "", 0.001, random.Random(3))
    kinds = {"terminate", "freeze", *([] if forgets else ["kill"])}
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disaster.stop_nodes, servers)
            while any(begun[kind] < 3 for kind in kinds):  # noqa: ASYNC110 - the disaster changes it
                await anyio.sleep(0.001)
            disaster.over = True
    assert set(begun) == kinds
    assert disaster.kills == {f"node ({kind})": count for kind, count in begun.items()}
    assert not stopped


@pytest.mark.parametrize("faults", [[], ["1 transfers are not applied once: {7: 0}"]])
def test_a_run_is_reported(
    faults: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []

    def run_bank(target: str, seconds: float, every: float, seed: int, folder: Path) -> BankResult:
        assert (target, seconds, every, seed) == ("embedded", 30.0, 2.0, 5)
        folders.append(folder)
        return BankResult(12, Counter(worker=3), 1, 4, seconds, faults)

    monkeypatch.setattr(bank, "run_bank", run_bank)
    words = "--target embedded --minutes 0.5 --every 2 --seed 5"
    monkeypatch.setattr(sys, "argv", ["bank", *words.split()])
    assert main() == bool(faults)
    printed = " ".join(capsys.readouterr().out.split())
    assert "12 transfers in 30 s; kills: worker 3; 1 duplicates dropped by inboxes; sum compared 4 times" in printed
    assert f"{len(faults)} faults" in printed
    assert all(text in printed for text in faults)
    assert [folder.exists() for folder in folders] == [bool(faults)]
    for folder in folders:
        if faults:
            folder.rmdir()
