"""The process that commands are forked from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.command_line import ROOT

_KILLED = """
import os, signal
from tests.support.command_line import Process, environment
words = ("nsqlookupd", "-tcp-address=127.0.0.1:0", "-http-address=127.0.0.1:0")
Process(words, environment(), output=(1, 2))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_commands_end_with_tests_that_are_killed() -> None:
    output = subprocess.PIPE
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_TESTRUNUID"}
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED], cwd=ROOT, env=alone, stdout=output, stderr=output
    ) as process:
        process.communicate()  # until no process has its output any more
    assert process.returncode == -signal.SIGKILL
