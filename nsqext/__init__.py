"""nsqext: a smart client, a reference cluster and a Spark source for the redesigned and the original NSQ.

The client is here; the reference cluster is `nsqext.broker.Cluster`; every error is in `nsqext.errors`.
"""

from __future__ import annotations

from nsqext import errors
from nsqext._version import __version__
from nsqext.client.consumer import Consumer
from nsqext.client.message import Message
from nsqext.client.options import ConsumerOptions, ProducerOptions
from nsqext.client.producer import Producer
from nsqext.client.publication import Draft
from nsqext.errors import BatchFailed, DeliveryUnknown, InvalidInput, NsqError, PublishFailed, ServerError
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.identify import ExtFilter
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, Receipt, TopicMeta

__all__ = (
    "Address",
    "BatchFailed",
    "ConnectionOptions",
    "Consumer",
    "ConsumerOptions",
    "DeliveryUnknown",
    "Draft",
    "ExtFilter",
    "InvalidInput",
    "LookupOptions",
    "Message",
    "NsqError",
    "Producer",
    "ProducerOptions",
    "PublishFailed",
    "Receipt",
    "ServerError",
    "TopicMeta",
    "__version__",
    "errors",
)
