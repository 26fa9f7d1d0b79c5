"""The AsyncAPI document of ``examples/orders``."""

from __future__ import annotations

import orjson

from docs import asyncapi_example
from tests.support.asyncapi import checked


def test_the_document_of_the_example_is_up_to_date() -> None:
    """``python -m docs.asyncapi_example`` writes it."""
    assert asyncapi_example.PATH.read_bytes() == asyncapi_example.document()
    found = checked(orjson.loads(asyncapi_example.PATH.read_bytes()))
    assert {name: one["action"] for name, one in found["operations"].items()} == {
        "bill": "receive",
        "confirm": "receive",
        "publish.orders": "send",
        "publish.bills": "send",
    }
