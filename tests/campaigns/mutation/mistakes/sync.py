"""Mistakes in the blocking clients."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "messages of the closing thread go back to this consumer",
        "sync/consumer.py",
        "                self._run_now(self._original.pause)\n",
        "",
    ),
    Mistake(
        "messages of the closing thread wait for their timeout",
        "sync/consumer.py",
        "                self._run_now(functools.partial(requeue_unanswered, batch))\n",
        "",
    ),
    Mistake(
        "close while it runs closes the clients under run",
        "sync/consumer.py",
        "        if self._running:\n            self.stop()\n            return\n        self.__exit__",
        "        self.__exit__",
    ),
    Mistake(
        "a handler that answers later is finished",
        "sync/consumer.py",
        "self._original.handler(auto_finish=auto_finish)(handle)",
        "self._original.handler(auto_finish=True)(handle)",
    ),
    Mistake(
        "a handler loses its annotations",
        "sync/consumer.py",
        "            @functools.wraps(function)  # annotations select the arguments\n            async def handle",
        "            async def handle",
    ),
)
