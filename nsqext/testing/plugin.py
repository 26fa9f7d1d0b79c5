"""The pytest plugin: a cluster for the test run, and a new topic for each test that uses ``nsq_topic``.

pytest loads it automatically. The fixtures are synchronous, for blocking tests and tests of pytest-asyncio and anyio.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nsqext.broker import Cluster

__all__ = ("nsq_cluster", "nsq_topic")

_CLUSTER = pytest.StashKey["Cluster"]()
_MARKER = "nsq_topic"
_NAME = 40  # characters of the test's name in the topic's name; servers accept 64


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("nsqext_nodes", "nodes of the cluster of the fixture nsq_cluster", default="3")
    parser.addini("nsqext_lookupds", "lookup nodes of that cluster", default="1")
    parser.addini("nsqext_generation", "redesigned or original", default="redesigned")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(partitions=1, replicas=1, extend=False, ordered=False, channels=['default'], "
        "register_channels=False, dispatch=''): settings of the topic of the fixture nsq_topic",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves faults in the cluster that the next tests share; end these faults."""
    left: dict[str, list[str]] = {}
    try:
        ended = yield
    finally:
        cluster = item.config.stash.get(_CLUSTER, None)
        if cluster is not None:  # of any test: it may request the fixture while it runs
            left = _end_faults(cluster)
    _check_left(left)
    return ended


def _check_left(left: Mapping[str, Sequence[str]]) -> None:
    """Fail the test that has left faults."""
    if left:
        texts = "; ".join(f"{name}: {', '.join(faults)}" for name, faults in left.items())
        pytest.fail(
            f"the test leaves faults in nsq_cluster, which other tests share: {texts}\n"
            "Use a separate cluster: with Cluster() as cluster",
            pytrace=False,
        )


def _end_faults(cluster: Cluster) -> dict[str, list[str]]:
    """End the faults of a cluster, and return them."""
    from nsqext.errors import InvalidState

    try:
        left = cluster.faults.pending()
    except InvalidState:
        cluster.start()
        return {"cluster": ["stopped"]}
    if left:
        for name in [name for name, faults in left.items() if "down" in faults]:
            cluster.restart(name)
        cluster.faults.heal()
        cluster.faults.clock.run()
    return left


def _number(config: pytest.Config, name: str) -> int:
    text = str(config.getini(name))
    if not text.isdecimal():
        raise pytest.UsageError(f"{name} = {text!r} is not a number")
    return int(text)


@pytest.fixture(scope="session")
def nsq_cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A running cluster, shared by all tests of the run; needs the extra ``broker``.

    Set ``nsqext_nodes``, ``nsqext_lookupds`` and ``nsqext_generation`` in pytest's configuration. A test that kills
    nodes or injects faults uses a separate cluster, ``with Cluster() as cluster``: a test fails that leaves faults.
    """
    from nsqext.broker import Cluster

    generation = str(pytestconfig.getini("nsqext_generation"))
    nodes, lookupds = _number(pytestconfig, "nsqext_nodes"), _number(pytestconfig, "nsqext_lookupds")
    with Cluster(nodes, lookupds=lookupds, generation=generation) as cluster:
        pytestconfig.stash[_CLUSTER] = cluster
        yield cluster
        del pytestconfig.stash[_CLUSTER]
        _check_left(_end_faults(cluster))  # of the last test, at whose teardown the cluster ends


@pytest.fixture
def nsq_topic(nsq_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new topic for this test, which is deleted afterwards.

    ``@pytest.mark.nsq_topic(partitions=2, extend=True, channels=["billing"])`` has the arguments of
    `nsqext.broker.Cluster.create_topic`; for each argument the mark closest to the test applies. Without ``channels``,
    the redesigned NSQ gets the channel ``default``: it refuses publishes to a topic without channels.
    """
    from nsqext.errors import InvalidState, TopicNotFound
    from nsqext.protocol.names import DEFAULT_CHANNEL

    options: dict[str, object] = {}
    if str(request.config.getini("nsqext_generation")) == "redesigned":
        options["channels"] = [DEFAULT_CHANNEL]
    given: dict[str, object] = {}
    for mark in request.node.iter_markers(_MARKER):
        if mark.args:
            raise pytest.UsageError(f"the mark {_MARKER} takes keywords only, not {mark.args!r}")
        given = {**mark.kwargs, **given}
    options |= given
    name = f"{re.sub('[^a-zA-Z0-9_-]', '_', request.node.name)[:_NAME]}_{token_hex(4)}"
    try:
        nsq_cluster.create_topic(name, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise pytest.UsageError(f"the mark {_MARKER}: {error}") from error
    yield name
    try:
        nsq_cluster.delete_topic(name)
    except (TopicNotFound, InvalidState):  # the test has deleted it, or stopped the cluster, which is its error
        return
