"""The pytest plugin, in runs of pytest within this process; only what is imported needs an interpreter of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[2]

_INSTALLED = any(point.name == "nsqext" for point in entry_points(group="pytest11"))
_PLUGIN = [] if _INSTALLED else ["-p", "nsqext.testing.plugin"]


class _Imports:
    """Notes what a run imports."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}

    def pytest_unconfigure(self) -> None:
        """Note the modules that are loaded at the end of a run."""
        self.modules = {name: module for name, module in sys.modules.items() if name != "test_it"}


@pytest.fixture
def imports() -> Iterator[_Imports]:
    """Keep what runs import: pytester removes it, and a later import would make each of its classes a second time."""
    noted = _Imports()
    yield noted
    sys.modules.update(noted.modules)


@pytest.fixture
def run(imports: _Imports, pytester: pytest.Pytester) -> Callable[..., str]:
    """Return a function that runs a test file, and returns the output of pytest."""

    def run_pytest(code: str, *words: str, ini: str = "") -> str:
        sys.modules.update(imports.modules)
        pytester.makeini(f"[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n{ini}")
        pytester.makepyfile(test_it=code)
        words = ("-p", "no:cacheprovider", "--strict-markers", *_PLUGIN, *words)
        done = pytester.runpytest_inprocess(*words, plugins=[imports])
        return f"{done.stdout}\n{done.stderr}"

    return run_pytest


def outcome(output: str) -> dict[str, int]:
    """Return the counts of pytest's last line."""
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", output)}


def test_each_test_has_its_own_topic(run: Callable[..., str]) -> None:
    output = run(
        """
import pytest
from nsqext import sync

pytestmark = pytest.mark.nsq_topic(partitions=2, channels=["billing"])
seen = []

def test_one(nsq_cluster, nsq_topic):
    seen.append(nsq_topic)
    with sync.Producer(nsq_cluster.lookupd) as producer:
        producer.publish(nsq_topic, b"hi", partition=1)
    with sync.Consumer(nsq_topic, "billing", lookupd=nsq_cluster.lookupd) as consumer:
        assert next(consumer).body == b"hi"
    assert nsq_topic.startswith("test_one_")

@pytest.mark.nsq_topic(extend=True, partitions=3)
@pytest.mark.parametrize("letter", ["a/b" * 30])
def test_two(nsq_cluster, nsq_topic, letter):
    with sync.Producer(nsq_cluster.lookupd) as producer:
        producer.publish(nsq_topic, b"hi", tag="canary", partition=2)
        with pytest.raises(Exception, match="does not know|not stored"):
            sync.Producer.publish(producer, seen[0], b"gone")
    with sync.Admin(nsq_cluster.lookupd) as admin:
        assert admin.channels(nsq_topic) == ("billing",)
    nsq_cluster.delete_topic(nsq_topic)
    assert len(nsq_cluster.nodes) == 2
""",
        ini="nsqext_nodes = 2\n",
    )
    assert outcome(output) == {"passed": 2}, output


def test_it_works_with_default_topics_pytest_asyncio_and_anyio(run: Callable[..., str]) -> None:
    output = run(
        """
import pytest
import nsqext
from nsqext import sync
from nsqext.errors import NsqError

async def journey(cluster, topic):
    async with nsqext.Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"hi")
    async with nsqext.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        message = await anext(consumer)
        await message.finish()
        assert message.body == b"hi"

@pytest.mark.asyncio
@pytest.mark.nsq_topic(channels=["ch"])
async def test_asyncio(nsq_cluster, nsq_topic):
    await journey(nsq_cluster, nsq_topic)

@pytest.mark.anyio
@pytest.mark.nsq_topic(channels=["ch"])
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_anyio(nsq_cluster, nsq_topic, anyio_backend):
    await journey(nsq_cluster, nsq_topic)

def test_default(nsq_cluster, nsq_topic):
    with sync.Producer(nsq_cluster.lookupd) as producer:
        producer.publish(nsq_topic, b"hi")
    with sync.Consumer(nsq_topic, "default", lookupd=nsq_cluster.lookupd) as consumer:
        assert next(consumer).body == b"hi"

@pytest.mark.nsq_topic(channels=[])
def test_without_channels(nsq_cluster, nsq_topic):
    with sync.Producer(nsq_cluster.lookupd, timeout=0.5) as producer, pytest.raises(NsqError):
        producer.publish(nsq_topic, b"hi")
""",
    )
    assert outcome(output) == {"passed": 5}, output


def test_the_original_generation(run: Callable[..., str]) -> None:
    output = run(
        """
import re
from nsqext import sync

def test_it(nsq_cluster, nsq_topic):
    with sync.Producer(nsq_cluster.lookupd) as producer:
        assert producer.publish(nsq_topic, b"hi").partition is None
    with sync.Admin(nsq_cluster.lookupd) as admin:
        assert admin.channels(nsq_topic) == ()
    assert len(nsq_cluster.lookupd) == 2
    assert re.fullmatch("test_it_[0-9a-f]{8}", nsq_topic)
""",
        ini="nsqext_generation = original\nnsqext_nodes = 1\nnsqext_lookupds = 2\n",
    )
    assert outcome(output) == {"passed": 1}, output


def test_faults_that_a_test_leaves_are_its_error_and_no_error_of_the_next_test(run: Callable[..., str]) -> None:
    """The tests behind it failed instead, by time limits and missing nodes."""
    output = run(
        """
import pytest
from nsqext import sync

@pytest.fixture
def healed(nsq_cluster):
    yield
    nsq_cluster.faults.heal()

def test_a_heals(nsq_cluster, healed):
    nsq_cluster.faults.freeze("n1")

def test_b_leaves_faults(nsq_cluster, nsq_topic):
    nsq_cluster.kill("n1")
    nsq_cluster.kill("l1")
    nsq_cluster.faults.freeze("n2")
    nsq_cluster.faults.clock.stop()

def test_c_publishes(nsq_cluster, nsq_topic):
    assert nsq_cluster.faults.pending() == {}
    with sync.Producer(nsq_cluster.lookupd) as producer:
        producer.publish(nsq_topic, b"hi")

def test_d_stops_it(request):
    request.getfixturevalue("nsq_topic")
    request.getfixturevalue("nsq_cluster").stop()

def test_e_publishes(nsq_cluster, nsq_topic):
    with sync.Producer(nsq_cluster.lookupd) as producer:
        producer.publish(nsq_topic, b"hi")
""",
        ini="nsqext_nodes = 2\n",
    )
    assert outcome(output) == {"passed": 5, "errors": 2}, output
    assert re.findall("ERROR at teardown of (test_._)", output) == ["test_b_", "test_d_"]
    assert "nsq_cluster, which other tests share: n1: down; n2: frozen; l1: down; clock: stopped\n" in output
    assert "share: cluster: stopped\n" in output
    assert "Use a separate cluster: with Cluster() as cluster" in output


@pytest.mark.parametrize(
    ("statement", "left"), [("kill('n1')", "n1: down"), ("stop()", "cluster: stopped")], ids=["a fault", "a stop"]
)
def test_what_the_last_test_of_a_run_leaves_is_its_error(run: Callable[..., str], statement: str, left: str) -> None:
    """The cluster ends at its teardown; a test that failed among others passed alone."""
    output = run(f"def test_it(nsq_topic, nsq_cluster): nsq_cluster.{statement}", ini="nsqext_nodes = 2\n")
    assert outcome(output) == {"passed": 1, "error": 1}, output
    assert f"nsq_cluster, which other tests share: {left}\n" in output
    assert "Traceback" not in output


def test_mistakes_are_named(run: Callable[..., str]) -> None:
    test = "@pytest.mark.nsq_topic({})\ndef test_{}(nsq_topic): pass\n"
    code = "import pytest\n" + test.format('"orders"', "name") + test.format('colour="red"', "colour")
    output = run(code)
    assert outcome(output) == {"errors": 2}, output
    assert "takes keywords only" in output
    assert "UsageError: the mark nsq_topic: " in output
    assert "unexpected keyword argument 'colour'" in output
    assert "nsqext_nodes = 'many' is not a number" in run(code, ini="nsqext_nodes = many\n")


def test_the_plugin_is_cheap_to_load() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import nsqext.testing.plugin; "
        "print(sorted(name for name in set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=50
    )
    loaded = {name for name in eval(done.stdout) if name.startswith("nsqext")}  # noqa: S307 (our own list)
    assert loaded == {"nsqext", "nsqext._version", "nsqext.testing", "nsqext.testing.plugin"}


def test_markers_are_listed(run: Callable[..., str]) -> None:
    assert "@pytest.mark.nsq_topic(partitions=1" in run("", "--markers")
