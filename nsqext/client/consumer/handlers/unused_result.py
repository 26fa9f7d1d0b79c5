"""Warn of results of handlers that nothing uses."""

from __future__ import annotations

import logging

logger: logging.Logger = logging.getLogger("nsqext.consumer")


class UnusedResult:
    """Warns once of a handler's unused result, unless the handler is annotated with ``-> None``."""

    __slots__ = ("_name", "_warns")

    def __init__(self, function: object) -> None:
        self._name: str = getattr(function, "__qualname__", type(function).__qualname__)
        self._warns: bool = getattr(function, "__annotations__", {}).get("return", True) not in (None, "None")

    def __call__(self, result: object) -> None:
        if self._warns:
            self._warns = False
            logger.warning(
                "the handler %s returned a value (%s), which is not used: publish it in the handler, or with "
                "@app.publisher(TOPIC) at a handler of an app; otherwise return None",
                self._name,
                type(result).__name__,
            )
