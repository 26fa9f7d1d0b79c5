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
    Mistake(
        "a lost connection at the end counts as not sent",
        "sync/direct.py",
        "if not outcome_unknown(failure):",
        "if not failure.maybe_stored:",
    ),
    Mistake(
        "an interrupted close leaves the producer open",
        "sync/producer.py",
        "        finally:\n            super().__exit__(kind, error, trace)\n\n    ping",
        "        except Exception:\n            super().__exit__(kind, error, trace)\n\n    ping",
    ),
    Mistake(
        "a publish of a thread is not counted",
        "sync/direct.py",
        "stored=statistics.stored + counters.stored",
        "stored=statistics.stored",
    ),
    Mistake(
        "bytes of threads are not counted",
        "sync/direct.py",
        "bytes_sent=statistics.bytes_sent + counters.bytes_sent",
        "bytes_sent=statistics.bytes_sent",
    ),
    Mistake(
        "a connection for threads opens at the first publish",
        "sync/direct.py",
        "if missed == _WARM_UP:",
        "if missed == 1:",
    ),
    Mistake(
        "an unused connection of threads stays open",
        "sync/direct.py",
        "needed = connection.usable and node.wanted and node.connection is not None",
        "needed = connection.usable",
    ),
    Mistake(
        "a key is ignored by threads",
        "sync/producer.py",
        "if direct is not None and key is None and not rare:",
        "if direct is not None and not rare:",
    ),
    Mistake(
        "a delay is ignored by threads",
        "sync/producer.py",
        "rare = delay is not None or via is not None",
        "rare = via is not None",
    ),
    Mistake(
        "the identity of a delayed message is lost",
        "sync/producer.py",
        "            identity=identity,\n            header=header,\n        )\n\n    def publish_many",
        "            header=header,\n        )\n\n    def publish_many",
    ),
    Mistake(
        "trace ids of a batch are lost",
        "sync/producer.py",
        "            trace_ids=trace_ids,\n            headers=headers,\n        )",
        "            headers=headers,\n        )",
    ),
    Mistake(
        "the handlers of threads run with abandoned contexts",
        "sync/consumer.py",
        "context.copy().run(function, Message(message, answers))",
        "function(Message(message, answers))",
    ),
    Mistake(
        "a batch is requeued without its delay",
        "sync/message.py",
        "self._run(self._original.requeue, chosen, delay, backoff=backoff)",
        "self._run(self._original.requeue, chosen, backoff=backoff)",
    ),
    Mistake(
        "requeue of some messages requeues all",
        "sync/message.py",
        "self._run(self._original.requeue, chosen, delay",
        "self._run(self._original.requeue, None, delay",
    ),
    Mistake(
        "the middleware of a blocking consumer is lost",
        "sync/consumer.py",
        "env=env, middleware=middleware, **settings))\n        self._port",
        "env=env, **settings))\n        self._port",
    ),
    Mistake(
        "the second run of a consumer is refused with the wrong error",
        "sync/consumer.py",
        '        if self._portal is not None:\n            raise InvalidState("the consumer is open already", topic',
        '        if self._running:\n            raise InvalidState("the consumer is open already", topic',
    ),
)
