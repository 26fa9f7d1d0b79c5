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
_BESIDE = {"client/tasks.py", "waits.py"}
"""Files of tasks that run beside the message, and of how a task waits."""
_WARM = 2000
"""Messages before the traced ones: RDY does not limit the consumer any more, as in one that has run for a while."""
_TRACED = 5
"""Messages that are traced one after the other; the shortest way counts, because timers run beside some of them."""


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
    """Publish, handle and finish messages on open connections; return the files of each stage."""
    traces: list[Trace] = []
    warm, ended = 0, anyio.Event()
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        consumer = Consumer("t", "ch", lookupd=cluster.lookupd)

        @consumer.handler
        async def handle(message: nsqext.Message) -> None:
            nonlocal warm
            if message.body == b"warm":
                warm += 1
            else:
                traces[-1].stage = "finish"
                ended.set()

        async with Producer(cluster.lookupd) as producer, consumer:
            await producer.publish("t", b"warm")
            await producer.publish_many("t", [b"warm"] * _WARM)
            await eventually(lambda: warm > _WARM)
            await anyio.sleep(0.1)
            for _ in range(_TRACED):
                traces.append(trace := Trace())
                ended = anyio.Event()
                sys.setprofile(trace)
                try:
                    trace.stage = "publish"
                    await producer.publish("t", b"traced")
                    trace.stage = trace.stage or "receive"
                    with anyio.fail_after(25):
                        await ended.wait()
                        await eventually(lambda: traces[-1].stage is None)
                finally:
                    sys.setprofile(None)
    return {
        stage: min(([name for name in one.files[stage] if name not in _BESIDE] for one in traces), key=len)
        for stage in WAYS
    }


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


@pytest.mark.parametrize(("stage", "most"), [("publish", 6), ("receive", 8), ("finish", 7)])
def test_no_file_joins_the_way(stage: str, most: int) -> None:
    assert len(drawn(WAYS[stage])) <= most
