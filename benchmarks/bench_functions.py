"""Where a lone publish spends its time, and what asyncio costs alone: ``python -m benchmarks.bench_functions``.

The server is ``nsqext nsqd``, or the nsqd program whose path NSQEXT_BENCH_NSQD is.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from benchmarks.servers import original_nsqd, program_given
from nsqext import Producer

COUNT = 20_000
_ROWS = 16
_PACKAGE = Path(__file__).parents[1] / "nsqext"


# What asyncio costs alone


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


FLOOR: dict[str, Callable[[int], Awaitable[None]]] = {
    "a turn of the event loop": turns,
    "the same with a future, which a task awaits": futures,
    "the same with 200 bytes sent and received, without a future": sockets,
}


async def cost(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """Return µs of CPU per step."""
    await work(count // 20)
    used = time.process_time()
    await work(count)
    return (time.process_time() - used) / count * 1e6


# A lone publish by function


async def publish(address: str, count: int, profile: cProfile.Profile | None = None) -> float:
    """Publish one message at a time; return µs of CPU per message."""
    async with Producer(nsqd=address) as producer:
        for _ in range(count // 20):
            await producer.publish("lone", BODY)
        if profile is not None:
            profile.enable()
        used = time.process_time()
        for _ in range(count):
            await producer.publish("lone", BODY)
        used = time.process_time() - used
        if profile is not None:
            profile.disable()
        return used / count * 1e6


def shares(profile: cProfile.Profile, count: int) -> list[tuple[str, float, float]]:
    """Return name, calls per message and share of each function's own time, largest first."""
    own: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for (path, _, function), (_, called, seconds, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        file = Path(path)
        if _PACKAGE in file.parents:
            name = f"`{file.relative_to(_PACKAGE.parent)}` {function}"
        elif "asyncio" in file.parts or file.name == "selectors.py":
            name = "asyncio"
        elif path == "~":
            name = {"send": "send, in the kernel", "recv": "recv, in the kernel", "poll": "poll, in the kernel"}.get(
                function.split("'")[1] if "'" in function else "", "built-in functions"
            )
        else:
            name = "other modules"
        own[name] += seconds
        calls[name] += called
    total = sum(own.values())
    return [(name, calls[name] / count, seconds / total) for name, seconds in own.most_common()]


async def measure(address: str, rounds: int) -> None:
    """Measure all, and write the page."""
    floor = {name: [await cost(work, COUNT) for _ in range(rounds)] for name, work in FLOOR.items()}
    costs = [await publish(address, COUNT) for _ in range(rounds)]
    profile = cProfile.Profile(time.thread_time)  # without the time of waits
    await publish(address, COUNT, profile)
    total = median(costs)
    found = shares(profile, COUNT)
    rows = [[name, f"{called:.1f}", f"{share * total:.1f}"] for name, called, share in found[:_ROWS]]
    rest = sum(share for _, _, share in found[_ROWS:])
    rows += [["all others", "", f"{rest * total:.1f}"], ["a lone publish", "", f"{total:.1f}"]]
    text = f"""What asyncio costs alone, in µs of CPU, medians of {rounds} rounds:

{table(("", "µs"), [[name, f"{median(values):.1f}"] for name, values in floor.items()])}
A lone publish of 200 bytes. The sum is measured without a profiler, and divided by what cProfile found; it makes short
functions look longer than they are.

{table(("function", "calls", "µs"), rows)}"""
    print(text)
    write_section("Functions of a lone publish", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with original_nsqd(program=program_given()) as nsqd:
        asyncio.run(measure(nsqd.tcp, given.rounds))
