"""``nsqext config``: contexts, i.e. named connection settings."""

from __future__ import annotations

from typing import Annotated

from nsqext.cli.command import Yes, examples
from nsqext.cli.connection import (
    Contexts,
    Json,
    ServerAccess,
    confirm,
    contexts_file,
    load_contexts,
    load_settings,
    save_contexts,
)
from nsqext.cli.parameters import Argument, CommandGroup
from nsqext.client.settings import app_schema
from nsqext.errors import InvalidSetting
from nsqext.settings_text import redact_url

app: CommandGroup = CommandGroup()

Name = Annotated[str, Argument(help="Name of the context.")]


def _shown(url: str) -> str:
    return redact_url(url, app_schema().own)


@app.command("set")
@examples("nsqext config set prod 'nsq://lookup1:4161,lookup2:4161?tls=true'", "nsqext topic list --context prod")
def set_context(
    name: Name,
    url: Annotated[str, Argument(help="nsq://HOST:PORT,…?SETTING=VALUE&…, any setting of a client.")],
    yes: Yes = False,
) -> None:
    """Add or replace a context; the first becomes the current context."""
    found = load_settings(url, environ={})
    if not found.lookupd and not found.nsqd:
        raise InvalidSetting("the URL has no address", hint="write nsq://HOST:PORT")
    contexts = load_contexts()
    before = contexts.urls.get(name, url)
    if before != url:
        confirm(f"Replace the context {name}, which is {_shown(before)}?", yes=yes)
    save_contexts(Contexts({**contexts.urls, name: url}, contexts.current or name))
    ServerAccess().show({"context": name, "url": _shown(url)}, f"context {name} is {_shown(url)}, in {contexts_file()}")


@app.command("list")
@examples("nsqext config list")
def list_contexts(json: Json = False) -> None:
    """List the contexts, without secrets."""
    contexts = load_contexts()
    ServerAccess(json=json).table(
        ("context", "url", "current"),
        [
            {"context": name, "url": _shown(url), "current": name == contexts.current}
            for name, url in contexts.urls.items()
        ],
    )


@app.command("use")
@examples("nsqext config use prod")
def use(name: Name) -> None:
    """Select the current context: commands use it if neither options nor the environment have an address."""
    contexts = load_contexts()
    contexts.url(name)
    save_contexts(Contexts(contexts.urls, name))
    ServerAccess().show({"context": name, "current": True}, f"{name} is the current context")


@app.command("delete")
@examples("nsqext config delete prod --yes")
def delete(name: Name, yes: Yes = False) -> None:
    """Delete a context."""
    contexts = load_contexts()
    confirm(f"Delete the context {name}, which is {_shown(contexts.url(name))}?", yes=yes)
    urls = {other: url for other, url in contexts.urls.items() if other != name}
    save_contexts(Contexts(urls, None if contexts.current == name else contexts.current))
    ServerAccess().show({"context": name, "deleted": True}, f"context {name} is deleted")
