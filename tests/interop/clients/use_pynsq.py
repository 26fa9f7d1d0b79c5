# mypy: ignore-errors
"""Publishes four messages with pynsq and consumes them, requeuing one; run in an environment that has pynsq."""

import json
import sys
import time

import nsq
from tornado.ioloop import IOLoop

given = json.loads(sys.argv[1])
options = {name: True for name in ("tls_v1", "snappy", "deflate") if name in given["layers"]}
if "tls_v1" in options:
    options["tls_options"] = {"ca_certs": given["ca"]}
seen = []


def handle(message):
    seen.append([message.body.decode(), message.attempts, time.monotonic()])
    if message.body == b"again" and message.attempts == 1:
        message.enable_async()
        message.requeue(backoff=False, time_ms=300)
        return None
    if len(seen) == 5:
        IOLoop.current().call_later(0.1, end)
    return True


def end():
    sys.stdout.write(json.dumps(seen))
    IOLoop.current().stop()


def published(_, data):
    if data != b"OK":
        raise SystemExit(f"not published: {data!r}")


def publish():
    if not any(conn.connected() for conn in writer.conns.values()):
        IOLoop.current().call_later(0.05, publish)
        return
    writer.pub(given["topic"], b"again", callback=published)
    writer.mpub(given["topic"], [b"one", b"two", b"three"], callback=published)


where = {"lookupd_http_addresses": [given["lookupd"]]} if given["lookup"] else {"nsqd_tcp_addresses": [given["nsqd"]]}
writer = nsq.Writer([given["nsqd"]], **options)
IOLoop.current().call_later(0.05, publish)
reader = nsq.Reader(
    given["topic"], "ch", handle, max_in_flight=5, lookupd_poll_interval=1, lookupd_poll_jitter=0.0, **where, **options
)
nsq.run()
