# mypy: ignore-errors
"""Publishes four messages with gnsq and consumes them, requeuing one; run in an environment that has gnsq."""

import json
import sys
import time

import gnsq

given = json.loads(sys.argv[1])
options = {name: True for name in ("tls_v1", "snappy", "deflate") if name in given["layers"]}
if "tls_v1" in options:
    options["tls_options"] = {"ca_certs": given["ca"]}
seen = []

# its producer mistakes the OK after an upgrade for the response to a publish, so only the consumer upgrades
producer = gnsq.Producer([given["nsqd"]])
producer.start()
producer.publish(given["topic"], b"again")
producer.multipublish(given["topic"], [b"one", b"two", b"three"])
where = {"lookupd_http_addresses": [given["lookupd"]]} if given["lookup"] else {"nsqd_tcp_addresses": [given["nsqd"]]}
consumer = gnsq.Consumer(given["topic"], "ch", max_in_flight=5, lookupd_poll_interval=1, **where, **options)


@consumer.on_message.connect
def handle(consumer, message):
    seen.append([message.body.decode(), message.attempts, time.monotonic()])
    if message.body == b"again" and message.attempts == 1:
        message.requeue(time_ms=300, backoff=False)
        return
    message.finish()
    if len(seen) == 5:
        consumer.close()


consumer.start()
producer.close()
sys.stdout.write(json.dumps(seen))
