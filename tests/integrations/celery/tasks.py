"""The tasks of a worker that tests start: each run appends a line to a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import celery
import orjson

import nsqext.integrations.celery  # noqa: F401 - registers nsq://

app = celery.Celery("tasks", broker=os.environ["NSQ_BROKER"])
app.conf.task_default_queue = os.environ.get("NSQ_QUEUE", "celery")
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 4
# the original NSQ keeps messages of a lost connection until they time out
app.conf.broker_transport_options = {"msg_timeout": 3.0, **orjson.loads(os.environ.get("NSQ_OPTIONS", "{}"))}


@app.task(name="note")  # type: ignore[untyped-decorator]
def note(number: int, seconds: float = 0.0) -> None:
    """Append a number to the file."""
    time.sleep(seconds)
    with Path(os.environ["NSQ_NOTES"]).open("a") as file:
        file.write(f"{number}\n")
