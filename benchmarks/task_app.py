"""The Celery app of `benchmarks.bench_tasks`: its task appends a byte to a file."""

from __future__ import annotations

import os

import celery

import nsqext.integrations.celery  # noqa: F401 - registers nsq:// and nsqd://

app = celery.Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    task_default_queue=os.environ["BENCH_QUEUE"],
    worker_prefetch_multiplier=16,
    broker_connection_retry_on_startup=True,
)
if os.environ["BENCH_BROKER"].startswith("amqp"):
    # otherwise a publish does not wait until the task is stored, as it does with Redis and NSQ
    app.conf.broker_transport_options = {"confirm_publish": True}
_done = os.open(os.environ["BENCH_DONE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.task(name="bench.note")  # type: ignore[untyped-decorator]
def note(number: int) -> None:
    """Count one."""
    os.write(_done, b".")
