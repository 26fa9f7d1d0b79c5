"""Shared by all tests: event loops, hypothesis profiles, and no silent skips in continuous integration."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any
from zlib import crc32

import pytest
from hypothesis import Phase, settings
from trio._core import _run as trio_run

from examples.orders.postgres import PostgresMissing, postgres_server
from nsqext.broker import Cluster
from nsqext.broker.listeners import Ports
from nsqext.types import Address
from tests.support.forked_workers import fork_workers
from tests.support.missing import skip_without

EVERY_LOOP: dict[str, tuple[str, dict[str, Any]]] = {"asyncio": ("asyncio", {"use_uvloop": False})}
"""Event loops by name."""
if find_spec("uvloop") is not None:
    EVERY_LOOP["asyncio+uvloop"] = ("asyncio", {"use_uvloop": True})
EVERY_LOOP["trio"] = ("trio", {})

_EVERY_LOOP_IN = ("stories", "transport")
"""Folders whose tests run on every event loop: of what uses sockets itself, and of clients as users write them."""

WATCHING_LOOPS = {name: loop for name, loop in EVERY_LOOP.items() if name != "trio"}
"""Event loops that keep a socket registered."""

# in continuous integration, only a test that needs one of these servers may be skipped
_ALLOWED_SKIPS = (
    "NSQEXT_TEST_PICTURES",
    "NSQEXT_TEST_LOOKUPD",
    "NSQEXT_TEST_NSQD",
    "NSQEXT_TEST_REDESIGNED_PROGRAMS",
    "NSQEXT_TEST_ORIGINAL_PROGRAMS",
    "NSQEXT_TEST_KILL_LEADER",
    "NSQEXT_TEST_DELTA_PACKAGE",
    "NSQEXT_TEST_ICEBERG_PACKAGE",
)

gc.disable()  # until the tests are collected

# the same examples in each run; 40 found the same mutants of lookup and key ranges as 100
_EXAMPLES = 40

settings.register_profile("ci", max_examples=_EXAMPLES, derandomize=True, deadline=None)
settings.register_profile(
    "mutate",
    settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


_MEMORY = Path("/dev/shm")
_ENOUGH = 4 << 30


def _use_memory_for_temporary_files() -> None:
    """Keep temporary files in memory unless TMPDIR is set: servers and Spark rename and sync files all the time.

    A small file system in memory, as in most containers, and one that programs cannot be run from, are not used.
    """
    if "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK):
        return
    if shutil.disk_usage(_MEMORY).free >= _ENOUGH and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        tempfile.tempdir = os.environ["TMPDIR"] = str(_MEMORY)


_use_memory_for_temporary_files()


@pytest.fixture(scope="module", params=list(EVERY_LOOP.values()), ids=list(EVERY_LOOP))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The event loop of a test marked with ``anyio``."""
    return request.param


def _on_every_loop(name: str) -> bool:
    """Return whether a test is run on each event loop, as all are that have a real server."""
    real = os.environ.get("NSQEXT_TEST_LOOKUPD") or os.environ.get("NSQEXT_TEST_NSQ_LOOKUPD")
    every = real or os.environ.get("NSQEXT_TEST_LOOPS") == "every"
    return bool(every) or any(part in _EVERY_LOOP_IN for part in Path(name).parts)


def _loop_of(name: str) -> str:
    """Return the event loop of a test, which its name decides: half of the tests run on trio.

    Above the sockets uvloop differs from asyncio in speed alone, and the tests of blocking clients and of Spark run
    on it. It takes the place of asyncio in tests of contracts, because nearly all other tests run on asyncio.
    """
    asyncio = "asyncio+uvloop" if "contract" in Path(name).parts and "asyncio+uvloop" in EVERY_LOOP else "asyncio"
    return ("trio", asyncio)[crc32(name.encode()) % 2]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on one of the event loops of its fixture, unless it is run on each."""
    name = metafunc.definition.nodeid
    fixtures = metafunc._arg2fixturedefs.get("anyio_backend", ())
    parametrized = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if not fixtures or fixtures[-1].params is None or "anyio_backend" in parametrized:
        return  # the test, its file or its folder has chosen
    if _on_every_loop(name):
        return
    loop = _loop_of(name)
    mark = pytest.mark.parametrize("anyio_backend", [EVERY_LOOP[loop]], ids=[loop], indirect=True)
    metafunc.definition.add_marker(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the name of a test decide in which order trio runs tasks, so that a failure is the same in each run.

    Another ``NSQEXT_TEST_SEED`` gives another order; otherwise trio draws it again.
    """
    trio_run._r.seed(os.environ.get("NSQEXT_TEST_SEED", "") + item.nodeid)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Find what a file has left in reference cycles, such as sockets, at the last of its tests; what stays is kept."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A redesigned cluster for the tests of a module, with ``NODES`` nodes; each test uses topics of its own."""
    with Cluster(getattr(request.module, "NODES", 1)) as running:
        yield running


@pytest.fixture(scope="module")
def redesigned() -> Iterator[Cluster]:
    """A redesigned cluster of three nodes, for the tests of a module."""
    with Cluster(nodes=3) as running:
        yield running


@pytest.fixture(scope="module")
def original() -> Iterator[Cluster]:
    """An original cluster of two nodes, for the tests of a module."""
    with Cluster(nodes=2, generation="original") as running:
        yield running


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A new topic with two partitions, extend support and the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, extend=True, channels=["ch"])
    return name


@pytest.fixture
def closed_address() -> Iterator[Address]:
    """An address without a listener, reserved while the test runs."""
    ports = Ports()
    yield ports.take(Address("127.0.0.1", 0))
    ports.release()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server of PostgreSQL for the tests of a process; without its programs the test is skipped."""
    with ExitStack() as stack:
        try:
            address = stack.enter_context(postgres_server())
        except PostgresMissing:
            skip_without("PostgreSQL", "postgresql")
        yield address


_ROOT = Path(__file__).parents[1]
_LONG = (
    "tests/transactions/test_failures.py",
    "tests/integrations/celery/test_worker.py",
    "tests/campaigns/soak/test_tasks.py",
    "tests/docs/test_snippets.py",
    "tests/cli/test_every_command.py",
    "tests/stories/test_orders.py",
    "tests/spark/test_exactly_once.py",
    "tests/campaigns/simulation/test_schedules.py",
    "tests/contract/test_delays.py",
    "tests/docs/test_migration.py",
    "tests/docs/test_examples.py",
    "tests/campaigns/soak/test_bank.py",
    "tests/campaigns/soak/test_service.py",
    "tests/campaigns/soak/test_soak.py",
    "tests/interop/test_clients.py",
    "tests/delays/test_kill.py",
    "tests/web/test_browser.py",
    "tests/contract/test_key_tags_kills.py",
    "tests/transactions/test_boundaries.py",
    "tests/transactions/test_bank.py",
    "tests/cli/messages/test_relay_and_trace.py",
    "tests/cli/messages/test_client_commands.py",
    "tests/cli/servers/test_programs.py",
    "tests/cli/workers/test_run.py",
    "tests/stories/test_migrated_services.py",
    "tests/testing/test_plugin.py",
    "tests/contract/test_consume.py",
    "tests/client/consumer/test_key_failover.py",
    "tests/client/consumer/subscriptions/test_topics.py",
    "tests/test_conftest.py",
    "tests/campaigns/simulation/test_simulate.py",
    "tests/campaigns/simulation/test_delays.py",
    "tests/campaigns/simulation/test_key_owners.py",
    "tests/integrations/celery/test_transport.py",
    "tests/transactions/test_handled_ranges.py",
    "tests/transactions/test_relay.py",
    "tests/transactions/test_relay_leases.py",
    "tests/cli/test_completion.py",
    "tests/admin/test_admin.py",
    "tests/stories/test_move_a_cluster.py",
    "tests/stories/test_postgres.py",
)
"""Files that take longest; one that was started last would be waited for."""

_SPREAD = ("tests/docs/test_snippets.py", "tests/campaigns/simulation/test_schedules.py")
"""Files whose tests share nothing, and run in any worker."""


@cache
def _uses_spark(file: str) -> bool:
    """Return whether a test file takes the fixture of the Spark session."""
    path = _ROOT / file
    text = path.read_text(encoding="utf-8") if file.startswith("tests/spark/") and path.is_file() else ""
    return "spark: SparkSession" in text or 'usefixtures("spark")' in text


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the tests with a Spark session first, because they take longest, and then other long files.

    In a parallel run the rest is mixed: all workers would wait for timers at once in the files of `contract/`.
    """
    order = {file: number for number, file in enumerate(_LONG)}
    parallel = hasattr(config, "workerinput")

    def rank(item: pytest.Item) -> tuple[int, int]:
        file = _file_of(item.nodeid)
        if _uses_spark(file):
            return -1, 0
        known = order.get(file)
        return (known, 0) if known is not None else (len(order), crc32(file.encode()) if parallel else 0)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Exclude the collected objects from garbage collection, which would take longer than most tests.

    With the usual threshold, 700 objects, tests that parse all sources spent half of their time on it.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start three workers for each core, because tests wait for sockets and timers half of their time.

    With a fourth a run was not shorter, and two tests failed that pass alone.
    """
    return min(3 * (os.cpu_count() or 1), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers; those that measure coverage import the package themselves, because its lines are counted."""
    if config.rootpath == _ROOT and sys.platform == "linux" and not config.getoption("cov_source", None):
        fork_workers(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run a file in one worker, because its tests share a cluster; and files with a Spark session, which share Java."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    files = LoadFileScheduling(config, log)

    def scope(nodeid: str) -> str:
        file = _file_of(nodeid)
        if _uses_spark(file):
            return "tests/spark"
        return nodeid if file in _SPREAD else file

    files._split_scope = scope
    return files


_NICENESS = 4


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Leave the processor to the worker with the tests of Spark, whose files run one after the other."""
    if hasattr(session.config, "workerinput") and any(_uses_spark(_file_of(item.nodeid)) for item in session.items):
        session.config.pluginmanager.register(_Precedence())


class _Precedence:
    """Makes a worker wait for that one, unless its own first test is of Spark."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        item.config.pluginmanager.unregister(self)
        if not _uses_spark(_file_of(item.nodeid)):
            os.nice(_NICENESS)


_MISSING = re.compile(r"(?:Skipped: )?(?P<what>.+) is missing: (?P<command>apt-get install [^'\")]+)")


def _skips(config: pytest.Config) -> list[tuple[str, str]]:
    """Return test and reason of each skip."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, pytest.TerminalReporter):
        return []
    reports = reporter.stats.get("skipped", [])
    return [(r.nodeid, r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr)) for r in reports]


def _unexpected_skips(config: pytest.Config) -> list[str]:
    if os.environ.get("CI") != "true":
        return []
    return [
        f"{test}: {reason}" for test, reason in _skips(config) if not any(name in reason for name in _ALLOWED_SKIPS)
    ]


def _left_out(config: pytest.Config) -> str:
    """Return a line with the programs that were missing, the tests of each, and what installs them."""
    found = Counter(match.group("what", "command") for _, reason in _skips(config) if (match := _MISSING.match(reason)))
    parts = [f"{count} without {what} ({command})" for (what, command), count in sorted(found.items())]
    return f"tests left out: {', '.join(parts)}" if parts else ""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run in continuous integration if a test was skipped without need."""
    skips = _unexpected_skips(session.config)
    cache = getattr(session.config, "cache", None)  # missing with -p no:cacheprovider
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("nsqext/unexpected_skips", skips)  # .ci/again
    if session.exitstatus == pytest.ExitCode.OK and skips:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Print the skips that made the run fail, and last what the programs that are not installed left out."""
    yield
    for line in _unexpected_skips(config):
        terminalreporter.write_line(f"ERROR skipped with CI=true: {line}", red=True)
    if left_out := _left_out(config):
        terminalreporter.write_line(left_out, yellow=True)
