"""What publishes wait for: an answer of lookup, and the log that tells whether a message was stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import pytest
from tenacity import wait_fixed

from nsqext.errors import (
    ConnectionLost,
    DeliveryUnknown,
    LookupUnreachable,
    NotLookupd,
    NsqError,
    PartitionUnavailable,
    PublishFailed,
    TopicNotFound,
)
from tests.support.clock import replace_clock
from tests.support.publish_bench import Bench, Routes, Settling, batch_of
from tests.support.sleeps import recorded_sleeps

if TYPE_CHECKING:
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.settling import Settler

pytestmark = pytest.mark.anyio


async def _no(errors: list[NsqError]) -> str:
    if errors:
        raise errors.pop(0)
    return "found"


async def test_lookup_is_asked_until_it_answers() -> None:
    sender = Bench().sender
    errors: list[NsqError] = [PartitionUnavailable("x"), LookupUnreachable("x")]
    with anyio.fail_after(25):
        assert await sender.wait_for_lookup(lambda: _no(errors)) == "found"
    assert not sender.attempts


async def test_lookup_is_asked_again_after_the_pause_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = recorded_sleeps(monkeypatch)
    errors: list[NsqError] = [PartitionUnavailable("no leader")]
    await Bench(retry_wait=wait_fixed(5), max_retry_wait=1.0).sender.wait_for_lookup(lambda: _no(errors))
    assert pauses == [5.0]


@pytest.mark.parametrize("retry", [True, False])
async def test_the_first_error_of_lookup_is_raised_without_a_retry(retry: bool) -> None:
    sender = Bench().sender
    errors: list[NsqError] = [PartitionUnavailable("first"), NotLookupd("second")]
    cast("Routes", sender.routes).waits = False
    with anyio.fail_after(25), pytest.raises(NsqError) as caught:
        await sender.wait_for_lookup(lambda: _no(errors), retry=retry)
    assert type(caught.value) is (NotLookupd if retry else PartitionUnavailable)
    assert not sender.attempts


async def test_other_errors_than_those_of_lookup_are_raised_at_once() -> None:
    sender = Bench().sender
    with anyio.fail_after(25), pytest.raises(TopicNotFound):
        cast("Routes", sender.routes).answers = [TopicNotFound("x")]
        cast("Routes", sender.routes).waits = False
        await sender.wait_for_route("t", time.monotonic())


async def test_the_wait_for_lookup_ends_when_the_producer_closes() -> None:
    sender = Bench().sender
    errors: list[NsqError] = [PartitionUnavailable("no leader")] * 100_000
    ended: list[str] = []

    async def wait() -> None:
        with pytest.raises(PublishFailed, match="before the producer was closed"):
            await sender.wait_for_lookup(lambda: _no(errors))
        ended.append("closed")

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while len(errors) > 99_990:
                await anyio.lowlevel.checkpoint()
            sender.close()
    assert ended == ["closed"]


async def test_the_wait_for_lookup_ends_with_the_time_of_the_publish() -> None:
    bench = Bench(timeout=0.05)
    endless: list[NsqError] = [PartitionUnavailable("no leader")] * 100_000
    for started in (None, time.monotonic() - 0.04):
        with anyio.fail_after(25), pytest.raises(PublishFailed, match=r"within 0\.05 s; last error: no leader"):
            await bench.sender.wait_for_lookup(lambda: _no(endless), started)
    bench = Bench(timeout=1000.0)
    with anyio.fail_after(25), pytest.raises(PublishFailed, match="within 1000 s"):
        await bench.sender.wait_for_lookup(lambda: _no(endless), time.monotonic() - 1000.1)


# Settling


def _settling(bench: Bench, *answers: list[Any] | None) -> Settling:
    settling = Settling(*answers)
    bench.sender.settler = cast("Settler", settling)
    return settling


async def test_what_the_log_contains_is_not_sent_again() -> None:
    bench = Bench(ConnectionLost("lost"), on_unknown="raise")
    found = [bench.routes.made.partitions[0].receipt] * 2
    settling = _settling(bench, found)
    assert await bench.publish(batch_of(2)) == found
    assert (bench.counts, len(bench.connections.commands), settling.acknowledged) == ((2, 0), 1, 0)


async def test_what_the_log_does_not_contain_is_sent_again() -> None:
    bench = Bench(ConnectionLost("lost"), b"OK", on_unknown="raise")
    settling = _settling(bench, None)
    assert len(await bench.publish(batch_of(2))) == 2
    assert (bench.counts[0], len(bench.connections.commands), settling.acknowledged) == (2, 2, 2)
    assert bench.routes.asked[-1] == ("refresh", True, None)
    assert len(settling.sent) == 2


async def test_what_is_not_stored_in_time_was_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ConnectionLost("lost"), on_unknown="raise", timeout=5.0)
    _settling(bench, None)
    request = batch_of(2)
    replace_clock(monkeypatch, lambda: request.started + 5.0)
    with pytest.raises(PublishFailed, match="its log does not contain it"):
        await bench.publish(request)
    assert bench.counts == (0, 0)


async def test_a_closed_producer_does_not_search_the_log() -> None:
    bench = Bench(ConnectionLost("lost"), on_unknown="raise")
    settling = _settling(bench, [])
    request = batch_of(2)

    def sending(request: PublishRequest, target: Any, connection: Any) -> None:
        bench.sender.closed = True

    settling.sending = sending  # type: ignore[method-assign]
    with pytest.raises(DeliveryUnknown):
        await bench.publish(request)
    assert settling.answers == [[]]
    assert not bench.sender.attempts


async def test_the_search_of_the_log_ends_when_the_producer_closes() -> None:
    bench = Bench(ConnectionLost("lost"), on_unknown="raise")
    settling = _settling(bench, [])
    settling.hold = anyio.Event()
    errors: list[DeliveryUnknown] = []

    async def publish() -> None:
        with pytest.raises(DeliveryUnknown, match="lost") as caught:
            await bench.publish(batch_of(2))
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await anyio.wait_all_tasks_blocked()
        bench.sender.close()
    assert len(errors) == 1
    assert (bench.counts, bench.sender.attempts) == ((0, 0), set())
