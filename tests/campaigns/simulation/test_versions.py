"""Simulations run with the versions whose private parts they know."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import nsqext
from nsqext.errors import InvalidState
from nsqext.testing import World, simulate
from nsqext.testing.simulation import private_parts

GUIDE = Path(nsqext.__file__).parents[1] / "docs" / "howto" / "simulate.md"


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    private_parts.check_versions.cache_clear()
    yield
    private_parts.check_versions.cache_clear()


@pytest.mark.parametrize("given", ["4.11.0", "4.17.0", "4.17rc1", "5.0", "3.9"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(
        "nsqext.testing.simulation.private_parts.version", lambda name: given if name == "anyio" else version(name)
    )

    async def scenario(world: World) -> None:
        raise AssertionError("the simulation began")

    with pytest.raises(InvalidState, match=rf"not tested with version {given}.*install anyio 4\.12 to 4\.16"):
        simulate(scenario, seeds=1)


@pytest.mark.parametrize("given", [(3, 10, 0), (3, 15, 0)])
def test_other_pythons_are_refused(monkeypatch: pytest.MonkeyPatch, given: tuple[int, ...]) -> None:
    monkeypatch.setattr("sys.version_info", given)
    with pytest.raises(InvalidState, match=r"private parts of asyncio.*use Python 3\.11 to 3\.14"):
        private_parts.check_versions()


def test_the_guide_names_the_versions() -> None:
    guide = " ".join(GUIDE.read_text(encoding="utf-8").split())
    stated = [f"{package} {lowest} to {highest}" for package, (lowest, highest) in private_parts.TESTED.items()]
    assert stated
    assert [one for one in stated if one not in guide] == []
