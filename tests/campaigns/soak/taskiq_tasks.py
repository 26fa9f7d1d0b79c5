"""The tasks of a Taskiq worker that the soak starts: each run appends a line to a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import orjson

from nsqext.integrations.taskiq import NsqBroker

broker = NsqBroker(
    os.environ["NSQ_BROKER"],
    queues=[os.environ["NSQ_QUEUE"]],
    **{"msg_timeout": 3.0, **orjson.loads(os.environ.get("NSQ_OPTIONS", "{}"))},
)


@broker.task(task_name="note")
async def note(number: int, seconds: float = 0.0) -> None:
    """Append a number to the file."""
    await asyncio.sleep(seconds)
    with Path(os.environ["NSQ_NOTES"]).open("a") as file:  # noqa: ASYNC230
        file.write(f"{number}\n")
