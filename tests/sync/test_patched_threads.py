"""Blocking clients in a process whose threads gevent or eventlet replaced."""

from __future__ import annotations

import _thread
import socket
import subprocess
import sys
from typing import Any

import pytest

from nsqext import sync
from nsqext.errors import InvalidState

_PROGRAM = """
from gevent import monkey
monkey.patch_all(**{patched!r})
from nsqext import sync
from nsqext.errors import InvalidState
try:
    sync.Producer("127.0.0.1:1").start()
except InvalidState as error:
    print(error)
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize(("module", "name"), [(_thread, "start_new_thread"), (socket, "socket")])
def test_they_are_refused(monkeypatch: pytest.MonkeyPatch, library: str, module: Any, name: str) -> None:
    monkeypatch.setattr(module, name, type(name, (), {"__module__": f"{library}.green"}))
    with pytest.raises(InvalidState, match=f"{library} has replaced {'sockets' if name == 'socket' else 'threads'}"):
        sync.Producer("127.0.0.1:1").start()


@pytest.mark.parametrize(("patched", "what"), [({}, "threads"), ({"thread": False}, "sockets")])
def test_gevent_itself_is_refused(patched: dict[str, bool], what: str) -> None:
    pytest.importorskip("gevent")
    program = [sys.executable, "-c", _PROGRAM.format(patched=patched)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.startswith(f"gevent has replaced {what}, "), ended.stderr
