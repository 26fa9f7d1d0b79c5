"""Settings of the lookup service are checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nsqext.errors import InvalidSetting
from nsqext.lookup.options import LookupOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("poll_interval", 0),
        ("poll_interval", math.nan),
        ("request_timeout", -1.0),
        ("retry_failed", 0.0),
        ("straggler_timeout", -0.1),
        ("max_pause", -1),
        ("poll_jitter", 1.0),
        ("poll_jitter", -0.1),
        ("max_failures", 0),
        ("max_answer_size", 0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}={value!r}"):
        LookupOptions(**{name: value})


def test_the_bounds_are_allowed() -> None:
    assert LookupOptions(poll_jitter=0, straggler_timeout=0, max_pause=0, max_failures=1).max_failures == 1
