"""Find programs in the documentation, and run them like a user."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import STDOUT

from attrs import frozen

from tests.support.command_line import Process, environment

__all__ = ("ADDRESS", "PYTEST", "ROOT", "Run", "Snippet", "run_program", "run_python", "snippets_of")

ROOT = Path(__file__).parents[2]
PYTEST = ROOT / "tests" / "support" / "pytest_program.py"
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


def run_program(file: Path, *arguments: str, until: str | None = None, fork: bool = True) -> Run:
    """Run a Python program, warnings being errors; return its exit code and everything it printed.

    Args:
        file: the program.
        arguments: its arguments.
        until: text after which SIGTERM is sent; None if the program exits by itself.
        fork: from a process that has imported the package; without it, in a new interpreter.

    Raises:
        TimeoutError: the program did not exit, or did not print ``until``, within 100 seconds.
    """
    if fork:
        with Process((str(file), *arguments), environment(), ROOT, joined=True) as process:
            return _read(process, until)
    return run_python(str(file), *arguments, until=until)


def run_python(*arguments: str, until: str | None = None) -> Run:
    """Run a new interpreter with arguments, like `run_program`."""
    command = [sys.executable, "-u", "-W", "error", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=STDOUT, cwd=ROOT) as process:
        try:
            return _read(process, until)
        finally:
            process.kill()


def _read(process: Process | subprocess.Popen[bytes], until: str | None) -> Run:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    output = bytearray()
    deadline = time.monotonic() + DEADLINE
    while select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return Run(process.wait(DEADLINE), _PAUSED.sub("", output.decode()))
        output += chunk
        if until is not None and until in output.decode(errors="replace"):
            until = None
            process.send_signal(signal.SIGTERM)
    raise TimeoutError(f"the program ran for {DEADLINE} s and printed: {output.decode()}")
