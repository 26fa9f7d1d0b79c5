"""Each target on what was found before, and for a moment on damaged inputs; `make fuzz` runs them for longer."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.campaigns.fuzz.inputs import CORPUS, damaged_inputs, kept_inputs
from tests.campaigns.fuzz.targets import TARGETS

_MEMORY = 64 << 20
KEPT = [path for name in TARGETS for path in kept_inputs(name)]


@pytest.mark.parametrize("path", KEPT, ids=[f"{path.parent.name}-{path.name}" for path in KEPT])
def test_inputs_that_failed_once_pass(path: Path) -> None:
    tracemalloc.start()
    try:
        TARGETS[path.parent.name].run(path.read_bytes())
        assert tracemalloc.get_traced_memory()[1] < _MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("name", list(TARGETS))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_inputs_raise_documented_errors_only(name: str, data: st.DataObject) -> None:
    TARGETS[name].run(data.draw(damaged_inputs(name, TARGETS[name])))


@pytest.mark.parametrize("name", list(TARGETS))
def test_seeds_are_read(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)


def test_every_kept_input_belongs_to_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)


_VALUES: list[Any] = ["x", None, -1, 1, 2**63 - 1, 1e300, 1.5, [], {}, [1], {"a": 1}, True, [["x", 2, 3]], "../x"]


def _variants(document: Any) -> Iterator[Any]:
    """Yield a document with each of its parts replaced by each value, and with each member left out."""
    yield from _VALUES
    if isinstance(document, dict):
        for key, part in document.items():
            rest = {name: value for name, value in document.items() if name != key}
            yield rest
            for variant in _variants(part):
                yield rest | {key: variant}
    elif isinstance(document, list):
        for index, part in enumerate(document):
            for variant in _variants(part):
                yield [*document[:index], variant, *document[index + 1 :]]


@pytest.mark.parametrize("name", ["coordinator_state", "disk", "lookup_responses", "message_files"])
def test_every_member_of_a_document_may_be_anything(name: str) -> None:
    for seed in TARGETS[name].seeds:
        start = seed.find(b"{")
        for line in seed[start:].splitlines() if start >= 0 else ():
            for variant in _variants(orjson.loads(line)):
                TARGETS[name].run(seed[:start] + orjson.dumps(variant) + b"\n")
