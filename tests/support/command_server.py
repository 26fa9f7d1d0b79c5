"""Start `nsqext` commands and Python programs by forking, which saves the second of imports of a new interpreter.

``python -W error -m tests.support.command_server DESCRIPTOR MODULE...`` imports modules and receives requests from
`tests.support.command_line`, at connections to a socket that listens. The standard streams of the command are attached.
It returns the process id of the command and, at its end, its exit code. A first word that ends in ``.py`` is the path
of a program.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable, Hashable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from nsqext import cli

__all__ = ("LARGEST",)

LARGEST = 1 << 18
"""Largest size of a request in bytes."""

_LAZY = (
    *("anyio._backends._asyncio", "httpcore", "nsqext.broker", "nsqext.broker.standalone", "nsqext.web.app"),
    *("rich.live", "rich.progress", "pytest"),
)
"""Modules that commands import lazily, and that programs of the documentation import."""

_NOT_BEFORE = ("nsqext.cli.admin.spark",)  # its libraries start threads, which do not survive a fork


def serve(control: socket.socket, owner: int | None = None) -> dict[str, Any] | None:
    """Fork a process for each request. Returns the request in such a process, and None at the end.

    The end is that of ``control``, or of the pipe ``owner``; where ``control`` listens, that of all its connections.
    """
    listens = bool(control.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    clients: set[socket.socket] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ, control)
        if owner is not None:
            selector.register(owner, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = key.data
                if key.fd == owner:
                    return None
                if source is control and listens:
                    client, _ = control.accept()
                    clients.add(client)
                    selector.register(client, selectors.EVENT_READ, client)
                    continue
                if not isinstance(source, socket.socket):
                    selector.unregister(key.fileobj)
                    _report(key.fd, *key.data)
                    continue
                data, descriptors, _, _ = socket.recv_fds(source, LARGEST, 4, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    if source is control:
                        return None
                    selector.unregister(source)
                    source.close()
                    clients.remove(source)
                    if not clients and _is_unused(control):
                        _end_commands(selector)
                        return None
                    continue
                request: dict[str, Any] = json.loads(data)
                pid = os.fork()
                if pid == 0:
                    for other in selector.get_map().values():
                        if isinstance(other.data, tuple):
                            other.data[1].close()
                            os.close(other.fd)
                    for client in clients:
                        client.close()
                    _become(request, descriptors)
                    return request
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                reply = socket.socket(fileno=descriptors[3])
                reply.send(b"%d" % pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, reply))


def _is_unused(listener: socket.socket) -> bool:
    """Close a socket unless a connection to it is waiting; no other is made meanwhile, see `command_line`."""
    with Path(__file__).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([listener], [], [], 0)[0]:
            return False
        listener.close()
        return True


def _end_commands(selector: selectors.BaseSelector) -> None:
    """End commands that still run: the tests that would have ended them were killed."""
    running = [key.data[0] for key in selector.get_map().values() if isinstance(key.data, tuple)]
    for pid in running:
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def _report(watched: int, pid: int, reply: socket.socket) -> None:
    os.close(watched)
    _, status = os.waitpid(pid, 0)
    with reply, suppress(BrokenPipeError):  # its process has ended
        reply.send(b"%d" % os.waitstatus_to_exitcode(status))


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Set the streams, terminal, folder and environment of a command."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if request["leads"]:
        os.setsid()
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115 - as long as the process
        by_line = os.isatty(number) or number == 2
        setattr(sys, name, io.TextIOWrapper(raw, before.encoding, before.errors, line_buffering=by_line))


def run_file(file: str, *arguments: str) -> None:
    """Run a program as ``python -u FILE ARGUMENTS`` does."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [file, *arguments]
    sys.path[0] = str(Path(file).parent)
    runpy.run_path(file, run_name="__main__")


def end(code: int) -> None:
    """End the process as the interpreter does, but leave the memory that was frozen to the kernel.

    To delete every module costs more than most commands. What the command itself left open is still reported.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


def run_requests(run: Callable[[dict[str, Any]], None], owner: int | None = None) -> None:
    """Serve requests at the socket of the first argument, see `serve`; each forked process runs one, and ends."""
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        request = serve(control, owner)
    if request is None:
        return
    code: object = 0
    try:
        run(request)
    except SystemExit as error:
        code = error.code or 0
    if not isinstance(code, int):
        sys.exit(str(code))
    if not request["whole"]:
        with suppress(BrokenPipeError):  # the interpreter reports it
            end(code)
    sys.exit(code)


def remember_commands() -> None:
    """Make typer inspect the function of each command once, before the forks; the process of a command did it again
    for all commands of its group, which took half of its time."""
    import typer.main

    from nsqext.cli.typer_app import typer_app

    build: Callable[..., Any] = typer.main.get_command_from_info
    built: dict[Hashable, Any] = {}

    def remembered(command_info: Any, **options: Any) -> Any:
        fields = (getattr(command_info, name) for name in ("callback", "name", "help", "rich_help_panel"))
        key = (*fields, *sorted(options.items()))
        if key not in built:
            built[key] = build(command_info, **options)
        return built[key]

    typer.main.get_command_from_info = remembered
    for chosen in (None, *cli.COMMANDS):
        if chosen is None or cli.COMMANDS[chosen][0].partition(":")[0] not in _NOT_BEFORE:
            app: Any = typer_app(cli.COMMANDS, chosen)
            for app.rich_markup_mode in ("rich", None):
                typer.main.get_command(app)


def main() -> None:
    """Serve requests; in a forked process, run the command."""
    for path in [*(path.partition(":")[0] for path, _ in cli.COMMANDS.values()), *cli.PROGRAMS.values()]:
        if path not in _NOT_BEFORE:
            import_module(path)
    remember_commands()
    for name in (*_LAZY, *sys.argv[2:]):
        import_module(name)
    import_module("nsqext.http.client").without_certificates()
    # help of a group, and of a command with options, for whose types typer imports pydantic
    for command in (["topic", "--help"], ["delay", "list", "--help"]):
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            cli.main(command)
    run_requests(_run)


def _run(request: dict[str, Any]) -> None:
    """Run the command or program of a request in this process."""
    words: list[str] = request["words"]
    if words and words[0].endswith(".py"):
        run_file(*words)
    else:
        sys.argv = ["nsqext", *words]
        cli.main()


if __name__ == "__main__":
    main()
