"""``nsqext app schema``: the document of AsyncAPI that describes an app."""

from __future__ import annotations

from typing import Annotated

import orjson

from nsqext.cli.apps import described
from nsqext.cli.command import command, examples
from nsqext.cli.parameters import Argument, CommandGroup, Option

app: CommandGroup = CommandGroup()


@app.command("schema")
@examples("nsqext app schema shop:app", "nsqext app schema shop:app --title Shop --version 2.1 > shop.json")
@command
def schema(
    place: Annotated[str, Argument(metavar="APP", help="MODULE:APP, found from the current folder.")],
    title: Annotated[str | None, Option(help="Name of the service. (default: the module)")] = None,
    version: Annotated[str, Option(help="Version of the service.")] = "1.0.0",
) -> None:
    """Print what an app receives and sends as a document of AsyncAPI 3.0, in JSON.

    It has topics, bodies, headers, keys and dead letters. The app is imported, but does not run.
    """
    found = described(place)
    found["info"] |= {"version": version} | ({} if title is None else {"title": title})
    print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode(), flush=True)
