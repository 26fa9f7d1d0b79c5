"""NSQ as a broker of Celery and kombu: ``broker_url = "nsq://127.0.0.1:4161"``.

Importing this module registers the URLs ``nsq://`` (nsqlookupd's HTTP address) and ``nsqd://`` (nsqd's TCP address,
without lookup; original NSQ). Without the import, name the class: ``Connection("127.0.0.1:4161",
transport="nsqext.integrations.celery:Transport")``.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

from nsqext.integrations.celery.transport import DirectTransport, KombuChannel, Transport

__all__ = ("DirectTransport", "KombuChannel", "Transport")

TRANSPORT_ALIASES["nsq"] = "nsqext.integrations.celery:Transport"
TRANSPORT_ALIASES["nsqd"] = "nsqext.integrations.celery:DirectTransport"
