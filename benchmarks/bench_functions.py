"""Where a lone publish spends its time, and what asyncio and threads cost alone.

``python -m benchmarks.bench_functions``. The server is ``nsqext nsqd``, or the nsqd program whose path
NSQEXT_BENCH_NSQD is.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import CodeType, FrameType

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from benchmarks.servers import original_nsqd, program_given
from nsqext import Producer

COUNT = 20_000
_ROWS = 16
_THREADS = 64
_PACKAGE = Path(__file__).parents[1] / "nsqext"


# What asyncio and threads cost alone


async def turns(count: int) -> None:
    """Run turns of the event loop with one callback each."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        else:
            ended.set_result(None)

    turn(count)
    await ended


async def futures(count: int) -> None:
    """Await futures that the next turn sets."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future


async def sockets(count: int) -> None:
    """Send a command of 200 bytes to another socket, and receive it in the next turn, without a task."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    near, far = socket.socketpair()
    left = count

    def readable() -> None:
        nonlocal left
        far.recv(65536)
        left -= 1
        if left:
            near.send(BODY)
        elif not ended.done():
            ended.set_result(None)

    far.setblocking(False)
    loop.add_reader(far.fileno(), readable)
    near.send(BODY)
    await ended
    loop.remove_reader(far.fileno())
    near.close()
    far.close()


async def threads(count: int) -> None:
    """Let 64 threads wait, each for a lock that another thread releases when all wait."""
    locks = [threading.Lock() for _ in range(_THREADS)]
    waiting: deque[threading.Lock] = deque()
    all_wait = threading.Lock()

    def wait(own: threading.Lock) -> None:
        for _ in range(count // _THREADS):
            waiting.append(own)
            if len(waiting) == _THREADS:
                all_wait.release()
            own.acquire()

    started = [threading.Thread(target=wait, args=(one,)) for one in locks]
    for lock in (all_wait, *locks):
        lock.acquire()
    for thread in started:
        thread.start()
    for _ in range(count // _THREADS):
        all_wait.acquire()
        waiting.clear()
        for lock in locks:
            lock.release()
    for thread in started:
        thread.join()


FLOOR: dict[str, Callable[[int], Awaitable[None]]] = {
    "a turn of the event loop": turns,
    "the same with a future, which a task awaits": futures,
    "the same with 200 bytes sent and received, without a future": sockets,
    f"a thread of {_THREADS} that waits and is woken, without asyncio": threads,
}


async def cost(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """Return µs of CPU per step."""
    await work(count // 20)
    used = time.process_time()
    await work(count)
    return (time.process_time() - used) / count * 1e6


# A lone publish by function


async def publish(address: str, count: int) -> float:
    """Publish one message at a time; return µs of CPU per message."""
    async with Producer(nsqd=address) as producer:
        for _ in range(count // 20):
            await producer.publish("lone", BODY)
        used = time.process_time()
        for _ in range(count):
            await producer.publish("lone", BODY)
        return (time.process_time() - used) / count * 1e6


@contextmanager
def sampled() -> Iterator[Counter[str]]:
    """Count in which function the program is, once per millisecond of CPU; a system call counts for its caller."""
    found: Counter[str] = Counter()

    def note(_: int, frame: FrameType | None) -> None:
        if frame is not None:
            found[_name(frame.f_code)] += 1

    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _name(code: CodeType) -> str:
    file = Path(code.co_filename)
    if _PACKAGE in file.parents:
        return f"`{file.relative_to(_PACKAGE.parent)}` {code.co_qualname}"
    if file.name == "selectors.py":
        return "asyncio, poll of the sockets"
    return "asyncio" if "asyncio" in file.parts else "other modules"


async def measure(address: str, rounds: int) -> None:
    """Measure all, and write the page."""
    floor = {name: [await cost(work, COUNT) for _ in range(rounds)] for name, work in FLOOR.items()}
    costs = [await publish(address, COUNT) for _ in range(rounds)]
    with sampled() as found:
        await publish(address, 5 * COUNT)
    total, samples = median(costs), found.total()
    rows = [[name, f"{count / samples * total:.1f}"] for name, count in found.most_common(_ROWS)]
    rest = samples - sum(count for _, count in found.most_common(_ROWS))
    rows += [["all others", f"{rest / samples * total:.1f}"], ["a lone publish", f"{total:.1f}"]]
    text = f"""What asyncio and threads cost alone, in µs of CPU, medians of {rounds} rounds:

{table(("", "µs"), [[name, f"{median(values):.1f}"] for name, values in floor.items()])}
A lone publish of 200 bytes, divided by where the program was in each of {samples:,} milliseconds of CPU. A system call
counts for the function that calls it: `send` for `Connection._send`, `recv` for `Connection._receive`.

{table(("function", "µs"), rows)}"""
    print(text)
    write_section("Functions of a lone publish", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with original_nsqd(program=program_given()) as nsqd:
        asyncio.run(measure(nsqd.tcp, given.rounds))
