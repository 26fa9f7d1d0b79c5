"""Checks of the original server while a command with a body is still being read, in the server's order."""

from __future__ import annotations

from typing import NoReturn

from nsqext.broker.nsqd.auth import check_auth
from nsqext.broker.nsqd.validation import CommandValidator
from nsqext.protocol.extjson import quote
from nsqext.protocol.names import is_valid_topic
from nsqext.protocol.server.go_format import MASK_64, base10, decode, wrap
from nsqext.protocol.server.publish_bodies import BATCH_VERBS, BatchReader, Target
from nsqext.protocol.server.request_error import RequestError

__all__ = ("ClassicValidator", "parse_delay")

_VERBS = frozenset((b"PUB", b"MPUB", b"DPUB"))
_SINGLE = frozenset((b"PUB", b"DPUB"))
_MS = 1_000_000


def parse_delay(word: bytes, text: str) -> int:
    """Return the milliseconds of REQ and DPUB as the original server understands them.

    It counts nanoseconds in 64 bits, so that enormous delays turn into others.
    """
    return wrap(base10(word, text) * _MS) // _MS


class ClassicValidator(CommandValidator):
    """The checks for one session."""

    def refuse_unknown(self, words: list[bytes]) -> NoReturn:
        """Refuse a command that this generation does not have."""
        raise RequestError("E_INVALID", f"invalid command {decode(words[0])}")

    def _check_publish(self, words: list[bytes]) -> None:
        verb = words[0]
        if verb not in _VERBS:
            raise RequestError("E_INVALID", f"invalid command {decode(verb)}")
        name = verb.decode()
        if len(words) < (3 if verb == b"DPUB" else 2):
            raise RequestError("E_INVALID", f"{name} insufficient number of parameters")
        self.topic: str = decode(words[1])
        if not is_valid_topic(self.topic):
            again = "E_BAD_TOPIC " if verb == b"MPUB" else ""  # the real server says it twice
            raise RequestError("E_BAD_TOPIC", f"{again}{name} topic name {quote(self.topic)} is not valid")
        self.delay: float = self._delay(words[2]) if verb == b"DPUB" else 0.0
        if verb == b"MPUB":
            self.stale_auth: bool = not check_auth(self._client, name, self.topic, "")

    def _delay(self, word: bytes) -> float:
        millis = parse_delay(word, f"DPUB could not parse timeout {decode(word)}")
        largest = round(self._limits.max_req_timeout * 1000)
        if not 0 <= millis <= largest:
            raise RequestError("E_INVALID", f"DPUB timeout {base10(word, '') & MASK_64} out of range 0-{largest}")
        return millis / 1000

    def check_end(self, words: list[bytes], batch: BatchReader | None, *, sized: bool) -> None:
        """Refuse a body that is cut off; publishes name their command here."""
        if batch is not None:
            batch.check_end()
        name = words[0].decode()
        single = words[0] in _SINGLE
        code, what = ("E_BAD_MESSAGE", "message body") if single else ("E_BAD_BODY", "body")
        raise RequestError(code, f"{name} failed to read {what}{'' if sized else ' size'}")

    def _reader(self, words: list[bytes], size: int) -> BatchReader | None:
        return BatchReader(words[0], self._limits, Target(self.topic)) if words[0] in BATCH_VERBS else None
