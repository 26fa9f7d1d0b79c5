"""Inputs of the targets: files that are kept, and hypothesis strategies that damage them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from tests.campaigns.fuzz.targets import Target

__all__ = ("CORPUS", "damaged_inputs", "kept_inputs")

CORPUS = Path(__file__).parent / "corpus"
"""A folder for each target, with a file for each input that once was a finding."""


def kept_inputs(name: str) -> list[Path]:
    """Return the files of a target, in the order of their names."""
    return sorted((CORPUS / name).glob("*"))


@st.composite
def damaged_inputs(draw: st.DrawFn, name: str, target: Target) -> bytes:
    """Return a seed or a kept input of a target, with some ranges replaced by its words or by any bytes."""
    kept = [path.read_bytes() for path in kept_inputs(name)]
    data = draw(st.sampled_from([*target.seeds, *kept]))
    parts = st.sampled_from(target.words) | st.binary(max_size=8)
    for _ in range(draw(st.integers(0, 6))):
        at, size = draw(st.integers(0, len(data))), draw(st.sampled_from((0, 0, 1, 2, 8, 1000)))
        data = data[:at] + draw(parts) + data[at + size :]
    return data
