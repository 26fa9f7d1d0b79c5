"""Find programs in the documentation, and run them like a user."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import STDOUT
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

if TYPE_CHECKING:
    from anyio.abc import ByteReceiveStream

__all__ = ("ADDRESS", "ROOT", "Run", "Snippet", "run_program", "snippets_of")

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:4161"
DEADLINE = 100.0

_BLOCK = re.compile(
    r"^(?:<!-- snippet: (?P<mode>\w+) -->\n)?^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)

# logged if the machine stopped the program for a second; for a handler that blocks, the text is different
_PAUSED = re.compile(r"^the event loop was blocked .* no handler of this consumer was running;.*\n", re.MULTILINE)


@frozen
class Snippet:
    """A python block of a Markdown file, and the text block behind it, which is what it prints.

    Attributes:
        where: file and line.
        mode: ``program`` runs to its end, ``serve`` until SIGTERM, ``pytest`` below pytest, ``spark`` in the
            session of the tests of Spark.
        code: the program.
        output: expected output; empty if the page shows none.
    """

    where: str
    mode: str
    code: str
    output: str


@frozen
class Run:
    """Exit code and output of a program, without log lines about pauses of the machine."""

    code: int
    output: str


def snippets_of(page: Path) -> list[Snippet]:
    """Find the python blocks of a page."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Snippet(
            where=f"{name}:{text.count(chr(10), 0, match.start('code'))}",
            mode=match["mode"] or "program",
            code=match["code"],
            output=match["output"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


async def _collect(stream: ByteReceiveStream, until: str | None, output: bytearray) -> None:
    async for chunk in stream:
        output += chunk
        if until is not None and until in output.decode(errors="replace"):
            return


def run_program(*arguments: str | Path, until: str | None = None) -> Run:
    """Run a Python program, warnings being errors; return its exit code and everything it printed.

    Args:
        arguments: arguments of ``python``.
        until: text after which SIGTERM is sent; None if the program exits by itself.

    Raises:
        TimeoutError: the program did not exit, or did not print ``until``, within 100 seconds.
    """
    command = [sys.executable, "-u", "-W", "error", *map(str, arguments)]
    output = bytearray()

    async def run() -> Run:
        async with await anyio.open_process(command, stderr=STDOUT, cwd=ROOT) as process:
            assert process.stdout is not None
            try:
                with anyio.fail_after(DEADLINE):
                    await _collect(process.stdout, until, output)
                    if until is not None and process.returncode is None:
                        process.terminate()
                        await _collect(process.stdout, None, output)
                    code = await process.wait()
            except TimeoutError as error:
                process.kill()
                raise TimeoutError(f"{command} ran for {DEADLINE} s and printed: {output.decode()}") from error
        return Run(code, _PAUSED.sub("", output.decode()))

    return anyio.run(run)
