"""A short round on the embedded cluster in a process of its own, and how records and plans work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import evolve

from nsqext import DeliveryUnknown, PublishFailed, Receipt
from nsqext.testing.simulation import Fault
from tests.campaigns.simulation.history import Channel, Delivery
from tests.campaigns.soak.__main__ import Run
from tests.campaigns.soak.clusters import TOPICS, EmbeddedProcess, led_by_others
from tests.campaigns.soak.records import Record, Recorder, SoakHistory
from tests.campaigns.soak.soak_round import ALL, KEYED, ORIGINAL, Soak, make_plan

SHORT = {
    "steady": ([], ["lanes", "ordered", "key_failover"]),
    "publishers": (["plain/many", "lanes/each", "keyed/batcher", "ordered/each", "tagged/each"], []),
    "consumers": ([], ["handlers", "batches", "key_failover", "tag", "no tag", "guest key_failover"]),
}


def test_a_short_round_violates_no_guarantee() -> None:
    run = Run("embedded", seconds=2.0, every=0.4, settle=3.0, roles=SHORT)
    result = run.round(203)
    assert result.violations == []
    assert {"client_kill", "freeze", "kill", "cut"} <= set(result.faults)
    assert {publish.topic for publish in result.history.publishes if publish.outcome == "stored"} == set(TOPICS)


def test_the_roles_hold_every_kind_of_client() -> None:
    for roles in (ALL, KEYED, ORIGINAL):
        assert sum(len(publish) for publish, _ in roles.values()) >= 4
        assert sum(len(consume) for _, consume in roles.values()) >= 6
    topics = {kind.split("/")[0] for publish, _ in ALL.values() for kind in publish}
    assert topics == set(TOPICS)


def test_a_plan_is_drawn_from_its_seed() -> None:
    clients = list(ALL)
    plans = [make_plan(seed, EmbeddedProcess.kinds, 40.0, 1.0, 0.1, clients) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]
    kinds = {fault.kind for seed in range(20) for fault in make_plan(seed, ("kill",), 40.0, 1.0, 0.1, clients).faults}
    assert kinds == {"kill", "client_kill", "client_stop", "client_cut"}


class _Node:
    """A cluster that notes how long its fault lasted."""

    def __init__(self) -> None:
        self.lasted = 0.0

    def begin(self, fault: Fault, topics: Sequence[str]) -> Callable[[], None]:
        """Begin a fault."""
        began = time.monotonic()

        def end() -> None:
            self.lasted = time.monotonic() - began

        return end


def test_the_last_fault_lasts_as_long_as_it_was_drawn(tmp_path: Path) -> None:
    """Faults ended with the time in which they begin: a node started again before another one led."""
    node = _Node()
    plan = evolve(make_plan(1, ("kill",), 1.0, 1.0, 0.1, ["steady"]), faults=(Fault("kill", 0.0, 0.2, "n1", 0.5),))
    Soak(cast("Any", node), plan, tmp_path, {}, 0.05, 1.0, {})._inject(Counter())
    assert node.lasted >= 0.2


def _recorded(path: Path) -> tuple[Recorder, Record, SoakHistory]:
    history = SoakHistory()
    return Recorder(path), Record(path, history), history


def test_a_record_becomes_a_history(tmp_path: Path) -> None:
    recorder, record, history = _recorded(tmp_path / "record")
    results: list[Receipt | BaseException] = [
        Receipt("t", 1, "n:1", 77, 5, 300, 40),
        DeliveryUnknown("lost"),
        PublishFailed("late"),
        ValueError("bug"),
    ]
    for number, result in enumerate(results):
        body = b"body %d" % number
        recorder.publish_begins(body, "t", "k", 1.0)
        recorder.publish_ends(body, result)
    call = recorder.delivery_begins(Delivery(b"body 0", "t", "ch", "c 1", 1, 77, 1, 2.0))
    recorder.delivery_ends(call, "returned")
    recorder.write("violation", text="a header changed")
    recorder.write("guest", begin=3.0, end=4.0)
    recorder.write("phase", name="closed", seconds=0.5)
    record.read()
    assert [publish.outcome for publish in history.publishes] == ["stored", "unknown", "failed", "undocumented"]
    stored = history.publishes[0]
    assert (stored.partition, stored.message_id, stored.offset, stored.number) == (1, 77, 300, 1)
    assert [(found.body, found.outcome, found.message_id) for found in history.deliveries] == [
        (b"body 0", "returned", 77)
    ]
    assert (history.observed, history.disturbances, history.close_seconds) == (["a header changed"], [(3.0, 4.0)], 0.5)
    assert record.phases == {"closed"}


def test_what_kill_9_takes_from_a_node_is_excused_and_nothing_else(tmp_path: Path) -> None:
    recorder, record, history = _recorded(tmp_path / "record")
    history.channels.append(Channel("t", "ch"))
    for name, port in (("handled", 1), ("in flight", 1), ("on another node", 2)):
        recorder.publish_begins(name.encode(), "t", "", 1.0)
        recorder.publish_ends(name.encode(), Receipt("t", None, f"127.0.0.1:{port}"))
    record.read()
    history.deliveries.append(Delivery(b"handled", "t", "ch", "c 1", 1, 7, 1, 2.0, 2.5, "returned"))
    history.forget_unfinished(3.0, 1)
    assert [publish.outcome for publish in history.publishes] == ["stored", "unknown", "stored"]


def test_unfinished_events_of_a_killed_process_are_recorded_as_ended(tmp_path: Path) -> None:
    recorder, record, history = _recorded(tmp_path / "record")
    recorder.publish_begins(b"one", "t", "", 1.0)
    record.read()
    recorder.delivery_begins(Delivery(b"one", "t", "ch", "c 1", 0, 7, 1, 2.0))
    with record.path.open("ab") as file:
        file.write(b'{"event": "publ')  # the process was killed within a write
    record.process_died(9.0)
    (publish,), (delivery,) = history.publishes, history.deliveries
    assert (publish.outcome, publish.end) == ("killed", 9.0)
    assert (delivery.outcome, delivery.end) == ("cancelled", 9.0)


def test_a_killed_node_starts_again_after_others_lead_every_partition() -> None:
    def answer(*ports: int) -> dict[str, object]:
        leaders = {str(number): {"tcp_port": port} for number, port in enumerate(ports)}
        return {"data": {"partitions": leaders, "meta": {"partition_num": 2}}}

    assert led_by_others(answer(4152, 4154), 4150)
    assert not led_by_others(answer(4152, 4150), 4150)
    assert not led_by_others(answer(4152), 4150), "the other partition has no leader"
    assert not led_by_others(None, 4150)
