"""The blocking producer."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

import nsqext
from nsqext import sync
from nsqext.errors import BatchFailed, DeliveryUnknown, InvalidState, TopicNotFound
from tests.support.command_line import run_code
from tests.support.consumers import depth
from tests.support.messages import placed

if TYPE_CHECKING:
    from nsqext.broker import Cluster


def parameters(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


def test_constructors_take_the_same() -> None:
    assert parameters(sync.Producer.__init__) == parameters(nsqext.Producer.__init__)
    assert parameters(sync.Consumer.__init__) == parameters(nsqext.Consumer.__init__)


def test_a_publish_returns_its_receipt(cluster: Cluster, topic: str) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        receipt = producer.publish(topic, b"x", headers={"user": "42"}, tag="blue", trace_id=7, key="k")
        assert (receipt.topic, receipt.trace_id, placed(receipt)[0] > 0) == (topic, 7, True)
        assert producer.publish(topic, b"y", partition=1).partition == 1
        assert len(producer.publish_many(topic, (b"%d" % number for number in range(10)))) == 10
        assert producer.settings["timeout"] == 30
        with pytest.raises(TopicNotFound):
            producer.publish("no_such_topic", b"x")


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: sync.Producer(nsqd="127.0.0.1:1"), r"sync\.Producer\(nsqd='127.0.0.1:1', open\)"),
        (
            lambda: sync.Consumer("t", "ch", nsqd="127.0.0.1:1", start_timeout=0.01),
            r"sync\.Consumer\('t', 'ch', nsqd='127.0.0.1:1', open\)",
        ),
    ],
)
def test_a_blocking_client_that_was_not_closed_is_named_in_a_warning(
    made: Callable[[], sync.Producer | sync.Consumer], named: str
) -> None:
    client = made().start()
    with pytest.warns(ResourceWarning, match=f"{named} was not closed"):
        del client
        gc.collect()


def test_it_is_opened_in_one_thread_and_closed_in_another(cluster: Cluster, topic: str) -> None:
    producer = sync.Producer(cluster.lookupd)
    producer.close()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(producer.start).result()
    producer.publish(topic, b"x")
    assert producer.statistics().stored == 1
    with ThreadPoolExecutor(1) as threads:
        threads.submit(producer.close).result()
    producer.close()
    with pytest.raises(InvalidState):
        producer.publish(topic, b"x")


def test_it_has_to_be_open(cluster: Cluster) -> None:
    producer = sync.Producer(cluster.lookupd)
    with pytest.raises(InvalidState, match="not open"):
        producer.publish("orders", b"x")
    with producer, pytest.raises(InvalidState, match="open already"):
        producer.__enter__()
    with pytest.raises(InvalidState, match="not open"):
        producer.publish("orders", b"x")
    with pytest.raises(InvalidState, match="opened once"):
        producer.__enter__()


def test_it_is_not_made_in_an_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> None:
        sync.Producer("127.0.0.1:1")

    with pytest.raises(InvalidState, match="cannot be made in an event loop of trio"):
        anyio.run(make, backend="trio")
    assert caplog.text == ""
    anyio.run(make)
    assert "a blocking producer was made in a running event loop" in caplog.text
    caplog.clear()
    anyio.run(anyio.to_thread.run_sync, lambda: sync.Producer("127.0.0.1:1"), backend="trio")
    assert caplog.text == ""


def test_many_threads_share_one_producer(cluster: Cluster, topic: str) -> None:
    with sync.Producer(cluster.lookupd) as producer, ThreadPoolExecutor(8) as threads:
        receipts = list(threads.map(lambda number: producer.publish(topic, b"%d" % number, trace_id=number), range(64)))
    assert [receipt.trace_id for receipt in receipts] == list(range(64))


class _Publishing:
    """A function for threads, which publishes until the producer is closed."""

    def __init__(self, producer: sync.Producer, topic: str) -> None:
        self.expected: list[nsqext.Receipt] = []
        self.refused: list[nsqext.NsqError] = []
        self._producer = producer
        self._topic = topic

    def __call__(self) -> None:
        while not self.refused:
            try:
                self.expected.extend(self._producer.publish_many(self._topic, [b"x"]))
                self.expected.append(self._producer.publish(self._topic, b"y", key="k"))
            except nsqext.NsqError as error:
                self.refused.append(error)


def test_closing_blocks_no_other_thread(cluster: Cluster, topic: str) -> None:
    """Every call returns a receipt, or raises because the producer is closed or the outcome is unknown."""
    for _ in range(5):
        producer = sync.Producer(cluster.lookupd)
        publishing = _Publishing(producer, topic)
        with ThreadPoolExecutor(4) as threads:
            with producer:
                ends = [threads.submit(publishing) for _ in range(4)]
                while len(publishing.expected) < 80:  # by then threads publish themselves
                    time.sleep(0.001)
            for end in ends:
                end.result(30)
        assert publishing.refused
        assert all(isinstance(error, (InvalidState, BatchFailed, DeliveryUnknown)) for error in publishing.refused)


@pytest.mark.usefixtures("own_loop")
def test_all_producers_share_one_loop_that_ends_with_the_last(cluster: Cluster) -> None:
    before = set(threading.enumerate())  # idle threads of earlier tests may end at any time
    with sync.Producer(cluster.lookupd):
        (loop,) = set(threading.enumerate()) - before
        with sync.Producer(cluster.lookupd):
            assert set(threading.enumerate()) - before == {loop}
    assert not loop.is_alive()


def test_the_batcher_publishes_in_the_background(cluster: Cluster, topic: str) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        with producer.batcher(topic, linger=0.001) as batcher:
            for number in range(20):
                batcher.add(b"%d" % number)
            assert batcher.publish(nsqext.OutgoingMessage(b"last", key="k")).topic == topic
            batcher.flush()
            assert batcher.pending == 0
            with pytest.raises(InvalidState, match="the batcher is open already"):
                batcher.__enter__()
        with pytest.raises(InvalidState):
            batcher.add(b"late")


def test_the_batcher_has_the_limits_that_are_given(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"linger": 1.0, "max_count": 2, "max_bytes": 3, "max_pending": 4}
    given: list[dict[str, object]] = []
    monkeypatch.setattr(nsqext.Producer, "batcher", lambda _, topic, **options: given.append(options))
    with sync.Producer(cluster.lookupd) as producer:
        producer.batcher("orders", **limits)  # type: ignore[arg-type]
    assert given == [limits]


def test_an_iterable_is_read_in_the_thread_of_its_caller(cluster: Cluster, topic: str) -> None:
    """It may block, or publish itself."""

    def bodies() -> Iterator[bytes]:
        readers.add(threading.get_ident())
        yield b"x"

    readers: set[int] = set()
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish_many(topic, bodies())
        producer.publish_many(topic, bodies(), key="k")
    assert readers == {threading.get_ident()}


def test_the_batcher_reports_failed_messages(cluster: Cluster) -> None:
    with (
        sync.Producer(cluster.lookupd, timeout=0.2) as producer,
        producer.batcher("no_such_topic", linger=0) as batcher,
    ):
        batcher.add(b"x")
        with pytest.raises(BatchFailed):
            batcher.flush()
        assert [message for message, _ in batcher.take_failed()] == [b"x"]
        with pytest.raises(ZeroDivisionError), producer.batcher("no_such_topic", linger=0) as batcher:
            batcher.add(b"x")
            raise ZeroDivisionError  # not the failure of its messages


@pytest.mark.usefixtures("own_loop")
def test_a_producer_that_is_closed_before_its_batcher_publishes_what_is_pending(cluster: Cluster, topic: str) -> None:
    producer = sync.Producer(cluster.lookupd).start()
    batcher = producer.batcher(topic, linger=60)
    batcher.__enter__()
    batcher.add(b"x")
    producer.close()
    assert batcher.pending == 0
    assert depth(cluster, topic) == 1
    for call in (partial(batcher.add, b"y"), partial(batcher.__exit__, None, None, None)):
        with pytest.raises(
            InvalidState, match="the batcher was closed: use it inside the 'with' block of its producer"
        ):
            call()


def test_a_batcher_that_is_closed_is_not_kept_until_the_program_ends(cluster: Cluster, topic: str) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        batcher = producer.batcher(topic)
        with batcher:
            kept = weakref.ref(batcher)
        del batcher
        gc.collect()
        assert kept() is None


@pytest.mark.usefixtures("own_loop")
def test_a_batcher_of_a_closed_producer_is_not_opened(cluster: Cluster, topic: str) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        batcher = producer.batcher(topic)
    with pytest.raises(InvalidState, match="the batcher was closed: use it inside the 'with' block of its producer"):
        batcher.__enter__()


def test_an_interrupt_ends_the_waiting(cluster: Cluster, topic: str, interrupts: None) -> None:
    with sync.Producer(cluster.lookupd) as producer, producer.batcher(topic, linger=60) as batcher:

        def interrupt() -> None:
            while not batcher.pending:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                batcher.publish(b"x")
            sent.result(30)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, even if the test runner changed its handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_that_closes_while_the_producer_closes_does_not_wait_for_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, closed = sync.Producer(cluster.lookupd).start(), threading.Event()
    close, waiting = nsqext.Producer.__aexit__, threading.get_ident()

    def close_again(*_: object) -> None:
        producer.close()
        closed.set()

    async def close_late(original: nsqext.Producer, *error: object) -> None:
        signal.pthread_kill(waiting, signal.SIGUSR1)
        await anyio.to_thread.run_sync(closed.wait)
        await close(original, *error)

    monkeypatch.setattr(nsqext.Producer, "__aexit__", close_late)
    before = signal.signal(signal.SIGUSR1, close_again)
    try:
        producer.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert closed.is_set()


def test_several_share_a_lookup_in_the_loop_of_the_process(cluster: Cluster, topic: str) -> None:
    lookup = nsqext.Lookup(cluster.lookupd)
    for body in (b"1", b"2"):
        with (
            sync.Producer(lookup) as producer,
            sync.Consumer(topic, "ch", lookupd=lookup, close_timeout=1.0) as consumer,
        ):
            producer.publish(topic, body)
            lookup.switch(cluster.lookupd)
            message = next(iter(consumer))
            assert message.body == body
            message.finish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_its_own_loop(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    program = f"""
import os, signal
from nsqext import sync
with sync.Producer({cluster.lookupd!r}) as producer:
    producer.publish({topic!r}, b"parent")
    if not os.fork():
        signal.alarm(50)
        with sync.Producer({cluster.lookupd!r}) as own:
            own.publish({topic!r}, b"child")
            if not os.fork():
                producer.close()  # of its parent's parent
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    run = run_code(program, tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_keeps_a_loop_of_its_own(tmp_path: Path) -> None:
    program = """
import os, signal
import anyio
from nsqext.sync.loop import shared_loop
signal.alarm(50)
portal = shared_loop.kept()
portal.start_task_soon(anyio.sleep_forever)  # the end of the process does not wait for it
child = os.fork()
if not child:
    signal.alarm(50)
    own = shared_loop.kept()
    own.call(int)
    os._exit(7 if own is not portal else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert shared_loop.kept() is portal
"""
    run = run_code(program, tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_clients_opened_before_a_fork_raise_in_the_child_and_work_in_the_parent(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    program = f"""
import os, signal
from nsqext import sync
from nsqext.errors import InvalidState
with sync.Producer({cluster.lookupd!r}) as producer:
    child = os.fork()
    if not child:
        signal.alarm(50)
        try:
            producer.publish({topic!r}, b"child")
        except InvalidState as error:
            assert "forked" in str(error), error
            raise SystemExit(7)  # leaves the block, and the interpreter, as a worker does
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    producer.publish({topic!r}, b"parent")
"""
    run = run_code(program, tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_producer_that_is_dropped_without_close_does_not_block_the_program() -> None:
    program = (
        "from nsqext import sync\n"
        "def forget():\n"
        "    sync.Producer('127.0.0.1:1').start()\n"
        "forget()\n"
        "print('continued')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "continued\n", "")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="the C library has no on_exit")
def test_a_producer_that_was_not_closed_refuses_calls_at_the_end_and_runs_no_timer_after_it(tmp_path: Path) -> None:
    program = """
import atexit, ctypes
@atexit.register
def publish():
    try:
        producer.publish("orders", b"x")
    except Exception as error:
        print(error)
import anyio
from nsqext import sync
producer = sync.Producer("127.0.0.1:1").start()
async def wake():
    while True:
        await anyio.sleep(0.4)
producer._portal.start_task_soon(wake)
library = ctypes.CDLL(None)
library.on_exit(library.sleep, None)  # which receives the exit code
raise SystemExit(1)
"""
    run = run_code(program, tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (1, "the producer cannot be used: the process ends\n", "")


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_messages_of_a_batcher_are_published_or_counted_when_the_program_ends(
    cluster: Cluster, topic: str, tmp_path: Path, drain: bool, end: str
) -> None:
    program = f"""
import os, warnings
from nsqext import sync
warnings.simplefilter("default", ResourceWarning)
producer = sync.Producer({cluster.lookupd!r}).start()
producer.publish({topic!r}, b"first")
batcher = producer.batcher({topic!r}, linger=30.0, drain_at_exit={drain})
batcher.__enter__()
for number in range(7):
    batcher.add(b"%d" % number)
if child := os.fork():
    os.waitpid(child, 0)  # its end publishes and counts nothing
{end}
"""
    run = run_code(program, tmp_path)
    assert run.returncode == (3 if end else 0), run.stderr
    stored = depth(cluster, topic)
    if drain:
        assert (stored, run.stderr) == (8, "")
    else:
        assert stored == 1
        assert run.stderr.startswith("7 messages of a batcher were not published")
        assert run.stderr.count("ResourceWarning: 7 messages of a batcher were not published") == 1
        assert "was not closed" not in run.stderr, "one warning is enough"


def test_a_batcher_that_cannot_be_drained_when_the_program_ends_counts_its_messages(tmp_path: Path) -> None:
    program = """
import warnings
from nsqext import sync
warnings.simplefilter("default", ResourceWarning)
producer = sync.Producer("127.0.0.1:1", close_timeout=0.2).start()
batcher = producer.batcher("t", drain_at_exit=True)
batcher.__enter__()
batcher.add(b"x")
"""
    run = run_code(program, tmp_path)
    assert run.returncode == 0
    assert "1 messages of a batcher were not published" in run.stderr
