"""Fuzz every parser of untrusted bytes and print a table: ``python -m tests.campaigns.fuzz --seconds 60``."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from attrs import frozen

from tests.campaigns.fuzz.campaign import ENGINE
from tests.campaigns.fuzz.inputs import CORPUS
from tests.campaigns.fuzz.targets import TARGETS
from tests.support.programs import ROOT

_SHOWN = 25
_MINIMUM_TIME = 120.0


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@frozen
class Result:
    """What fuzzing a target gave.

    Attributes:
        name: the target.
        inputs: number of inputs.
        rate: inputs per second.
        coverage: edges of the package that were reached; 0 without atheris.
        found: files of findings; they are kept.
    """

    name: str
    inputs: int
    rate: float
    coverage: int
    found: list[Path]


def fuzz(name: str, seconds: int) -> Result:
    """Fuzz a target, and keep what was found in its corpus."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    command = [sys.executable, "-m", "tests.campaigns.fuzz.campaign", name, str(seconds), str(folder)]
    limit = seconds + _MINIMUM_TIME
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=limit, check=False)
    inputs = int(_last(r"number_of_executed_units:\s+(\d+)", done.stderr))
    found = []
    for kind in ("crash", "timeout", "oom", "slow-unit"):
        for path in folder.glob(f"{kind}-*"):
            target = CORPUS / name / f"{kind}-{path.name.partition('-')[2][-40:][:12]}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            found.append(target)
    if found or done.returncode:
        say("\n".join(done.stderr.splitlines()[-_SHOWN:]))
    shutil.rmtree(folder)
    if done.returncode and not found:
        raise RuntimeError(f"fuzzing {name} ended with status {done.returncode}")
    return Result(name, inputs, inputs / seconds, int(_last(r"cov: (\d+)", done.stderr)), found)


def _last(pattern: str, text: str) -> str:
    return str((re.findall(pattern, text) or ["0"])[-1])


def main() -> int:
    """Fuzz the targets of the command line; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="all by default")
    given = parser.parse_args()
    say(f"{ENGINE}, {given.seconds} s for each target")
    results = []
    for name in given.target or TARGETS:
        result = fuzz(name, given.seconds)
        results.append(result)
        say(f"{name:20} {result.inputs:>9} inputs {result.rate:>9.0f}/s {result.coverage:>6} edges")
        for path in result.found:
            say(f"  found: {path}")
            say(f"  repeat it with: python -m pytest tests/campaigns/fuzz -k {path.name}")
    say(f"{len(results)} targets, {sum(len(result.found) for result in results)} findings")
    return any(result.found for result in results)


if __name__ == "__main__":
    sys.exit(main())
