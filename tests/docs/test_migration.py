"""The programs of the migration guide run on the same broker before and after the migration."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import anyio
import pytest

import nsqext
from nsqext.broker import Cluster
from tests.support.interop_clients import python_of
from tests.support.programs import ADDRESS, ROOT

pytestmark = pytest.mark.timeout(300)  # the first test of a client installs it

_PAGE = (ROOT / "docs" / "howto" / "migrate.md").read_text(encoding="utf-8")
_BEFORE = dict(re.findall(r"^<!-- before: (\w+) -->\n```py\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL))


def test_the_programs_are_found() -> None:
    assert _BEFORE.keys() == {"pynsq", "gnsq", "ansq"}
    assert _PAGE.count("```py\n") == len(_BEFORE)


async def _publish(lookupd: list[str]) -> None:
    async with nsqext.Producer(lookupd=lookupd) as producer:
        await producer.publish("orders", b"one coffee")


@pytest.mark.parametrize("client", sorted(_BEFORE))
def test_the_program_before_the_migration_consumes(client: str, tmp_path: Path) -> None:
    python = python_of(client)
    with Cluster(nodes=1, generation="original") as cluster:
        cluster.create_topic("orders", channels=["billing"])
        anyio.run(_publish, cluster.lookupd)
        program = tmp_path / "before.py"
        program.write_text(_BEFORE[client].replace(ADDRESS, cluster.lookupd[0]), encoding="utf-8")
        command = [python, "-W", "ignore", str(program)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                assert running.stdout.readline() == "b'one coffee'\n"
            finally:
                running.kill()
