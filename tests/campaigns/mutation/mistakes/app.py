"""Mistakes in the application."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a publisher drops the tag of an OutgoingMessage",
        "app/app.py",
        "            tag=result.tag,\n",
        "",
    ),
    Mistake(
        "a publisher drops the trace id of an OutgoingMessage",
        "app/app.py",
        "            trace_id=result.trace_id,\n",
        "",
    ),
    Mistake(
        "a publisher drops the key of an OutgoingMessage",
        "app/app.py",
        "            key=result.key,\n",
        "",
    ),
    Mistake(
        "a publisher drops the given header of an OutgoingMessage",
        "app/app.py",
        "            header=result.header,\n",
        "",
    ),
    Mistake(
        "the last consumer's error is raised",
        "app/app.py",
        "self._error = self._error or error",
        "self._error = error",
    ),
    Mistake(
        "a consumer that ends does not stop the others",
        "app/app.py",
        "        finally:\n            self._stopping.set()\n",
        "        finally:\n            pass\n",
    ),
    Mistake(
        "an app is ready while it is stopping",
        "app/app.py",
        "if self._stopping.is_set():\n            return Health(live=True, ready=False",
        "if self._stopping.is_set():\n            return Health(live=True, ready=True",
    ),
    Mistake(
        "a failed app is live",
        "app/app.py",
        'Health(live=False, ready=False, reasons=(f"a consumer',
        'Health(live=True, ready=False, reasons=(f"a consumer',
    ),
    Mistake(
        "a result that is false is not published",
        "app/app.py",
        "if result is not None:\n                for topic in topics",
        "if result:\n                for topic in topics",
    ),
    Mistake(
        "the topic of dead letters is checked by each handler",
        "app/app.py",
        "            checked.add(topic)\n",
        "",
    ),
    Mistake(
        "an empty tag is accepted",
        "app/router.py",
        'if settings.get("tag") is not None:\n            check_tag(settings["tag"])',
        'if settings.get("tag"):\n            check_tag(settings["tag"])',
    ),
    Mistake(
        "unwritable topics are reported once for all",
        "app/start_checks.py",
        '                logger.warning("the app cannot publish: %s", error, extra={"topic": topic})\n',
        '                logger.warning("the app cannot publish: %s", error, extra={"topic":'
        " topic})\n"
        "                return\n",
    ),
    Mistake(
        "a batch handler receives messages without the app's middleware",
        "app/app.py",
        "return surround_batch_handler((*self._around(), *spec.middleware), spec.call, spec.channel)",
        "return surround_batch_handler(spec.middleware, spec.call, spec.channel)",
    ),
    Mistake(
        "middleware is started once for each handler",
        "app/app.py",
        "for one in dict.fromkeys(around):",
        "for one in around:",
    ),
    Mistake(
        "the first topic of a publisher only",
        "app/app.py",
        "                for topic in topics:\n                    await self._result_published",
        "                for topic in topics[:1]:\n                    await self._result_published",
    ),
    Mistake(
        "a batch handler ignores max_wait",
        "app/app.py",
        "max_count=spec.batch.max_count, max_wait=spec.batch.max_wait",
        "max_count=spec.batch.max_count",
    ),
    Mistake(
        "a handler finishes although it answers later",
        "app/app.py",
        "consumer.handler(auto_finish=spec.auto_finish)",
        "consumer.handler()",
    ),
    Mistake(
        "an app runs twice at a time",
        "app/app.py",
        '        if self._running:\n            raise InvalidState("the app is running already")\n',
        "",
    ),
    Mistake(
        "the error of an earlier run ends the next",
        "app/app.py",
        "        self._error = None\n        self._unstarted",
        "        self._unstarted",
    ),
    Mistake(
        "wait leaves the app open",
        "app/app.py",
        "            await self._stopping.wait()\n        finally:\n            await self.aclose()\n",
        "            await self._stopping.wait()\n        finally:\n            pass\n",
    ),
    Mistake(
        "an app without handlers never starts",
        "app/app.py",
        "                if not self._consumers:\n                    self._started.set()\n",
        "",
    ),
    Mistake(
        "a failed test leaves the app in the test",
        "app/app.py",
        "            self._test = before\n            raise",
        "            raise",
    ),
    Mistake(
        "a consumer that is blocked counts as ready",
        "app/health.py",
        "    if statistics.blocked:\n        return",
        "    if False:\n        return",
    ),
    Mistake(
        "readyz answers as healthz",
        "app/health.py",
        'health.live if path == "/healthz" else health.ready',
        "health.live",
    ),
    Mistake(
        "the body of HEAD is sent",
        "app/health.py",
        'b"" if scope["method"] == "HEAD" else body',
        "body",
    ),
    Mistake(
        "the path below a mount is unknown",
        "app/health.py",
        '.removeprefix(scope.get("root_path", ""))',
        "",
    ),
    Mistake(
        "two handlers share a pattern",
        "app/start_checks.py",
        "    same += [pattern for pattern in spec.topics.patterns if pattern in other.topics.patterns]\n",
        "",
    ),
    Mistake(
        "a later handler of a name takes a part of a pattern's messages",
        "app/start_checks.py",
        "    same += [name for name in other.topics.names if spec.topics.matches(name)]\n",
        "",
    ),
    Mistake(
        "a loop by name is refused",
        "app/start_checks.py",
        "if spec.topics.matches(topic) and topic not in spec.topics.names:",
        "if spec.topics.matches(topic):",
    ),
    Mistake(
        "a test records the delay as the partition",
        "app/testing.py",
        "own, publishing.delay, publishing.partition)",
        "own, publishing.partition, publishing.delay)",
    ),
    Mistake(
        "a recorded message of a publish has no key",
        "app/testing.py",
        "own = message if message.key is not None else evolve(message, key=publishing.key)",
        "own = message",
    ),
    Mistake(
        "a test delivers to every channel",
        "app/testing.py",
        "spec.topics.matches(topic) and channel in (None, spec.channel)]",
        "spec.topics.matches(topic)]",
    ),
    Mistake(
        "a test delivers the first attempt always",
        "app/testing.py",
        "message.attempts = attempts",
        "message.attempts = 1",
    ),
    Mistake(
        "a test checks no message",
        "app/testing.py",
        "delayed(_OPTIONS, publishing.topic, message, publishing.delay).check()",
        "pass",
    ),
    Mistake(
        "a tested app keeps its test",
        "app/testing.py",
        "        finally:\n            self._app.use_test(None)\n",
        "        finally:\n            pass\n",
    ),
)
