"""Each checker accepts a good history, and rejects one that violates its guarantee."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.campaigns.simulation.checkers import CHECKERS, judge, late_deliveries
from tests.campaigns.simulation.history import Channel, Delivery, History, Letter, Publish, Wanted
from tests.campaigns.simulation.wire import RdyWatch


def good() -> History:
    """Three messages of a key, published one after the other and handled in order on a channel."""
    history = History(channels=[Channel("orders", "billing", "key")], healed=30.0, concurrency={"c": 1})
    for number in range(3):
        body = b"%d" % number
        history.publishes.append(
            Publish(
                *(body, "orders", "k", number, float(number), number + 0.5, "stored"),
                partition=0,
                message_id=number + 1,
                offset=100 * number,
            )
        )
        history.deliveries.append(
            Delivery(body, "orders", "billing", "c", 0, number + 1, 1, number + 1.0, number + 1.1, "returned")
        )
    return history


def test_a_good_history_is_accepted() -> None:
    assert judge(good()) == []


def _lose(history: History) -> None:
    history.deliveries.pop()


def _fail_stored(history: History) -> None:
    history.publishes[1].outcome = "failed"


def _invent(history: History) -> None:
    history.deliveries[0].body = b"other"


def _store_twice(history: History) -> None:
    history.on_unknown = "raise"
    history.deliveries.append(Delivery(b"1", "orders", "billing", "c", 0, 77, 1, 9.0, 9.1, "returned"))


def _store_twice_without_loss(history: History) -> None:
    history.deliveries.append(Delivery(b"2", "orders", "billing", "c", 0, 77, 1, 9.0, 9.1, "returned"))


def _reorder(history: History) -> None:
    first, second = history.deliveries[1:]
    first.begin, second.begin = second.begin, first.begin
    first.end, second.end = second.end, first.end
    history.deliveries.sort(key=lambda delivery: delivery.begin)


def _same_id(history: History) -> None:
    history.publishes[2].message_id = 1


def _other_id(history: History) -> None:
    history.deliveries[2].message_id = 99


def _offsets(history: History) -> None:
    history.publishes[2].offset = 50


def _deliver_again(history: History) -> None:
    history.deliveries.append(Delivery(b"1", "orders", "billing", "c", 0, 2, 2, 9.0, 9.1, "returned"))


def _two_at_once(history: History) -> None:
    history.deliveries[0].end = 2.05


def _hang(history: History) -> None:
    history.publishes[2].outcome = "pending"


def _slow(history: History) -> None:
    history.publishes[2].end = 50.0


def _fail_late(history: History) -> None:
    history.publishes.append(Publish(b"3", "orders", "k", 3, 60.0, 61.0, "unknown"))


def _slow_close(history: History) -> None:
    history.close_seconds = 100.0


def _raise_another(history: History) -> None:
    history.publishes[1].outcome = "undocumented"


def _leave_socket(history: History) -> None:
    history.left_over.append("open socket")


def _overtake_failed(history: History) -> None:
    history.deliveries[1].outcome = "raised"
    history.deliveries.append(Delivery(b"1", "orders", "billing", "c", 0, 2, 2, 9.0, 9.1, "returned"))


def _handle_late(history: History) -> None:
    history.deliveries[2].begin = history.deliveries[2].end = 200.0


def _give_key_to_two(history: History) -> None:
    history.channels[0].shared = True
    history.deliveries[0].end = 2.5
    history.deliveries[1].consumer = "d"


def _lose_in_new_topic(history: History) -> None:
    history.recreated = True
    history.publishes.append(Publish(b"3", "recreated", "", 3, 60.0, 61.0, "stored"))


def _change_headers(history: History) -> None:
    history.changed.append("headers {} of b'1'")


def _exceed_rdy(history: History) -> None:
    history.rdy_exceeded.append("3 messages in flight, RDY 2")


def _pass_filter(history: History) -> None:
    history.channels[0].color = "blue"
    history.publishes[0].headers = {"color": "red"}


def _leak(history: History) -> None:
    history.samples.append((1.0, 5000, 10, 10))


def _split_key(history: History) -> None:
    history.publishes[1].partition = history.deliveries[1].partition = 1


def _store_in_other_order(history: History) -> None:
    for number, found in ((3, 1), (2, 2)):
        history.publishes[found].message_id = history.deliveries[found].message_id = number


def _never_handle_again(history: History) -> None:
    history.deliveries[2].outcome = "raised"


def _run_two_of_a_partition(history: History) -> None:
    history.channels[0].order = "partition"
    history.deliveries[0].end = 2.05


def _tag(history: History) -> None:
    """Let a consumer of a tag handle a message without one."""
    history.tags["c"] = "blue"


def _miss_tag(history: History) -> None:
    """Let a consumer without a tag handle a message, while one of its tag is connected."""
    history.wanted.append(Wanted("orders", "billing", "blue", 0.5))
    history.publishes[1].tag = "blue"


def _letters(history: History) -> Delivery:
    """Let the last message fail for good; returns the delivery of its letter."""
    channel = history.channels[0]
    channel.max_attempts, channel.letters = 1, "dead"
    letter = Delivery(b"2", "dead", "billing", "d", 0, 1, 1, 4.0, 4.1, "returned")
    history.deliveries[2].outcome = "raised"
    history.deliveries.append(letter)
    history.letters.append(Letter(b"2", 4.0, 1, 0, 3, 1, "HandlerFailed"))
    return letter


def _lose_letter(history: History) -> None:
    history.deliveries.remove(_letters(history))


def _letter_of_handled(history: History) -> None:
    _letters(history)
    history.deliveries[2].outcome = "returned"


def _handle_too_often(history: History) -> None:
    _letters(history)
    history.deliveries[1].attempts = 2


def _keep_beside_letter(history: History) -> None:
    _letters(history)
    history.deliveries.append(Delivery(b"2", "orders", "billing", "c", 0, 3, 1, 9.0, 9.1, "returned"))


def _two_letters(history: History) -> None:
    _letters(history)
    history.deliveries.append(Delivery(b"2", "dead", "billing", "d", 0, 2, 1, 5.0, 5.1, "returned"))
    history.letters.append(Letter(b"2", 5.0, 2, 0, 3, 1, "HandlerFailed"))


def _refuse_answer(history: History) -> None:
    history.refused.append((9.0, "2 of 3 messages are not in flight any more"))


def _leave_unanswered(history: History) -> None:
    history.unanswered.append("c has 2 messages in flight, and handles 1")


def _deliver_early(history: History) -> None:
    history.deliveries[2].outcome, history.deliveries[2].delay = "raised", 10.0
    history.deliveries.append(Delivery(b"2", "orders", "billing", "c", 0, 3, 2, 9.0, 9.1, "returned"))


def _deliver_while_paused(history: History) -> None:
    history.pauses.append(("orders", "billing", 1.0, 3.0))
    history.deliveries[1].received = 2.0


BAD: list[tuple[str, Callable[[History], None]]] = [
    ("lost", _lose),
    ("phantom", _fail_stored),
    ("invented", _invent),
    ("stored_twice", _store_twice),
    ("reordered", _reorder),
    ("receipts", _same_id),
    ("receipts", _other_id),
    ("receipts", _offsets),
    ("redelivered_without_cause", _deliver_again),
    ("redelivered_early", _deliver_early),
    ("delivered_while_paused", _deliver_while_paused),
    ("too_many_at_once", _two_at_once),
    ("unbounded_waits", _hang),
    ("unbounded_waits", _slow),
    ("unbounded_waits", _fail_late),
    ("unbounded_waits", _slow_close),
    ("undocumented_errors", _raise_another),
    ("left_over", _leave_socket),
    ("late_deliveries", _handle_late),
    ("overtaken_while_it_failed", _overtake_failed),
    ("two_owners_of_a_key", _give_key_to_two),
    ("rdy_exceeded", _exceed_rdy),
    ("lost_after_creation", _lose_in_new_topic),
    ("changed", _change_headers),
    ("unbounded_memory", _leak),
    ("wrong_tag", _tag),
    ("wrong_header", _pass_filter),
    ("wrong_tag", _miss_tag),
    ("lost", _lose_letter),
    ("dead_letters", _letter_of_handled),
    ("dead_letters", _handle_too_often),
    ("dead_letters", _keep_beside_letter),
    ("dead_letters", _two_letters),
    ("refused_answers", _refuse_answer),
    ("unanswered", _leave_unanswered),
    ("broken_promises", _tag),
    ("broken_promises", _lose_letter),
    ("broken_promises", _lose),
    ("broken_promises", _fail_stored),
    ("broken_promises", _invent),
    ("broken_promises", _store_twice),
    ("broken_promises", _deliver_again),
    ("broken_promises", _split_key),
    ("broken_promises", _store_in_other_order),
    ("broken_promises", _never_handle_again),
    ("broken_promises", _run_two_of_a_partition),
    ("broken_promises", _slow_close),
    ("broken_promises", _slow),
    ("broken_promises", _reorder),
    ("broken_promises", _store_twice_without_loss),
]


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=[f"{name} {spoil.__name__.strip('_')}" for name, spoil in BAD])
def test_a_checker_rejects_a_bad_history(name: str, spoil: Callable[[History], None]) -> None:
    history = good()
    spoil(history)
    assert list(CHECKERS[name](history)) != []


def test_every_checker_has_a_history_that_it_rejects() -> None:
    assert {name for name, _ in BAD} == CHECKERS.keys()


def test_a_redelivery_after_a_fault_has_a_cause() -> None:
    history = good()
    _deliver_again(history)
    history.disturbances.append((5.0, 6.0))
    assert judge(history) == []


@pytest.mark.parametrize(("moment", "node", "found"), [(1.5, 0, False), (9.5, 0, True), (0.5, 0, True), (1.5, 1, True)])
def test_a_killed_node_of_the_original_nsq_may_read_a_message_twice(moment: float, node: int, found: bool) -> None:
    history = good()
    _deliver_again(history)
    history.kills.append((moment, node))
    assert bool(judge(history)) == found


def test_a_message_may_be_stored_in_a_deleted_topic_and_in_the_new_one() -> None:
    """What seed 54347 showed: the first publish of a producer, which knows no record of the old log."""
    history = good()
    history.recreated, history.on_unknown = True, "settle"
    history.publishes.append(Publish(b"3", "recreated", "", 3, 3.0, 5.0, "stored"))
    for number, begin in ((7, 3.5), (1, 5.5)):
        history.deliveries.append(Delivery(b"3", "recreated", "a", "c", 0, number, 1, begin, begin, "returned"))
    assert [*CHECKERS["stored_twice"](history)] == []
    history.recreated = False
    assert [*CHECKERS["stored_twice"](history)] != []


def test_a_filter_receives_what_matches_and_nothing_else_is_due() -> None:
    history = good()
    history.channels[0].color = "blue"
    for publish in history.publishes:
        publish.headers = {"color": "blue"}
    history.publishes.append(Publish(b"red", "orders", "", 9, 7.0, 7.1, "stored", partition=0))
    assert judge(history) == []
    history.publishes[-1].headers = {"color": "blue"}
    assert [text for text in judge(history) if text.startswith("lost")]


@pytest.mark.parametrize(("delay", "found"), [(901.0, True), (899.0, False)])
def test_a_long_delay_is_not_ended_by_a_fault(delay: float, found: bool) -> None:
    history = good()
    first = history.deliveries[0]
    first.outcome, first.delay = "raised", delay
    again = Delivery(first.body, "orders", "billing", "c", 0, first.message_id, 2, 500.0, 500.1, "returned")
    history.deliveries.append(again)
    history.disturbances.append((499.0, 500.0))
    assert bool([*CHECKERS["redelivered_early"](history)]) is found


def test_a_dead_letter_stands_for_its_message() -> None:
    history = good()
    _letters(history)
    assert judge(history) == []


def test_two_copies_of_a_message_have_a_letter_each() -> None:
    """What seed 2000450 showed: the outcome of a publish was unknown, and it was sent again."""
    history = good()
    _letters(history)
    history.deliveries.append(Delivery(b"2", "orders", "billing", "c", 0, 4, 1, 4.2, 4.3, "raised"))
    history.deliveries.append(Delivery(b"2", "dead", "billing", "d", 0, 2, 1, 5.0, 5.1, "returned"))
    history.letters.append(Letter(b"2", 5.0, 2, 0, 4, 1, "HandlerFailed"))
    assert [*CHECKERS["dead_letters"](history)] == []


def test_a_message_that_was_delivered_too_often_has_a_letter_although_its_handler_returned() -> None:
    history = good()
    _letter_of_handled(history)
    history.letters[0].attempts = 2
    assert judge(history) == []


@pytest.mark.parametrize("change", ["before", "left", "fault"])
def test_a_consumer_without_a_tag_takes_what_no_consumer_of_the_tag_can(change: str) -> None:
    history = good()
    _miss_tag(history)
    wanted = history.wanted[0]
    if change == "before":
        wanted.begin = 1.2  # after the publish
    elif change == "left":
        wanted.end = 1.9  # before the delivery
    else:
        history.faults.append((0.0, 1.0))
    assert judge(history) == []


def test_an_inversion_that_a_warning_announced_is_excused() -> None:
    history = good()
    _reorder(history)
    history.order_given_up.append(("orders", 0, history.deliveries[0].begin))
    assert judge(history) == []


@pytest.mark.parametrize("cause", ["half_open", "misled"])
def test_a_late_publish_is_unknown_on_a_lost_connection_or_at_a_wrong_node(cause: str) -> None:
    """What seeds 1009573 and 2935 showed: an idle producer learns of either when it publishes."""
    history = good()
    _fail_late(history)
    setattr(history, cause, True)
    assert judge(history) != []
    history.on_unknown = "raise"
    assert judge(history) == []
    history.publishes[-1].outcome = "failed"
    assert judge(history) != []


def test_a_late_publish_is_unknown_at_a_node_that_does_not_lead_any_more() -> None:
    history = good()
    _fail_late(history)
    history.on_unknown = "raise"
    assert judge(history) != []
    history.publishes[-1].error = "DeliveryUnknown('the message may have been stored: E_FAILED_ON_NOT_LEADER')"
    assert judge(history) == []
    history.on_unknown = "retry"
    assert judge(history) != []


def test_the_backlog_of_an_ordered_partition_may_take_its_time() -> None:
    """What seed 1026439 showed: 1,900 messages, delivered one at a time, took 150 s."""
    history = good()
    for number, delivery in enumerate(history.deliveries):
        delivery.begin = delivery.end = 120.0 * (number + 1)
    assert any("handled on" in found for found in late_deliveries(history))
    history.channels[0].order = "partition"
    assert len([*late_deliveries(history)]) == 2
    for number, delivery in enumerate(history.deliveries):
        delivery.begin = delivery.end = 90.0 * (number + 1)
    assert [*late_deliveries(history)] == []


class Socket:
    """Stands for a node's end of a connection."""

    number, address, remote = 1, ("127.0.0.1", 4150), ("127.0.0.1", 1)


def message(number: int) -> bytes:
    content = bytes(8) + b"\x00\x01" + number.to_bytes(16, "big") + b"body"
    return (len(content) + 4).to_bytes(4, "big") + b"\x00\x00\x00\x02" + content


def watched(*steps: tuple[str, bytes], times: Sequence[float] = ()) -> list[str]:
    found: list[str] = []
    now = [1.0]
    watch = RdyWatch({4150}, lambda: now[0], 60.0, found.append)
    for (direction, data), now[0] in zip(steps, times or [1.0] * len(steps), strict=True):
        getattr(watch, direction)(Socket(), data)
    return found


SUBSCRIBED = b"  V2IDENTIFY\n\x00\x00\x00\x02{}SUB orders billing\n"


def test_messages_beyond_rdy_are_found_on_the_wire() -> None:
    begin = ("received", SUBSCRIBED + b"RDY 2\n")
    first, second, third = (("sent", message(number)) for number in (1, 2, 10))
    finish = ("received", b"FIN " + (10).to_bytes(16, "big") + b"\n")
    assert watched(begin, first, second) == []
    assert watched(begin, first, third, finish, second) == []
    assert len(watched(begin, first, second, third)) == 1


def test_a_message_times_out_from_the_time_at_which_its_node_queued_it() -> None:
    """What seed 1003696 showed: a message left its node 10 ms after its timeout had begun."""
    begin = ("received", SUBSCRIBED + b"RDY 1\n")
    first, second = (("sent", message(number)) for number in (1, 2))
    assert watched(begin, first, second, times=(1.0, 1.01, 61.0)) == []
    assert len(watched(begin, first, second, times=(1.0, 1.01, 50.0))) == 1


def test_bytes_are_parsed_in_any_pieces() -> None:
    pieces = [("received", bytes([byte])) for byte in SUBSCRIBED + b"RDY 1\n"]
    pieces += [("sent", bytes([byte])) for byte in message(1) + message(2)]
    assert len(watched(*pieces)) == 1


def test_an_answer_between_two_commands_of_one_read_is_that_of_the_first_delivery() -> None:
    """What seed 4577 showed: RDY and FIN arrive together, and between them the message is sent again."""
    read = b"RDY 1\nFIN " + (1).to_bytes(16, "big") + b"\n"
    again, second = (("sent", message(number)) for number in (1, 2))
    assert watched(("received", SUBSCRIBED), ("received", read), again, second) == []
    assert len(watched(("received", SUBSCRIBED), ("received", read), again, second, times=(1.0, 1.0, 2.0, 2.0))) == 1


@pytest.mark.parametrize(("lost_at", "outcome"), [(9.0, "stored"), (10.3, "unknown"), (11.0, "stored")])
def test_a_dead_letter_that_was_stored_shortly_before_a_loss_of_power_may_be_lost(lost_at: float, outcome: str) -> None:
    history = History(channels=[Channel("orders", "billing", max_attempts=1, letters="letters")])
    history.publishes.append(Publish(b"1", "orders", "", 1, 1.0, 1.1, "stored"))
    history.deliveries.append(Delivery(b"1", "orders", "billing", "c", 0, 2, 1, 10.0, 10.1, "raised"))
    history.forget_unsynced([lost_at], interval=0.5)
    assert history.publishes[0].outcome == outcome
