"""``nsqext deadletters``: publish dead letters to the topics where they were rejected."""

from __future__ import annotations

from typing import Annotated

import typer

from nsqext.cli.command import command, examples
from nsqext.cli.connection import Connection
from nsqext.cli.output import counted

app: typer.Typer = typer.Typer()


@app.callback()
def _group() -> None:
    """Make typer keep the name of a single command."""


@app.command("replay")
@examples("nsqext deadletters replay orders_dead")
@command
async def replay(
    connection: Connection,
    topic: Annotated[str, typer.Argument(help="The dead letter topic.")],
    channel: Annotated[str, typer.Option(help="Channel to consume; its position is the progress.")] = "replay",
    idle: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a dead letter after which the replay ends.")
    ] = 5.0,
) -> None:
    """Publish dead letters to the topics where they were rejected, with headers, tag, trace id and key.

    All channels of these topics receive the messages. After an interruption the next replay continues, and may publish
    one message twice.
    """
    from nsqext import Lookup, replay_dead_letters
    from nsqext.client.settings import connection_settings, settings_for
    from nsqext.lookup.lookup import lookup_schema

    values = connection.load().values
    lookup = Lookup(connection.lookup(), **settings_for(lookup_schema().own, values))
    own = settings_for(connection_settings(), values)
    count = await replay_dead_letters(topic, lookupd=lookup, channel=channel, idle=idle, **own)
    connection.show({"topic": topic, "replayed": count}, f"{counted(count, 'dead letter')} of {topic} replayed")
