"""The manifests for KEDA have fields that it knows, and queries of series that exist."""

from __future__ import annotations

import re

import pytest

from tests.support.programs import ROOT
from tests.support.series import all_series

_PAGE = (ROOT / "docs" / "howto" / "scale-workers.md").read_text(encoding="utf-8")
_MANIFESTS = re.findall(r"^```yaml\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^( *)(- )?(\w+):(?: (.+))?$")

# the part of KEDA's definition that the page uses: the fields of ScaledObject in config/crd/bases and the parameters of
# triggers in schema/generated/scalers-schema.yaml of github.com/kedacore/keda; parameters are texts
_NUMBERS = {
    f"spec.{name}"
    for name in (
        *("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"),
        *("fallback.failureThreshold", "fallback.replicas"),
    )
}
_TEXTS = {"apiVersion", "kind", "metadata.name", "spec.scaleTargetRef.name", "spec.triggers.type", "spec.triggers.name"}
_REQUIRED = {"apiVersion", "kind", "metadata.name", "spec.scaleTargetRef.name", "spec.triggers.type"}
_PARAMETERS = {  # required, further ones
    "prometheus": ({"serverAddress", "query", "threshold"}, {"activationThreshold", "ignoreNullValues"}),
    "nsq": ({"nsqLookupdHTTPAddresses", "topic", "channel"}, {"depthThreshold", "activationDepthThreshold"}),
}


def fields(manifest: str) -> list[tuple[str, str]]:
    """Return the path and the text of every value, in the order of the lines."""
    found, parents = list[tuple[str, str]](), list[tuple[int, str]]()
    for line in manifest.splitlines():
        match = _LINE.match(line)
        assert match is not None, line
        indent, item, name, value = match.groups()
        depth = len(indent) + len(item or "")
        parents = [parent for parent in parents if parent[0] < depth - (2 if item else 0)]
        if value is None:
            parents.append((depth, name))
        else:
            found.append((".".join([*(parent for _, parent in parents), name]), value))
    return found


def test_the_fields_are_those_of_keda() -> None:
    manifest, triggers = (fields(text) for text in _MANIFESTS)
    further = [(f"spec.{path}", value) for path, value in triggers]
    assert {path for path, _ in manifest} >= _REQUIRED
    kinds = list[str]()
    parameters = list[set[str]]()
    for path, value in manifest + further:
        if path == "spec.triggers.type":
            kinds.append(value)
            parameters.append(set())
        if path.startswith("spec.triggers.metadata."):
            parameters[-1].add(path.rpartition(".")[2])
            assert not re.fullmatch(r"[\d.]+|true|false", value), f"{path} must be quoted: it is a text"
        else:
            assert path in _NUMBERS | _TEXTS, path
            assert value.isdecimal() == (path in _NUMBERS), path
    for kind, names in zip(kinds, parameters, strict=True):
        required, optional = _PARAMETERS[kind]
        assert required <= names <= required | optional, kind
    assert set(kinds) == _PARAMETERS.keys()


@pytest.mark.anyio
async def test_the_queries_name_series_and_labels_that_exist() -> None:
    known = await all_series()
    queries = re.findall(r"^(?: +query: )?(sum\(.+\))$", _PAGE, re.MULTILINE)
    assert len(queries) == 3
    for query in queries:
        first = re.findall(r"\b(?:nsqext|nsqd|channel)_\w+", query)[0]
        matched = set(re.findall(r'[{,] ?(\w+)="', query))
        assert matched == {"topic", "channel"}
        assert matched <= known[first], query
    named = set(re.findall(r"\b(?:nsqext|nsqd)_\w+|\bchannel_\w+", _PAGE))
    assert named <= known.keys()
