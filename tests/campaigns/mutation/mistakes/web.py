"""Mistakes in the web page."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a read-only page makes changes",
        "web/security.py",
        "        if not self._options.write:\n",
        "        if False:\n",
    ),
    Mistake(
        "a form without a token is accepted",
        "web/security.py",
        '        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token(user).encode()):\n',
        '        if token and not hmac.compare_digest(token.encode("utf-8", "replace"), self.token(user).encode()):\n',
    ),
    Mistake(
        "the token of another user is accepted",
        "web/security.py",
        'hmac.new(self._secret, user.encode("utf-8", "surrogateescape"), hashlib.sha256)',
        'hmac.new(self._secret, b"", hashlib.sha256)',
    ),
    Mistake(
        "two headers of the proxy are accepted",
        "web/security.py",
        'users[0] if len(users) == 1 else ""',
        'users[0] if users else ""',
    ),
    Mistake(
        "a request without a host is accepted",
        "web/security.py",
        '            "" if host else "the request has no Host header"\n',
        '            ""\n',
    ),
    Mistake(
        "static files have no headers of security",
        "web/security.py",
        '{**_HEADERS, "Cache-Control": "max-age=300"} if static else _HEADERS',
        '{"Cache-Control": "max-age=300"} if static else _HEADERS',
    ),
    Mistake(
        "the password may be empty",
        "web/security.py",
        "if not (user and colon and password):",
        "if not (user and colon):",
    ),
    Mistake(
        "the name of a signed-in user is that of the browser",
        "web/security.py",
        'user = user or given.partition(":")[0]',
        'user = given.partition(":")[0]',
    ),
    Mistake(
        "the rate is the average of the whole line",
        "web/monitor.py",
        "self.points[-_AVERAGED:]",
        "self.points",
    ),
    Mistake(
        "total rates are aligned at the oldest point",
        "web/monitor.py",
        "(0.0,) * (length - len(points)) + points",
        "points + (0.0,) * (length - len(points))",
    ),
    Mistake(
        "a moved leader counts as published messages",
        "web/monitor.py",
        "grown += max(count - old, 0)",
        "grown += abs(count - old)",
    ),
    Mistake(
        "a single decrease resets a counter",
        "web/monitor.py",
        "if count < old and part not in self.lower:",
        "if False and part not in self.lower:",
    ),
    Mistake(
        "a new counter's first count is a rate",
        "web/monitor.py",
        "if known and elapsed > 0:",
        "if elapsed > 0:",
    ),
    Mistake(
        "sampling never ends",
        "web/monitor.py",
        "if time.monotonic() - self._viewed > _WATCHED:",
        "if time.monotonic() - self._viewed < 0:",
    ),
    Mistake(
        "the monitor keeps deleted channels",
        "web/monitor.py",
        "if key[1] in channels.get(key[0], ())",
        "if key[0] in topics",
    ),
    Mistake(
        "a failed sample forgets the one before",
        "web/monitor.py",
        "old = self._latest or Snapshot(",
        "old = Snapshot(",
    ),
    Mistake(
        "the connections stay open after the end",
        "web/monitor.py",
        "                await self._admin.aclose()\n",
        "                pass\n",
    ),
    Mistake(
        "a failed lookup of a topic is a deleted topic",
        "web/monitor.py",
        "if not isinstance(error, TopicNotFound):\n                raise error",
        "if False:\n                raise error",
    ),
    Mistake(
        "the search distinguishes case",
        "web/topic_list.py",
        "if wanted in name.casefold()]",
        "if wanted in name]",
    ),
    Mistake(
        "the last page is empty",
        "web/topic_list.py",
        'page = min(max(form.number("page", 1), 1), pages)',
        'page = max(form.number("page", 1), 1)',
    ),
    Mistake(
        "the second click does not turn the order",
        "web/topic_list.py",
        "falling = not self.falling if column == self.sort",
        "falling = self.falling if column == self.sort",
    ),
    Mistake(
        "the search is lost on the next page",
        "web/topic_list.py",
        '            "search": self.search,\n',
        "",
    ),
    Mistake(
        "lines of a body end with CRLF",
        "web/actions.py",
        '.replace("\\r\\n", "\\n")',
        "",
    ),
    Mistake(
        "a publish from the page ignores the key",
        "web/actions.py",
        'key=form.given("key") or None',
        "key=None",
    ),
    Mistake(
        "a publish from the page ignores the partition",
        "web/actions.py",
        'partition=form.optional("partition")',
        "partition=None",
    ),
    Mistake(
        "a header value with a colon is cut",
        "web/actions.py",
        'line.partition(":")',
        'line.rpartition(":")',
    ),
    Mistake(
        "a time is local",
        "web/actions.py",
        "datetime.fromisoformat(text).replace(tzinfo=UTC)",
        "datetime.fromisoformat(text).astimezone(UTC)",
    ),
    Mistake(
        "a node is hidden instead of shown",
        "web/actions.py",
        "partial(_tombstone, restore=True)",
        "partial(_tombstone, restore=False)",
    ),
)
