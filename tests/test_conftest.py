"""The configuration of the test suite: no silent skips in continuous integration, all event loops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trio

from tests.conftest import EVERY_LOOP

pytest_plugins = ("pytester",)

CONFTEST = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
SKIPPING = """
import pytest

def test_runs():
    pass

def test_skipped():
    pytest.skip({reason!r})
"""


@pytest.mark.parametrize(
    ("reason", "environment", "expected"),
    [
        ("no such tool", "true", pytest.ExitCode.TESTS_FAILED),
        ("no such tool", "", pytest.ExitCode.OK),
        ("NSQEXT_TEST_LOOKUPD is not set", "true", pytest.ExitCode.OK),
        ("NSQEXT_TEST_NSQD is not set", "true", pytest.ExitCode.OK),
    ],
)
def test_a_skip_that_could_have_run_fails_in_continuous_integration(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    environment: str,
    expected: pytest.ExitCode,
) -> None:
    monkeypatch.setenv("CI", environment)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SKIPPING.format(reason=reason))
    result = pytester.runpytest_inprocess("-o", "asyncio_default_fixture_loop_scope=function")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == expected
    assert ("ERROR skipped with CI=true" in result.stdout.str()) is (expected != pytest.ExitCode.OK)


def test_a_skip_fails_in_parallel_runs_too(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SKIPPING.format(reason="no such tool"))
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "ERROR skipped with CI=true" in result.stdout.str()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", EVERY_LOOP.values(), ids=list(EVERY_LOOP))
async def test_the_event_loop_is_the_requested_one(anyio_backend: tuple[str, dict[str, object]]) -> None:
    name, options = anyio_backend
    if name == "trio":
        assert trio.lowlevel.in_trio_run()
        return
    loop = asyncio.get_running_loop()
    assert type(loop).__module__.startswith("uvloop") is options["use_uvloop"]
