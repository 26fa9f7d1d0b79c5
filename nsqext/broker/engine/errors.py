"""What the engine answers to a request that it does not grant."""

from __future__ import annotations

__all__ = ("Refusal",)


class Refusal(Exception):
    """A request that the engine refuses.

    Attributes:
        text: the words of the real server, without an error code: who asked knows which code it is.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
