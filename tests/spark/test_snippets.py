"""The python blocks of the documentation that need Spark, in the session of the tests."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import anyio
import pytest

from nsqext.broker import Cluster
from tests.docs.test_snippets import SNIPPETS, publish_one
from tests.support.programs import ADDRESS, Snippet
from tests.support.spark_queries import after_slow_starts

FOLDER = "/data/"
"""Where the pages keep files."""


@pytest.fixture
def lookupd() -> Iterator[str]:
    """The lookup address of a cluster as the other blocks have it: a topic ``orders`` with one message."""
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing", "audit"])
        anyio.run(publish_one, cluster.lookupd)
        yield cluster.lookupd[0]


@pytest.mark.parametrize(
    "snippet", [snippet for snippet in SNIPPETS if snippet.mode == "spark"], ids=lambda snippet: snippet.where
)
@pytest.mark.usefixtures("spark")
def test_snippet_runs_and_prints_what_the_page_says(snippet: Snippet, lookupd: str, tmp_path: Path) -> None:
    code = snippet.code.replace(ADDRESS, lookupd).replace(FOLDER, f"{tmp_path}/")

    def run() -> str:
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, snippet.where, "exec"), {"__name__": "__main__"})  # noqa: S102 (our own documentation)
        return printed.getvalue()

    assert after_slow_starts(run) == snippet.output
