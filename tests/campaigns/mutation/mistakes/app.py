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
)
