"""The command line: ``nsqext COMMAND …`` or ``python -m nsqext COMMAND …``.

Each command is a module of its own, imported when it is asked for; its ``run`` is a function with typer's annotations.
``nsqd`` and ``nsqlookupd`` read the original programs' flags themselves and start without typer.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

__all__ = ("COMMANDS", "PROGRAMS", "main")

COMMANDS: dict[str, str] = {
    "bench": "nsqext.cli.bench",
    "broker": "nsqext.cli.broker",
    "demo": "nsqext.cli.demo",
    "key-ranges": "nsqext.cli.key_ranges",
    "lookup": "nsqext.cli.lookup",
    "pub": "nsqext.cli.pub",
    "run": "nsqext.cli.run",
    "spark": "nsqext.cli.spark",
    "tail": "nsqext.cli.tail",
    "topic": "nsqext.cli.topic",
    "web": "nsqext.cli.web",
}
"""Commands and their modules."""

PROGRAMS: dict[str, str] = {
    "nsqd": "nsqext.cli.nsqd",
    "nsqlookupd": "nsqext.cli.nsqlookupd",
}
"""Stand-ins for the original programs; ``main(arguments)`` of these modules gets the arguments as they are."""


def _fail(text: str) -> NoReturn:
    print(f"nsqext: {text}", file=sys.stderr)
    raise SystemExit(2)


def _end_early(number: int, frame: object) -> NoReturn:
    """End the process with status 0 on a signal before the servers run, as the original programs do."""
    raise SystemExit(0)


def _typer_app(names: Sequence[str]) -> Callable[..., object]:
    try:
        import typer
    except ModuleNotFoundError:
        _fail("the command line needs typer and rich: pip install 'nsqext[cli]'")
    app = typer.Typer(
        name="nsqext",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="NSQ: cluster, client and tools; `nsqd` and `nsqlookupd` stand in for the original programs.",
    )

    def tell(asked: bool) -> None:
        if asked:
            from nsqext._version import __version__

            print(f"nsqext {__version__}")
            raise typer.Exit

    @app.callback()
    def _group(
        version: bool = typer.Option(
            False, "--version", callback=tell, is_eager=True, help="Tell the version and end."
        ),
    ) -> None:
        """Keep a single command a command of its own."""

    for name in names:
        app.command(name)(import_module(COMMANDS[name]).run)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the words behind ``nsqext``; those of the process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    program = PROGRAMS.get(words[0]) if words else None
    if program is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end_early)
        import_module(program).main(words[1:])
        return
    chosen = [words[0]] if words and words[0] in COMMANDS else list(COMMANDS)
    from nsqext.errors import NsqError

    try:
        _typer_app(chosen)(words)
    except (NsqError, OSError) as error:
        _fail(str(error))
