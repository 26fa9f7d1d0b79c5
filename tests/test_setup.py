"""What a newcomer meets first: the README, the scripts that make the environments, and the addresses on PyPI."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the programs of a machine: at first only those that scripts of the shell use."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("basename", "cat", "cut", "dirname", "du", "mktemp", "rm", "sed", "tr"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    return folder


def add(programs: Path, name: str, script: str) -> None:
    """Add a program that is a script of the shell."""
    program = programs / name
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)


def run(programs: Path, script: str, *words: str) -> tuple[int, str]:
    """Run a script with these programs alone; return its exit code and what it prints."""
    done = subprocess.run(
        ["/bin/sh", str(CI / script), *words],
        env={"PATH": str(programs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_the_readme_begins_with_the_two_commands() -> None:
    lines = README.splitlines()
    commands = [number for number, line in enumerate(lines, 1) if line.startswith("$ ")]
    assert [lines[number - 1].split("#")[0].strip() for number in commands[:2]] == ["$ make demo", "$ make test"]
    assert commands[0] == 4
    assert "python3-venv" in "\n".join(lines[:12])
    assert [re.search(r"\d min, [\d.]+ [MG]B$", lines[number - 1]) for number in commands[:2]].count(None) == 0


def test_links_of_the_readme_work_where_only_the_readme_is_shown() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_metadata_has_addresses() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert set(urls) == {"Documentation", "Source", "Changelog", "Issues"}
    assert urls["Source"] in README and urls["Documentation"] in README


def test_debian_packages_without_which_no_environment_can_be_made(programs: Path) -> None:
    assert run(programs, "missing-python", "python3") == (0, "python3 python3-venv\n")
    add(programs, "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    add(programs, "python3.12", 'case "$2" in *ensurepip*) exit 1;; esac')
    assert run(programs, "missing-python", "python3") == (0, "python3-venv\n")
    assert run(programs, "missing-python", str(programs / "python3.12")) == (0, "python3.12-venv\n")
    add(programs, "python3", "exit 0")
    assert run(programs, "missing-python", "python3") == (0, "")
    add(programs, "python3", 'case "$2" in *version_info*) exit 1;; esac')
    code, said = run(programs, "missing-python", "python3")
    assert code == 1 and "make PYTHON=python3.12" in said


def test_root_installs_what_is_missing_and_says_so(programs: Path, tmp_path: Path) -> None:
    called = tmp_path / "called"
    add(programs, "id", "echo 0")
    add(programs, "mkdir", "exit 0")
    add(programs, "apt-cache", 'test "$2" != openjdk-17-jre-headless')
    add(programs, "apt-get", f'echo "$@" >> {called}')
    code, said = run(programs, "install", "python3-venv", "openjdk-17-jre-headless|openjdk-21-jre-headless")
    assert (code, said) == (0, "== apt-get install python3-venv openjdk-17-jre-headless\n")
    updated, installed = called.read_text(encoding="utf-8").splitlines()
    assert "update" in updated
    assert installed.endswith(" python3-venv openjdk-21-jre-headless")


def test_another_user_reads_the_one_command_before_anything_begins(programs: Path, tmp_path: Path) -> None:
    add(programs, "id", "echo 1000")
    add(programs, "apt-get", "echo apt-get was called")
    add(programs, "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    code, said = run(programs, "environment", "python3", str(tmp_path / "made"), "demo")
    assert (code, said) == (1, "missing: python3-venv: run this command first: sudo apt-get install python3-venv\n")
    assert not (tmp_path / "made").exists()


def test_without_apt_the_packages_are_named(programs: Path) -> None:
    code, said = run(programs, "install", "python3-venv")
    assert code == 1 and said.startswith("missing: python3-venv")


def test_each_step_of_an_environment_is_a_line(programs: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    pip = made / "bin" / "python"
    add(
        programs,
        "python3",
        f'case "$1" in --version) echo Python 3.11;; -m) /bin/mkdir -p {pip.parent}; '
        f"/bin/cp {programs}/pip {pip};; esac",
    )
    add(programs, "pip", 'case "$*" in *--quiet*) ;; *) echo noise;; esac')
    code, said = run(programs, "environment", "python3", str(made), ".[cli]", "--group", "test")
    assert code == 0, said
    lines = said.splitlines()
    assert [line.split(" (")[0] for line in lines[:3]] == [
        f"== making {made} with Python 3.11",
        "== updating its pip",
        "== installing .[cli] --group test",
    ]
    assert re.fullmatch(rf"== installed: \d+ MB in {re.escape(str(made))}", lines[3])
    assert len(lines) == 4
