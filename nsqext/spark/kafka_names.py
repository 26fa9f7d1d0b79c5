"""Options of Spark's Kafka source and sink, for those who write them out of habit."""

from __future__ import annotations

_USE = {
    "kafka.bootstrap.servers": "use lookupd: the HTTP addresses of nsqlookupd, host:port",
    "kafka.group.id": "use channel",
    "groupIdPrefix": "use channel: names of ephemeral channels begin with it",
    "kafka.security.protocol": "use nsqext. and a setting of the client, for TLS and secrets",
    "kafkaConsumer.pollTimeoutMs": "use readTimeoutMs",
    "fetchOffset.numRetries": "use readTimeoutMs: requests are repeated until it is over",
    "fetchOffset.retryIntervalMs": "use readTimeoutMs: requests are repeated until it is over",
    "startingOffsetsByTimestampStrategy": "remove it: without a message of that time, reading begins at the end",
    "useDeprecatedOffsetFetching": "remove it",
}
_BY_NAME = {name.lower(): (name, hint) for name, hint in _USE.items()}
_PREFIX = "kafka."


def kafka_hint(name: str) -> tuple[str, str] | None:
    """Return the name of an option of Kafka as Kafka's documentation writes it, and what to use instead.

    Args:
        name: the option, in any case.

    Returns:
        None if Kafka has no such option.
    """
    found = _BY_NAME.get(name.lower())
    if found is None and name.lower().startswith(_PREFIX):
        return name, "use nsqext. and a setting of the client"
    return found
