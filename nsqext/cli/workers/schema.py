"""``nsqext app schema``: the document of AsyncAPI that describes an app."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from nsqext.cli.apps import described
from nsqext.cli.command import command, examples

app: typer.Typer = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep the name of the single command."""


@app.command("schema")
@examples("nsqext app schema shop:app", "nsqext app schema shop:app --title Shop --version 2.1 > shop.json")
@command
def schema(
    place: Annotated[str, typer.Argument(metavar="APP", help="MODULE:APP, found from the current folder.")],
    title: Annotated[str | None, typer.Option(help="Name of the service. (default: the module)")] = None,
    version: Annotated[str, typer.Option(help="Version of the service.")] = "1.0.0",
) -> None:
    """Print what an app receives and sends as a document of AsyncAPI 3.0, in JSON.

    It has topics, bodies, headers, keys and dead letters. The app is imported, and not run.
    """
    found = described(place)
    found["info"] |= {"version": version} | ({} if title is None else {"title": title})
    typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
