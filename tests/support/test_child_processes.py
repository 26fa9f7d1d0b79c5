"""The processes of a process whose threads end while they are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.child_processes import children, kill_children


def test_a_thread_that_ended_has_no_children(tmp_path: Path) -> None:
    for thread, text in (("1", "31 4 "), ("2", None), ("3", "15")):
        folder = tmp_path / "9" / "task" / thread
        folder.mkdir(parents=True)
        if text is not None:
            (folder / "children").write_text(text)
    assert children(9, tmp_path) == [4, 15, 31]


def test_children_are_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        assert child.pid in children(os.getpid())
        program = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()']); print('ended', flush=True)"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            while not children(parent.pid):
                assert parent.poll() is None
            kill_children(parent.pid)
            assert parent.communicate()[0] == b"ended\n"
        child.kill()
