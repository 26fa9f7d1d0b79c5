"""The shell session and the notebook of the page on interactive use; what `help` says about clients."""

from __future__ import annotations

import ast
import inspect
import io
import json
import pydoc
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import anyio
import pytest

import nsqext
from nsqext.client.settings import consumer_settings, producer_settings
from tests.support.command_line import environment
from tests.support.programs import ROOT

PAGE = ROOT / "docs" / "howto" / "interactive.md"
NOTEBOOK = ROOT / "docs" / "howto" / "first-steps.ipynb"


def test_the_session_of_the_page_runs_in_the_shell_that_it_names() -> None:
    (session,) = re.findall(r"^```pycon\n\$ python -m asyncio\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    typed = [line.removeprefix(">>> ") for line in session.splitlines() if line.startswith(">>> ")]
    shown = [line for line in session.splitlines() if not line.startswith(">>> ")]
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input="\n".join(typed) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=environment(),
    )
    printed = [line.replace(">>> ", "") for line in done.stdout.splitlines()]
    assert [line for line in printed if line.strip()] == shown, done.stderr
    assert "Traceback" not in done.stderr


def cells() -> list[dict[str, Any]]:
    """Return the cells of the notebook with code."""
    found = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def expected(cell: dict[str, Any]) -> str:
    """Return what a cell shows: what it prints, and its value."""
    parts = [one.get("text") or one["data"]["text/plain"] for one in cell["outputs"]]
    return "".join("".join(part) for part in parts).strip()


async def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does, with ``await`` at its top level, and return what it shows."""
    tree = ast.parse(source)
    last = tree.body[-1]
    value = last.value if isinstance(last, ast.Expr) else None
    if value is not None:
        tree.body.pop()
    shown = io.StringIO()
    with redirect_stdout(shown):
        for body in (tree, None if value is None else ast.Expression(value)):
            if body is None:
                continue
            mode = "eval" if isinstance(body, ast.Expression) else "exec"
            code = compile(body, str(NOTEBOOK), mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)  # noqa: S307 - our own notebook
            result = await result if inspect.isawaitable(result) else result
            if mode == "eval" and result is not None:
                shown.write(f"{result!r}\n")
    return shown.getvalue().strip()


def test_the_notebook_shows_what_it_says() -> None:
    async def run() -> None:
        names: dict[str, Any] = {"__name__": "__main__"}
        for cell in cells():
            assert await run_cell("".join(cell["source"]), names) == expected(cell)

    assert len(cells()) > 5
    anyio.run(run)


@pytest.mark.parametrize(
    ("client", "settings"),
    [(nsqext.Producer, producer_settings()), (nsqext.Consumer, consumer_settings())],
    ids=["producer", "consumer"],
)
def test_help_lists_every_setting_with_its_meaning(client: type, settings: Mapping[str, Any]) -> None:
    text = pydoc.plain(pydoc.render_doc(client))
    found = re.findall(r"^ \|      (\w+)(?: \(.*?\))?: [A-Z`]", text.partition("Settings, as keyword")[2], re.M)
    assert [name for name in settings if name not in found] == []
