"""The configuration of the test suite: no silent skips in continuous integration, all event loops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trio

from tests.conftest import EVERY_LOOP

pytest_plugins = ("pytester",)

_LOOP_SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")
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
    result = pytester.runpytest_inprocess(*_LOOP_SCOPE)
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == expected
    assert ("ERROR skipped with CI=true" in result.stdout.str()) is (expected != pytest.ExitCode.OK)


def test_a_skip_fails_in_parallel_runs_too(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SKIPPING.format(reason="no such tool"))
    result = pytester.runpytest_inprocess("-n", "1", "--dist", "loadfile", *_LOOP_SCOPE)
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "ERROR skipped with CI=true" in result.stdout.str()


WITHOUT_PROGRAMS = """
from tests.support.missing import skip_without

def test_one():
    skip_without("Java 17", "openjdk-17-jre-headless")

def test_two():
    skip_without("Chromium", "chromium", "chromium-driver")

def test_three():
    skip_without("Java 17", "openjdk-17-jre-headless")
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "parallel"])
def test_the_last_line_lists_what_was_left_out_and_the_commands_that_install_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CI", "")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(WITHOUT_PROGRAMS)
    result = pytester.runpytest_inprocess("-ra", *workers, *_LOOP_SCOPE)
    result.assert_outcomes(skipped=3)
    assert result.ret == pytest.ExitCode.OK
    expected = (
        "tests left out: 1 without Chromium (apt-get install chromium chromium-driver), "
        "2 without Java 17 (apt-get install openjdk-17-jre-headless)"
    )
    assert [line for line in result.stdout.lines if line][-2] == expected


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", EVERY_LOOP.values(), ids=list(EVERY_LOOP))
async def test_the_event_loop_is_the_requested_one(anyio_backend: tuple[str, dict[str, object]]) -> None:
    name, options = anyio_backend
    if name == "trio":
        assert trio.lowlevel.in_trio_run()
        return
    loop = asyncio.get_running_loop()
    assert type(loop).__module__.startswith("uvloop") is options["use_uvloop"]


ON_LOOPS = """
import pytest

@pytest.mark.anyio
class TestUnchosen:
    async def test_a(self):
        pass

    async def test_b(self):
        pass

    async def test_c(self):
        pass

    async def test_d(self):
        pass

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_chosen(anyio_backend):
    pass
"""


def loops_of(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, list[str]]:
    """Return test -> event loops of what is collected with an environment."""
    for name in ("NSQEXT_TEST_LOOPS", "NSQEXT_TEST_LOOKUPD", "NSQEXT_TEST_NSQ_LOOKUPD"):
        monkeypatch.setenv(name, variables.get(name, ""))
    items, _ = pytester.inline_genitems("-o", "asyncio_default_fixture_loop_scope=function")
    found: dict[str, list[str]] = {}
    for item in items:
        name, _, loop = item.name.removesuffix("]").partition("[")
        found.setdefault(name, []).append(loop)
    return found


def test_a_test_runs_on_one_event_loop_or_on_each(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_loops=ON_LOOPS)
    names = ["test_a", "test_b", "test_c", "test_d"]
    chosen = {"test_chosen": ["trio", "asyncio"]}
    by_name = loops_of(pytester, monkeypatch)
    assert by_name == {name: by_name[name][:1] for name in names} | chosen
    assert {loop for name in names for loop in by_name[name]} == {"trio", "asyncio"}
    every = {name: list(EVERY_LOOP) for name in names} | chosen
    assert loops_of(pytester, monkeypatch, NSQEXT_TEST_LOOPS="every") == every
    assert loops_of(pytester, monkeypatch, NSQEXT_TEST_LOOKUPD="127.0.0.1:4161") == every


ORDERED = """
import anyio, pytest, trio

@pytest.fixture
def order():
    found = []

    async def note(number):
        found.append(number)

    async def run():
        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                for number in range(2):
                    tasks.start_soon(note, number)

    trio.run(run)
    return found

def test_a(order):
    print("order of a:", *order)

def test_b(order):
    print("order of b:", *order)
"""


def test_trio_runs_tasks_in_an_order_that_the_name_of_a_test_and_a_seed_decide(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_order=ORDERED)

    def orders(seed: str) -> list[str]:
        monkeypatch.setenv("NSQEXT_TEST_SEED", seed)
        result = pytester.runpytest_inprocess("-s", *_LOOP_SCOPE)
        return [line.partition(": ")[2] for line in result.outlines if "order of" in line]

    first = orders("")
    assert len({*first}) == 2, "each test has an order of its own"
    assert orders("") == first
    assert orders("another") != first
