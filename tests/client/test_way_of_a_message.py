"""The files that a message passes, traced by the interpreter: ``docs/explanation/design.md`` shows them."""

from __future__ import annotations

import re
import sys
from types import FrameType

import anyio
import pytest

import nsqext
from nsqext import Consumer, Producer
from nsqext.broker import Cluster
from tests.support.consumers import eventually
from tests.support.programs import ROOT

PACKAGE = nsqext.__path__[0] + "/"
DESIGN = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
WAYS = {
    "publish": "## A publish to the socket",
    "receive": "## A message from the socket to the handler",
    "finish": "## The handler's return to the socket",
}
_TIMERS = {"client/tasks.py"}
"""Files of tasks that run beside the message."""


class Trace:
    """The package's files that are entered while it is active, by stage.

    Attributes:
        files: the files of each stage, without those of the embedded cluster, in the order in which they are entered.
        stage: the present stage; None outside of them.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, None]] = {}
        self.stage: str | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or self.stage is None or not path.startswith(PACKAGE):
            return
        name = path.removeprefix(PACKAGE)
        if not name.startswith(("broker/", "testing/")):
            self.files.setdefault(self.stage, {})[name] = None
        if (
            name == "transport/connection.py"
            and frame.f_code.co_name == "_send"
            and self.stage in ("publish", "finish")
        ):
            self.stage = None  # the bytes are in the socket


async def traced() -> dict[str, list[str]]:
    """Publish, handle and finish a message on open connections; return the files of each stage."""
    trace = Trace()
    handled, ended = anyio.Event(), anyio.Event()
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        consumer = Consumer("t", "ch", lookupd=cluster.lookupd)

        @consumer.handler
        async def handle(message: nsqext.Message) -> None:
            if message.body == b"warm":
                handled.set()
            else:
                trace.stage = "finish"
                ended.set()

        async with Producer(cluster.lookupd) as producer, consumer:
            await producer.publish("t", b"warm")
            await handled.wait()
            await anyio.sleep(0.1)
            sys.setprofile(trace)
            try:
                trace.stage = "publish"
                await producer.publish("t", b"traced")
                trace.stage = trace.stage or "receive"
                with anyio.fail_after(25):
                    await ended.wait()
                    await eventually(lambda: trace.stage is None)
            finally:
                sys.setprofile(None)
    return {stage: [name for name in names if name not in _TIMERS] for stage, names in trace.files.items()}


def drawn(title: str) -> list[str]:
    """Return the files of a drawing of the page."""
    section = DESIGN.partition(title)[2].partition("\n## ")[0]
    return re.findall(r"^(\S+\.py)", section.partition("```text")[2].partition("```")[0], re.MULTILINE)


def test_the_drawings_show_the_files_that_a_message_passes() -> None:
    """A file that joins the way, or leaves it, has to be drawn."""
    found = anyio.run(traced)
    assert {stage: sorted(found[stage]) for stage in WAYS} == {
        stage: sorted(drawn(title)) for stage, title in WAYS.items()
    }


@pytest.mark.parametrize(("stage", "most"), [("publish", 6), ("receive", 10), ("finish", 6)])
def test_no_file_joins_the_way(stage: str, most: int) -> None:
    assert len(drawn(WAYS[stage])) <= most
