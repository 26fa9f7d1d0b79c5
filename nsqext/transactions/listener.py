"""Wait until a transaction adds a message to an outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from nsqext.transactions.schema import CHANNEL

if TYPE_CHECKING:
    from nsqext.transactions.store import OutboxStore


class OutboxListener:
    """Waits until a message was added; not for concurrent calls."""

    def __init__(self, store: OutboxStore) -> None:
        self._store = store
        self._connection: Any = None

    async def wait(self, timeout: float) -> bool:
        """Wait for a time in seconds; return whether PostgreSQL has reported that a message was added.

        The first call returns at once: messages may have been added before it listens. Cancellation does not end it.

        Raises:
            Exception: an error of the driver; the next call connects again.
        """
        if self._store.dialect == "sqlite":
            await anyio.sleep(timeout)
            return False
        return await to_thread.run_sync(self._wait, timeout)

    def _wait(self, timeout: float) -> bool:
        if self._connection is None:
            self._connection = self._store.connect()
            try:
                self._connection.execute(f"LISTEN {CHANNEL}")
            except Exception:
                self.close()
                raise
            return True
        try:
            return bool([*self._connection.notifies(timeout=timeout, stop_after=1)])
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
