"""Runs relays in forked processes that are killed at each line between the receipt of a message and its publish.

Arguments: lookup address, path of the store, topic of the delayed messages, topic to publish to, and 1 for each line
or n for each nth. Each process publishes the delayed messages ``0-0``, ``0-1``, …, ``1-0`` itself. Prints the number of
processes that were killed, and of all.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import httpcore  # noqa: F401 - each process would import them, and the event loop
import httpx  # noqa: F401
from anyio._backends import _asyncio  # noqa: F401

from nsqext import App, Producer
from nsqext.app import relay as skeleton
from nsqext.delays import DelayRelay, DelayStore, relay, store

_FILES = (str(relay.__file__), str(store.__file__))
_FUNCTIONS = (
    "_add",
    "_publish_due",
    "_wait",
    "_publish",
    "publish_record",
    "_transaction",
    "add",
    "take",
)
_DONE = 3  # exit code
MESSAGES = 3
"""Messages that each process publishes."""


def lines() -> list[tuple[str, int]]:
    """Return file and number of the lines at which processes are killed."""
    found: dict[tuple[str, int], None] = {}

    def add(code: CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                if constant.co_name in _FUNCTIONS:
                    found.update({(code.co_filename, line): None for _, _, line in constant.co_lines() if line})
                add(constant)

    for path in _FILES:
        add(compile(Path(path).read_text(), path, "exec"))
    return list(found)


def kill_at(place: tuple[str, int], times: int = 1) -> None:
    """Kill this process before it executes a line for the n-th time."""
    reached = count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        here = event == "line" and (frame.f_code.co_filename, frame.f_lineno) == place
        if here and next(reached) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


async def serve(lookupd: str, path: str, delayed: str, topic: str, number: int) -> None:
    """Publish delayed messages, and run a relay until it has published as many."""
    async with Producer(lookupd, delay_via="relay", delay_topic=delayed) as producer:
        for one in range(MESSAGES):
            await producer.publish(topic, b"%d-%d" % (number, one), delay=0.01)
    with DelayStore(path) as opened:
        app = App(lookupd, msg_timeout=1.0)
        relay_of_store = DelayRelay(opened, topic=delayed)
        relay_of_store.attach(app)
        await app.start()
        for _ in range(200):
            await anyio.sleep(0.02)
            if relay_of_store.statistics().published >= MESSAGES:
                break
        await app.aclose()


def main(lookupd: str, path: str, delayed: str, topic: str, each: str) -> None:
    """Kill one process after the other, then let one end."""
    gc.collect()
    gc.freeze()  # memory that processes share stays shared
    killed, places = 0, [*lines()[:: int(each)], None]
    for number, place in enumerate(places):
        child = os.fork()
        if not child:
            skeleton.MARGIN = -29.8  # with the default timeout of 30 seconds
            if place is not None:
                kill_at(place)
            anyio.run(serve, lookupd, path, delayed, topic, number)
            os._exit(_DONE)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status) != _DONE:
            raise SystemExit(f"a relay failed with status {status}")
    sys.stdout.write(f"{killed} {len(places)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
