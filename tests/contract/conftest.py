"""One cluster for all contract tests, with longer timeouts for a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from tests.support.cluster import (
    KILL,
    REAL,
    REAL_ORIGINAL,
    START,
    ClusterUnderTest,
    Killable,
    Original,
    Truncatable,
    killable_cluster,
    running_cluster,
    running_original,
    truncatable_cluster,
)

HERE = Path(__file__).parent
_PATIENT = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeouts: a real cluster needs a minute, and more on a busy machine, to assign leaders."""
    if REAL:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.timeout(_PATIENT), append=False)


@pytest.fixture(scope="session")
def cluster_under_test() -> Iterator[ClusterUnderTest]:
    """The embedded cluster, or the real one at NSQEXT_TEST_LOOKUPD."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def _led(request: pytest.FixtureRequest) -> None:
    """Begin the tests of a module once all nodes of the real cluster run, and lead what they led."""
    if REAL:
        request.getfixturevalue("cluster_under_test").wait_until_led()


@pytest.fixture(scope="session")
def embedded_original() -> Iterator[Original]:
    """The embedded original NSQ."""
    with running_original(real=False) as original:
        yield original


@pytest.fixture(scope="session")
def real_original() -> Iterator[Original]:
    """The original NSQ at NSQEXT_TEST_NSQ_LOOKUPD."""
    with running_original(real=True) as original:
        yield original


@pytest.fixture(params=["embedded", "real"] if REAL_ORIGINAL else ["embedded"])
def original(request: pytest.FixtureRequest) -> Original:
    """The embedded original NSQ, and the real one if available."""
    found: Original = request.getfixturevalue(f"{request.param}_original")
    return found


@pytest.fixture
def channel() -> str:
    """A channel name for this test only; the first subscription creates the channel."""
    return f"own_{token_hex(4)}"


@pytest.fixture
def killable(request: pytest.FixtureRequest) -> Iterator[Killable]:
    """A cluster with a topic of three replicas, whose nodes may be killed; the parameter is whether it is extended."""
    if REAL and not KILL:
        pytest.skip("NSQEXT_TEST_KILL_LEADER does not say how a node of the real cluster is killed")
    shared = _shared(request)
    with killable_cluster(extend=getattr(request, "param", False)) as cluster:
        yield cluster
    if shared is not None:
        shared.wait_until_led()


@pytest.fixture
def truncatable(request: pytest.FixtureRequest) -> Iterator[Truncatable]:
    """A cluster with a topic of one replica, whose leader loses messages."""
    if REAL and not (KILL and START):
        pytest.skip(
            "NSQEXT_TEST_KILL_LEADER and NSQEXT_TEST_START_NODE do not say how a real node is killed and started"
        )
    shared = _shared(request)
    with truncatable_cluster() as cluster:
        yield cluster
    if shared is not None:
        shared.wait_until_led()


def _shared(request: pytest.FixtureRequest) -> ClusterUnderTest | None:
    """Return the real cluster, of which a test kills a node."""
    return request.getfixturevalue("cluster_under_test") if REAL else None
