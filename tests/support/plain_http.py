"""Requests over HTTP without TLS.

The functions of httpx make a client for each request, which reads all trusted certificates: 27 ms of CPU.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpx

__all__ = ("get", "post")

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def get(url: str, **options: Any) -> httpx.Response:
    """Send GET with options of `httpx.Client.get`."""
    with httpx.Client(verify=_NO_CERTIFICATES, trust_env=False) as client:
        return client.get(url, **options)


def post(url: str, **options: Any) -> httpx.Response:
    """Send POST with options of `httpx.Client.post`."""
    with httpx.Client(verify=_NO_CERTIFICATES, trust_env=False) as client:
        return client.post(url, **options)
