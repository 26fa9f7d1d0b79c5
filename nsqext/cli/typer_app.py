"""The typer app: help, completion, errors, and command lines that `read_words` does not accept."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from nsqext.cli.parameters import COMPLETE, Argument, CommandGroup, Parameter, parameters_of

__all__ = ("run_typer", "typer_app", "typer_function", "typer_group")

_COMPLETION_TIMEOUT = 1.0  # seconds

_EPILOG = """\
First steps: `nsqext broker --web` runs a cluster with a web page, and prints commands to try in another terminal.

`nsqext nsqd -h` and `nsqext nsqlookupd -h` show the flags of these two programs.

Exit codes: 0 success; 1 a check failed, no message was found, or a server could not start; 3 the app of `nsqext run`
could not start; 2 any other error. 130 ended by ^C, except for tail, record, relays, run and the servers, which drain
and exit with 0. A signal before the end that --until-end waits for: 128 and its number.
"""

_PANELS = {
    "messages": "Messages",
    "files": "Recorded messages",
    "admin": "Topics, channels and nodes",
    "servers": "Servers and apps",
    "workers": "Servers and apps",
    "demo": "Servers and apps",
}
_LAST = "Settings"


def run_typer(commands: Mapping[str, tuple[str, str]], words: Sequence[str]) -> None:
    """Parse the words with typer; run, complete, or describe the command."""
    named = words
    if not words and COMPLETE in os.environ:
        named = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()[1:]
    chosen = named[0] if named and named[0] in commands else None
    typer_app(commands, chosen)(words, prog_name="nsqext")


def typer_app(commands: Mapping[str, tuple[str, str]], chosen: str | None) -> Callable[..., object]:
    """Return the typer app with the chosen command, whose module is imported; None for all descriptions."""
    app = typer.Typer(
        name="nsqext",
        no_args_is_help=True,
        # typer imports pydantic for options before a command
        add_help_option=chosen is None,
        add_completion=COMPLETE in os.environ,  # its own scripts fail at addresses in bash, and once in each zsh
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        help="NSQ: cluster, client and tools; `nsqd` and `nsqlookupd` replace the original programs.",
        epilog="\n\n".join(" ".join(paragraph.split("\n")) for paragraph in _EPILOG.split("\n\n")),
    )

    def print_version(asked: bool) -> None:
        if asked:
            from nsqext._version import __version__

            print(f"nsqext {__version__}")
            raise typer.Exit

    version = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
    )
    _add_options(app, version)
    for name, (path, summary) in commands.items():
        if name != chosen:
            panel = _PANELS.get(path.split(".")[2], _LAST)
            app.command(name, help=summary, rich_help_panel=panel)(_described)
            continue
        module, _, member = path.partition(":")
        found = getattr(import_module(module), member)
        if isinstance(found, CommandGroup):
            app.add_typer(typer_group(found), name=name, help=summary, no_args_is_help=True)
        else:
            app.command(name)(typer_function(found))
    return app


def _add_options(app: typer.Typer, version: Any) -> None:
    """Add the options before a command; typer adds the options of completion while the shell completes."""
    if COMPLETE in os.environ:

        @app.callback()
        def _completing(version: bool = version) -> None: ...

        return
    install = typer.Option(
        False,
        "--install-completion",
        callback=_install,
        is_eager=True,
        help="Complete commands in this shell, and exit.",
    )
    show = typer.Option(
        False, "--show-completion", callback=_show, is_eager=True, help="Print the script for this shell, and exit."
    )

    @app.callback()
    def _group(version: bool = version, install_completion: bool = install, show_completion: bool = show) -> None: ...


def _install(asked: bool) -> None:
    if asked:
        from nsqext.cli.completion import install_completion, running_shell

        print(f"{install_completion(running_shell())} is written: new shells complete commands of nsqext")
        raise typer.Exit


def _show(asked: bool) -> None:
    if asked:
        from nsqext.cli.completion import completion_script, running_shell

        print(completion_script(running_shell()), end="")
        raise typer.Exit


def _described() -> None:
    """Stand in for a command whose module is not imported."""


def typer_group(group: CommandGroup) -> typer.Typer:
    """Return a group of commands as typer's."""
    app = typer.Typer()

    @app.callback()
    def _group() -> None: ...

    for name, function in group.commands.items():
        app.command(name)(typer_function(function))
    return app


@functools.cache
def typer_function(function: Callable[..., object]) -> Callable[..., None]:
    """Return a command with typer's annotations."""
    annotations = {one.name: Annotated[one.type, _typer_info(one)] for one in parameters_of(function)}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**values)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=annotations[one.name]
            )
            for one in parameters_of(function)
        ]
    )
    run.__annotations__ = annotations
    return run


def _typer_info(parameter: Parameter) -> Any:
    declared = parameter.declared
    if isinstance(declared, Argument):
        complete = _complete_topics if parameter.name == "topic" else None
        return typer.Argument(help=declared.help, metavar=declared.metavar, autocompletion=complete)
    return typer.Option(
        *declared.names,
        help=declared.help,
        min=declared.min,
        max=declared.max,
        envvar=declared.envvar,
        rich_help_panel=declared.panel,
    )


def _complete_topics(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics with a prefix, for the shell's completion; empty without lookup."""
    import anyio

    from nsqext.cli.connection import ServerAccess
    from nsqext.lookup.client import LookupClient
    from nsqext.protocol.names import is_valid_topic

    given: dict[str, Any] = {name: context.params.get(name) for name in ("lookupd", "nsqd", "url", "context")}

    async def topics() -> list[str]:
        connection = ServerAccess(**given)
        async with LookupClient(connection.lookup(), connection.options().lookup) as client:
            with anyio.fail_after(_COMPLETION_TIMEOUT):
                found = await client.lists.topics()
                return [name for name in found if name.startswith(incomplete) and is_valid_topic(name)]

    with suppress(Exception):  # it would print into the command line
        return anyio.run(topics)
    return []
