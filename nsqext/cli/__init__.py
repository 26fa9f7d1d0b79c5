"""The command line: ``nsqext COMMAND …`` or ``python -m nsqext COMMAND …``.

A command's module is imported when the command is called. It has a function with annotated parameters, or a group of
commands; typer parses what `nsqext.cli.parameters.read_words` does not. ``nsqd`` and ``nsqlookupd`` have the original
programs' flags.

Exit codes: 0 success; 1 a failed check or start of a program; 2 any other error, with one line on standard error; 3 an
app that cannot start; 130 ^C; 143 SIGTERM before the end that ``--until-end`` waits for.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:  # imports take as long as Python's start; a signal before their end kills the process
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ("COMMANDS", "PROGRAMS", "main")

COMMANDS: dict[str, tuple[str, str]] = {
    "pub": ("nsqext.cli.messages.pub:run", "Publish messages: arguments, lines, files, CSV or JSON lines."),
    "tail": ("nsqext.cli.messages.tail:run", "Print the messages of a topic."),
    "record": ("nsqext.cli.files.record:run", "Write the messages of a topic to files, at least once."),
    "replay": ("nsqext.cli.files.replay:run", "Publish the messages of recorded files."),
    "export": (
        "nsqext.cli.files.export:run",
        "Write the stored messages of a topic to Parquet, CSV or JSON lines.",
    ),
    "import": ("nsqext.cli.files.import_file:run", "Publish the messages of a file of `nsqext export`."),
    "topic": ("nsqext.cli.admin.topic:app", "List, show, create, change and delete topics."),
    "channel": ("nsqext.cli.admin.channel:app", "List, create, change, move and delete channels."),
    "node": ("nsqext.cli.admin.node:app", "List and remove nodes, disable writes, set log levels and options."),
    "stats": ("nsqext.cli.admin.stats:run", "Show depth, lag, messages and consumers of topics and channels."),
    "lag": ("nsqext.cli.admin.lag:run", "Show the messages that channels have not finished; check a limit."),
    "top": ("nsqext.cli.admin.stats:top", "Watch channels in a table that is sorted by key press."),
    "doctor": ("nsqext.cli.admin.doctor:run", "Diagnose a cluster: report problems and how to solve them."),
    "check": ("nsqext.cli.admin.doctor:check", "Probe the health of a cluster, topic or channel: exit code 0 or 1."),
    "lookup": (
        "nsqext.cli.admin.topic:lookup",
        "Show lookup nodes, nsqd nodes and topics, or the partitions of a topic.",
    ),
    "relay": (
        "nsqext.cli.messages.relay:run",
        "Publish the messages of a topic to another topic, or send them to a URL.",
    ),
    "delay": ("nsqext.cli.messages.delay:app", "Publish delayed messages when they are due; list and cancel them."),
    "outbox": (
        "nsqext.cli.messages.outbox:app",
        "Publish the messages of an outbox in a database; show what waits in it.",
    ),
    "trace": ("nsqext.cli.messages.tail:trace", "Find a message by its trace id or message id."),
    "deadletters": (
        "nsqext.cli.messages.relay:deadletters",
        "Publish dead letters to the topics where they were rejected.",
    ),
    "config": ("nsqext.cli.config:app", "Manage contexts: named connection settings."),
    "key-ranges": (
        "nsqext.cli.admin.key_ranges:run",
        "Show ranges, rates and the replay set of a key_failover channel.",
    ),
    "bench": ("nsqext.cli.messages.bench:run", "Publish messages, then consume them, and report the rates."),
    "demo": ("nsqext.cli.demo.demo:run", "Publish and consume a day of flights, and check what was received."),
    "spark": ("nsqext.cli.admin.spark:run", "List and delete the anchor channels of Spark's streaming queries."),
    "broker": ("nsqext.cli.servers.broker:run", "Run an NSQ cluster in one process, of either generation."),
    "web": ("nsqext.cli.servers.web:run", "Serve pages of topics, channels, consumers and nodes."),
    "app": (
        "nsqext.cli.workers.schema:app",
        "Describe what an app receives and sends, as AsyncAPI.",
    ),
    "run": ("nsqext.cli.workers.run:run", "Run an app in worker processes, restarted when they end."),
}
"""Function or group, and one-line description, of each command."""

PROGRAMS: dict[str, str] = {"nsqd": "nsqext.cli.servers.nsqd", "nsqlookupd": "nsqext.cli.servers.nsqlookupd"}
"""Replacements of the original programs; ``main(arguments)`` of these modules parses the arguments."""

# commands that import nothing of their users, whose modules might have work for the end of the process
_SHORT = ("nsqext.cli.messages.", "nsqext.cli.files.", "nsqext.cli.admin.")

# names of commands in other programs
_OTHER_NAMES = {
    "produce": "pub",
    "publish": "pub",
    "send": "pub",
    "consume": "tail",
    "read": "tail",
    "subscribe": "tail",
}

# the package's extra with each module
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "shellingham": "cli",
    "starlette": "broker",
    "uvicorn": "broker",
    "re2": "broker",
    "cramjam": "broker",
    "pyspark": "spark",
    "pyarrow": "spark",
    "uvloop": "speed",
    "prometheus_client": "prometheus",
    "opentelemetry": "otel",
}


def _unknown(name: str) -> NoReturn:
    from nsqext.arguments import suggest

    likely = _OTHER_NAMES.get(name.lower()) or suggest(name, (*COMMANDS, *PROGRAMS))
    guess = f"did you mean `nsqext {likely}`? " if likely else ""
    _fail(f"there is no command {name!r}: {guess}`nsqext --help` lists all")


def _fail(text: str) -> NoReturn:
    from nsqext.errors import escaped

    print(f"nsqext: {escaped(text)}", file=sys.stderr)
    raise SystemExit(2)


def _end_early(number: int, frame: object) -> NoReturn:
    """End the process with status 0 on a signal before the servers run, as the original programs do.

    An exception would be lost in a finalizer, and crash extension modules that are being imported.
    """
    os._exit(0)


def _replace_closed_streams() -> None:
    """Read nothing from a closed standard input, and write nothing to a closed standard error.

    A socket would get its number, and ``print`` would write errors to standard output.
    """
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _leave() -> NoReturn:
    """End the process with status 0, without the 30 to 80 ms in which the interpreter would delete its modules."""
    from contextlib import suppress

    with suppress(OSError):  # the reader has closed the pipe
        sys.stderr.flush()
    os._exit(0)


def _discard_unwritten() -> None:
    """Discard output that cannot be written: Python would print an error and change its status at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: Sequence[str], *, own: bool) -> None:
    """Run a command; typer, whose import is slow, handles only unusual words, help and errors.

    Args:
        own: whether the process is of the command alone.
    """
    from nsqext.cli.parameters import COMPLETE, CommandGroup, read_words

    if words and words[0] in COMMANDS and COMPLETE not in os.environ:
        module, _, member = COMMANDS[words[0]][0].partition(":")
        function, rest = getattr(import_module(module), member), words[1:]
        if isinstance(function, CommandGroup):
            function, rest = function.commands.get(rest[0] if rest else ""), rest[1:]
        values = None if function is None else read_words(function, rest, os.environ)
        if values is not None:
            if own:
                _collect()
            function(**values)
            if own and module.startswith(_SHORT):
                sys.stdout.flush()
                _leave()
            raise SystemExit(0)
    from nsqext.cli.typer_app import run_typer

    if own:
        _collect()
    run_typer(COMMANDS, words)


def _collect() -> None:
    """Collect garbage from now on, but never what was imported."""
    gc.freeze()
    gc.enable()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default of the process; ``arguments`` follow ``nsqext``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _replace_closed_streams()
    program = PROGRAMS.get(words[0]) if words else None
    if program is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end_early)
        import_module(program).main(words[1:])
        if arguments is None:
            _leave()
        return
    if sys.stdout is None:
        _fail("standard output is closed: nothing can be printed")
    if words == ["--version"]:
        from nsqext._version import __version__

        print(f"nsqext {__version__}")
        return
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        _unknown(words[0])
    if arguments is None:
        gc.disable()  # imports make no garbage, and collections take a tenth of their time
    from nsqext.errors import NsqError

    try:
        _run(words, own=arguments is None)
    except KeyboardInterrupt:  # during imports
        raise SystemExit(130) from None
    except OSError as error:
        _discard_unwritten()
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            raise SystemExit(1) from None
        _fail(str(error))
    except NsqError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this command needs {error.name}: pip install 'nsqext[{extra}]'")
