"""Fuzzes one target in a process of its own: ``python -m tests.campaigns.fuzz.campaign NAME SECONDS FOLDER``.

With atheris the inputs are guided by the coverage of the package; without it, hypothesis draws them. Findings are
written to the folder, the figures to standard error.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from tests.campaigns.fuzz.inputs import damaged_inputs, kept_inputs

__all__ = ("ENGINE",)

ENGINE = "atheris" if find_spec("atheris") else "hypothesis"
_TIMEOUT = 10
"""Seconds that one input may take."""
_MEMORY = 2048
"""MiB of the whole process."""
_MOST_BYTES = 4096


def _with_atheris(name: str, seconds: int, folder: Path) -> None:
    """Fuzz until the time is over or something was found; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["nsqext"]):
        from tests.campaigns.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    inputs = [*target.seeds, *(path.read_bytes() for path in kept_inputs(name))]
    for number, data in enumerate(inputs):
        (corpus / f"seed-{number}").write_bytes(data)
    words = folder / "words"
    escaped = ["".join(rf"\x{byte:02x}" for byte in word) for word in target.words]
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    arguments = [f"-max_total_time={seconds}", f"-timeout={_TIMEOUT}", f"-rss_limit_mb={_MEMORY}"]
    arguments += [f"-artifact_prefix={folder}/", f"-dict={words}", f"-max_len={_MOST_BYTES}", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], target.run)
    atheris.Fuzz()


def _with_hypothesis(name: str, seconds: int, folder: Path) -> None:
    """Draw inputs until the time is over or something was found."""
    from tests.campaigns.fuzz.targets import TARGETS

    target = TARGETS[name]
    until, count, last = time.monotonic() + seconds, 0, b""

    @settings(
        max_examples=500,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged_inputs(name, target))
    def run(data: bytes) -> None:
        nonlocal count, last
        count += 1
        last = data
        target.run(data)

    try:
        while time.monotonic() < until:
            run()
    except Exception:
        (folder / f"crash-{hashlib.sha1(last, usedforsecurity=False).hexdigest()}").write_bytes(last)
        raise
    finally:
        sys.stderr.write(f"stat::number_of_executed_units: {count}\n")


def main() -> None:
    """Fuzz the target that the command line names."""
    name, seconds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    logging.disable(logging.CRITICAL)  # damage is reported in the log
    warnings.simplefilter("ignore")  # coroutines of commands that wait are closed without having run
    (_with_atheris if ENGINE == "atheris" else _with_hypothesis)(name, seconds, folder)


if __name__ == "__main__":
    main()
