"""Measure everything in one run, and write the page of benchmarks: ``python -m benchmarks.run``, or ``make bench``.

Servers and peers are named once, by options or by variables, and given to each section:

    make bench BENCH="--minutes 55 --nsqd /usr/bin/nsqd --redesigned 127.0.0.1:4161 --original 127.0.0.1:5161"

A section has as many rounds as fit into the time. One that fails or takes much too long is named on the page with the
reason, and the exit status is 1. Figures, sections and pictures are kept in ``build/benchmarks``; a run of all sections
replaces those of the documentation at its end, and one of some sections (``--only``) or of few messages (``--quick``)
does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import PAGE, Outcome, Run, install, page
from benchmarks.report import OUTPUT, section_file
from benchmarks.sections import CURVES, SECTIONS, Section, fitting, planned
from benchmarks.versions import commit, is_dirty, machine, versions

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "build" / "benchmarks"
_PATIENT = 120.0
_SLOW = 4.0
"""A section is ended after this many times its expected time, and the patient seconds."""


class Measuring:
    """A run: its options, and what it knows so far."""

    def __init__(self, given: argparse.Namespace, sections: Sequence[Section]) -> None:
        self._given = given
        self._left = list(sections)
        self._until = time.monotonic() + given.minutes * 60
        self._expected = self._taken = 0.0
        self.outcomes: list[Outcome] = []
        self._run = Run(
            commit=commit(),
            changed=is_dirty(),
            began=_now(),
            machine=machine(),
            versions=versions(given.nsqd, given.redesigned, given.original),
            quick=given.quick,
        )
        shutil.rmtree(_FOLDER, ignore_errors=True)
        for name in ("sections", "results", "pictures", "logs"):
            (_FOLDER / name).mkdir(parents=True)

    @property
    def failed(self) -> list[str]:
        """Titles of the sections that have failed."""
        return [one.title for one in self.outcomes if one.failure]

    def all_sections(self) -> None:
        """Measure one section after the other."""
        total, curves = len(self._left), any(section.module == "curves" for section in self._left)
        while self._left:
            # the machine may be slower or faster than the one of the expected times
            pace = self._taken / self._expected if self._expected > 60 else 1.0
            rest = max(0.0, self._until - time.monotonic())
            rounds = 1 if self._given.quick else fitting(self._left, rest / pace)
            expected = pace * sum(section.seconds(rounds) for section in self._left)
            section = self._left.pop(0)
            print(
                f"{_now()} [{total - len(self._left)}/{total}] {section.title}"
                f"{f', {min(rounds, section.rounds)} rounds' if section.rounds else ''}, about "
                f"{pace * section.seconds(rounds):.0f} s; to the end about {expected / 60:.0f} minutes",
                flush=True,
            )
            self._section(section, min(rounds, section.rounds))
            self._write()
        if curves:
            self._draw()
        self._run.ended = _now()
        self._write()

    def _section(self, section: Section, rounds: int) -> None:
        words = [*(section.quick if self._given.quick and section.quick else section.words)]
        words += ["--rounds", str(rounds)] if section.rounds else []
        if self._given.redesigned:
            words += [word.format(self._given.redesigned) for word in section.real]
        if self._given.go_redesigned and section.go:
            words += [section.go, self._given.go_redesigned]
        load, began, expected = os.getloadavg()[0], time.monotonic(), section.seconds(rounds)
        failure = self._program(section.title, f"benchmarks.{section.module}", words, _PATIENT + _SLOW * expected)
        text = self._text(section.title)
        if not failure and not text and section.module != "curves":
            failure = "it has written no section"
        taken = time.monotonic() - began
        self._taken, self._expected = self._taken + taken, self._expected + expected
        self.outcomes.append(Outcome(section.title, "" if failure else text, rounds, taken, load, failure))
        if failure:
            print(f"    failed: {failure}", flush=True)

    def _draw(self) -> None:
        load, began = os.getloadavg()[0], time.monotonic()
        words = [str(_FOLDER / "results"), str(_FOLDER / "pictures")]
        failure = self._program(CURVES, "docs.pictures.draw_benchmarks", words, _PATIENT)
        text = "" if failure else self._text(CURVES)
        self.outcomes.append(Outcome(CURVES, text, 0, time.monotonic() - began, load, failure))

    def _program(self, title: str, module: str, words: Sequence[str], seconds: float) -> str:
        """Run a program, and end it and its servers after a time; return why it failed."""
        log = (_FOLDER / "logs" / section_file(title)).with_suffix(".log")
        servers = {
            "NSQEXT_BENCH_NSQD": self._given.nsqd,
            "NSQEXT_TEST_LOOKUPD": self._given.redesigned,
            "NSQEXT_TEST_NSQ_LOOKUPD": self._given.original,
        }
        environment = {name: value for name, value in os.environ.items() if name not in servers}
        environment |= {name: value for name, value in servers.items() if value} | {OUTPUT: str(_FOLDER)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", module, *words]
        with log.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603
                command, cwd=_ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return f"it was ended after {seconds:.0f} s"
            finally:
                _end(process)
        if status:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return f"exit status {status}: {lines[-1] if lines else 'no output'}"
        return ""

    def _text(self, title: str) -> str:
        file = _FOLDER / "sections" / section_file(title)
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def _write(self) -> None:
        waiting = [section.title for section in self._left]
        (_FOLDER / "page.md").write_text(page(self._run, self.outcomes, waiting), encoding="utf-8")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and whatever it has started, which has no session of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def main() -> None:
    """Measure, write the page, and exit with 1 if a section has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    value = os.environ.get
    parser.add_argument("--minutes", type=float, default=55.0, help="for everything; at least one round is measured")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="sections whose titles contain a word")
    parser.add_argument("--quick", action="store_true", help="few messages, to test the benchmarks themselves")
    parser.add_argument("--dirty", action="store_true", help="measure although files differ from the commit")
    parser.add_argument("--list", action="store_true", help="print the sections, and how long one and all rounds take")
    servers = parser.add_argument_group("servers and peers, which are left out otherwise")
    servers.add_argument("--nsqd", default=value("NSQEXT_BENCH_NSQD", ""), help="another nsqd than `nsqext nsqd`")
    servers.add_argument(
        "--redesigned", default=value("NSQEXT_TEST_LOOKUPD", ""), help="HOST:PORT of lookup of a redesigned cluster"
    )
    servers.add_argument(
        "--original", default=value("NSQEXT_TEST_NSQ_LOOKUPD", ""), help="HOST:PORT of lookup of the original NSQ"
    )
    servers.add_argument(
        "--go-redesigned", default=value("NSQEXT_BENCH_GO", ""), help="benchmarks/go_peer_redesigned, built"
    )
    given = parser.parse_args()
    sections = planned(given.only)
    if given.list:
        for section in sections:
            print(f"{section.title:40} {section.seconds(1):5.0f} s to {section.seconds(9):5.0f} s")
        print(f"{'together':40} {sum(one.seconds(1) for one in sections):5.0f} s")
        return
    if is_dirty() and not (given.dirty or given.quick):
        sys.exit("files differ from the commit, so that the page could not name what it measured: commit, or --dirty")
    measuring = Measuring(given, sections)
    measuring.all_sections()
    if given.quick or len(sections) < len(SECTIONS):
        print(f"written: {_FOLDER / 'page.md'}; {PAGE.name} is of a whole run only")
    else:
        install(_FOLDER)
        print(f"written: {PAGE}")
    if measuring.failed:
        sys.exit(f"failed: {', '.join(measuring.failed)}; logs are in {_FOLDER / 'logs'}")


if __name__ == "__main__":
    main()
