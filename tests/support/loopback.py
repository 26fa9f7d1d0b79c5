"""The loopback address of a process, so that no client of another process connects to a server of a test.

A client that has lost its server tries the port again. When the system gives this port to a server in another worker,
the client reaches a server that expects one connection. On Linux every address that begins with 127 is local.
"""

from __future__ import annotations

import os
import sys

__all__ = ("own_host",)

_SHARED = "127.0.0.1"


def own_host(port: int = 0) -> str:
    """Return the host that a server of this process listens on; a given port is one that the test has reserved."""
    if port or sys.platform != "linux":
        return _SHARED
    process = os.getpid()  # less than 2**22
    return f"127.{64 + (process >> 16)}.{process >> 8 & 0xFF}.{process & 0xFF}"
