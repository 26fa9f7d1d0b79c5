"""Every python block of the README and the documentation runs and prints what its page says.

A block is a program of its own. One that names the lookup address 127.0.0.1:4161 gets the address of an embedded
cluster instead, with a topic ``orders`` where one message waits in the channels ``billing`` and ``audit``. Blocks of
the mode ``spark`` run in tests/spark, in one session.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import nsqext
from nsqext.broker import Cluster
from tests.support.programs import ADDRESS, PYTEST, ROOT, Run, Snippet, run_program, snippets_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]
PROGRAMS = [snippet for snippet in SNIPPETS if snippet.mode != "spark"]


def run_snippet(snippet: Snippet, file: Path, address: str) -> Run:
    """Write the snippet to a file and run it in its mode."""
    file.write_text(snippet.code.replace(ADDRESS, address), encoding="utf-8")
    if snippet.mode == "pytest":
        options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
        return run_program(PYTEST, "-q", *options, "--rootdir", str(file.parent), str(file))
    assert snippet.mode in ("serve", "program"), f"{snippet.where}: unknown mode {snippet.mode}"
    until = snippet.output if snippet.mode == "serve" else None
    # gevent replaces modules before they are imported
    return run_program(file, until=until, fork="gevent" not in snippet.code)


async def publish_one(lookupd: list[str]) -> None:
    """Publish the message that the pages expect."""
    async with nsqext.Producer(lookupd=lookupd) as producer:
        await producer.publish("orders", b"one coffee", headers={"user": "42"}, tag="canary", partition=1)


@pytest.mark.parametrize("snippet", PROGRAMS, ids=lambda snippet: snippet.where)
def test_snippet_runs_and_prints_what_the_page_says(snippet: Snippet, tmp_path: Path) -> None:
    file = tmp_path / "test_snippet.py"
    if ADDRESS in snippet.code:
        with Cluster(nodes=3) as cluster:
            cluster.create_topic("orders", partitions=2, extend=True, channels=["billing", "audit"])
            anyio.run(publish_one, cluster.lookupd)
            run = run_snippet(snippet, file, cluster.lookupd[0])
    else:
        run = run_snippet(snippet, file, ADDRESS)
    assert run.code == 0, run.output
    if snippet.output:
        assert run.output == snippet.output


def test_the_snippets_are_found() -> None:
    """Guard against a pattern that finds nothing, or misses a block."""
    blocks = sum(page.read_text(encoding="utf-8").count("```python\n") for page in PAGES)
    assert len(SNIPPETS) == blocks > 10
    assert {snippet.mode for snippet in SNIPPETS} == {"program", "serve", "pytest", "spark"}
