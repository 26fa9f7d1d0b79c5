"""Workers of parallel runs are forked from a process that has imported and collected the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.command_line import ROOT

if TYPE_CHECKING:
    import pytest

pytest_plugins = ("pytester",)

CONFTEST = """
import os

from tests.support.forked_workers import fork_workers

def pytest_collection_modifyitems(config):
    config.collected_by = os.getpid()

def pytest_xdist_setupnodes(config, specs):
    fork_workers(config, specs)
"""
TESTS = """
import os
import signal

IMPORTED_BY = os.getpid()

def test_the_module_was_imported_before():
    assert IMPORTED_BY != os.getpid()

def test_the_worker_did_not_collect_again(request):
    assert request.config.collected_by != os.getpid()

def test_as_in_other_workers(request):
    assert f"popen-{os.environ['PYTEST_XDIST_WORKER']}" in str(request.getfixturevalue("tmp_path"))
    assert os.environ["PYTEST_XDIST_WORKER"].startswith("gw")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def test_fails():
    number = 1
    assert number == 2
"""
ENDS_ITSELF = """
import os

def test_ends_its_worker():
    os._exit(3)
"""


def test_a_run_reports_what_others_do(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be imported, warnings at imports, the values of an assertion, and the end of a worker."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib\npythonpath = .\nfilterwarnings = error")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        test_one=TESTS,
        test_broken="raise RuntimeError('on purpose')",
        test_warns="import warnings\nwarnings.warn('old', DeprecationWarning)",
        test_ends=ENDS_ITSELF,
    )
    options = ("-n", "2", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    result = pytester.runpytest_subprocess(*options, "-o", "asyncio_default_fixture_loop_scope=function")
    output = result.stdout.str()
    assert "2 failed, 3 passed, " in output
    for text in ("RuntimeError: on purpose", "DeprecationWarning: old", "assert 1 == 2", "crashed while running"):
        assert text in output
