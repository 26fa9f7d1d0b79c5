"""Settings of the lookup service."""

from __future__ import annotations

from attrs import field, frozen

from nsqext.errors import InvalidSetting

__all__ = ("LookupOptions",)


@frozen
class LookupOptions:
    """How the lookup service is asked; times in seconds.

    Attributes:
        poll_interval: between two questions about a topic for which all is well.
        poll_jitter: share by which an interval is longer or shorter, at random, so that clients do not ask all at once.
        request_timeout: for one question to one lookup node.
        straggler_timeout: how much longer the slower nodes are waited for once one has told where the topic is.
        max_pause: longest pause between two questions while lookup goes on to name a leader that is none.
        max_failures: failed questions in a row after which a node's turn comes last.
        retry_failed: after so long such a node is asked like the others again.
        max_answer_size: bytes of an answer that are accepted.
        auth_secret: sent with every question as bearer token, for lookup nodes behind something that asks for it; never
            shown. Lookup speaks plain HTTP, so that everybody on the way can read it.
    """

    poll_interval: float = 60.0
    poll_jitter: float = 0.3
    request_timeout: float = 2.0
    straggler_timeout: float = 1.0
    max_pause: float = 1.0
    max_failures: int = 3
    retry_failed: float = 30.0
    max_answer_size: int = 16 * 1024 * 1024
    auth_secret: str | None = field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("poll_interval", "request_timeout", "retry_failed"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is not a positive time in seconds")
        for name in ("straggler_timeout", "max_pause"):
            if not getattr(self, name) >= 0:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is a negative time")
        if not 0 <= self.poll_jitter < 1:
            raise InvalidSetting(f"poll_jitter={self.poll_jitter!r} is not within 0..1 (1 excluded)")
        for name in ("max_failures", "max_answer_size"):
            if not getattr(self, name) >= 1:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is less than 1")
        if self.auth_secret is not None and not (self.auth_secret.isascii() and self.auth_secret.isprintable()):
            raise InvalidSetting("auth_secret has characters that no header takes")
