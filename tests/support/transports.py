"""How producers of contract tests publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from nsqext import Admin

if TYPE_CHECKING:
    from tests.support.cluster import Original

__all__ = ("Transport", "http_of_original", "over_tcp_and_http")

Transport = Literal["tcp", "http"]

over_tcp_and_http = pytest.mark.parametrize("transport", ["tcp", "http"])
"""Decorator of a test whose producers publish over TCP, and over HTTP."""


async def http_of_original(original: Original) -> list[str]:
    """Return the HTTP addresses of the nodes."""
    async with Admin(original.lookupd) as admin:
        return [str(node.http) for node in await admin.nodes()]
