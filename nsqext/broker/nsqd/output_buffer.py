"""Frames on their way to a client: which wait, and how they are cut into writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.protocol.layers import Layer
    from nsqext.protocol.server.negotiate import ClientSettings


class OutputBuffer:
    """Output of a session.

    A message waits until ``output_buffer_size`` bytes have gathered or its time is over: in the redesigned server
    ``output_buffer_timeout`` after the first message, in the original at the next tick of a clock with this interval. A
    tick during an empty buffer stays pending: the first message after an idle time is sent at once (source: messagePump
    of the original server).
    """

    def __init__(self, settings: ClientSettings, clock: Callable[[], float], *, ticking: bool) -> None:
        self.size: int = 0  #: of frames that are not encoded
        self.due: float = 0.0  #: clock time at which waiting messages are sent; 0.0 without any
        #: TLS and compression, outermost first; the session decodes with them
        self.layers: list[Layer] = []
        self._settings = settings  # may change later
        self._clock = clock  # seconds
        self._ticking = ticking  # as the original server
        self._frames: list[bytes] = []
        self._encoded: list[bytes] = []
        self._segments: deque[bytes] = deque()
        self._urgent = False  # send what follows the segments now
        self._answered = False  # the last frame is no message
        self.restart_ticks()

    @property
    def urgent(self) -> bool:
        return self._urgent or bool(self._segments)

    @urgent.setter
    def urgent(self, urgent: bool) -> None:
        self._urgent = urgent

    def restart_ticks(self) -> None:
        self._started = self._clock()
        self._ticks = 0

    def write(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.size += len(frame)
        self._urgent = self._answered = True

    def hold(self, frame: bytes, *, full: bool) -> bool:
        """Add a message, ``full`` if none follows; return whether this set ``due``.

        Earlier responses do not take the message along.
        """
        if self._answered:  # JavaNSQClient expects the OK of SUB in a separate write
            self.end_segment()
        self._frames.append(frame)
        self.size += len(frame)
        settings = self._settings
        if full or self.size >= settings.output_buffer_size:
            self._urgent = True
        elif not self.due and settings.output_buffer_timeout:
            return self._wait(settings.output_buffer_timeout)
        return False

    def _wait(self, timeout: float) -> bool:
        now = self._clock()
        if not self._ticking:
            self.due = now + timeout
            return True
        passed = int((now - self._started) / timeout)
        if passed > self._ticks:
            self._ticks = passed
            self._urgent = True
            return False
        self.due = self._started + (passed + 1) * timeout
        return True

    def expire(self, now: float) -> None:
        if self.due and self.due <= now:
            self._urgent = True
            self.due = 0.0
            if self._ticking and self._settings.output_buffer_timeout:
                self._ticks = max(self._ticks, int((now - self._started) / self._settings.output_buffer_timeout))

    def end_segment(self) -> None:
        self.encode()
        self._segments.append(b"".join(self._encoded))
        self._encoded.clear()
        self._urgent = self._answered = False

    def encode(self) -> None:
        frames = self._frames
        if frames:
            data = b"".join(frames)
            frames.clear()
            for layer in reversed(self.layers):
                data = layer.encode(data)
            self._encoded.append(data)
        self.size = 0
        self.due = 0.0

    def take(self) -> bytes:
        """Return the bytes of the next write; ``urgent`` says whether another write follows."""
        if self._segments:
            return self._segments.popleft()
        if not (self._encoded or self.layers):
            data = b"".join(self._frames)
            self._frames.clear()
            self.size = 0
            self.due = 0.0
            self._urgent = self._answered = False
            return data
        self.encode()
        return self._take_encoded()

    def take_handshake(self, records: bytes) -> bytes:
        """Return bytes encoded before the TLS handshake, and its records; frames wait for its end."""
        self._encoded.append(records)
        return self._take_encoded()

    def _take_encoded(self) -> bytes:
        self._urgent = self._answered = False
        encoded = self._encoded
        data = encoded[0] if len(encoded) == 1 else b"".join(encoded)
        encoded.clear()
        return data
