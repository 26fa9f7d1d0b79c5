"""The error of engine and coordinator."""

from __future__ import annotations


class Refusal(Exception):
    """Engine or coordinator refuse a request."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text  # the real server's text, without an error code; the caller adds the code of its command
