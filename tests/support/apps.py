"""Handlers for apps that are not the subject of their test."""

from __future__ import annotations

from nsqext import Message  # noqa: TC001 - the app reads the annotation


async def nothing(message: Message) -> None:
    """Finish a message."""
