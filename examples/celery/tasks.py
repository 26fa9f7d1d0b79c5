"""Celery on NSQ.

Start a broker, a worker and this program, each in a terminal of its own::

    nsqext broker --lookupd-http-address 127.0.0.1:4161
    celery --app examples.celery.tasks worker --concurrency 2
    python -m examples.celery.tasks
"""

from __future__ import annotations

import os

import celery

import nsqext.integrations.celery  # noqa: F401 - registers nsq://

app = celery.Celery("shop", broker=os.environ.get("BROKER_URL", "nsq://127.0.0.1:4161"))
app.conf.update(
    task_acks_late=True,  # a task of a worker that dies is run by another one
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"topic_partitions": 1, "msg_timeout": 30.0},
)


@app.task(name="shop.confirm")  # type: ignore[untyped-decorator]
def confirm(order: str) -> None:
    """Confirm an order."""
    print(f"order {order} is confirmed", flush=True)


def main() -> None:
    """Send three orders, the last one to be confirmed in two seconds."""
    confirm.delay("a-1")
    confirm.delay("a-2")
    confirm.apply_async(("a-3",), countdown=2)
    print("3 tasks are stored")


if __name__ == "__main__":
    main()
