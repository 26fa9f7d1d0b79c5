"""nsqext: a smart client, a reference cluster and a Spark source for the redesigned and the original NSQ.

The client is here; the reference cluster is `nsqext.broker.Cluster`; every error is in `nsqext.errors`.
Names are imported when they are first used, so that ``import nsqext`` costs next to nothing.
"""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

from nsqext._version import __version__

if _typing.TYPE_CHECKING:
    from nsqext import errors
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

_HOMES = {
    "nsqext.client.consumer": ("Consumer",),
    "nsqext.client.message": ("Message",),
    "nsqext.client.options": ("ConsumerOptions", "ProducerOptions"),
    "nsqext.client.producer": ("Producer",),
    "nsqext.client.publication": ("Draft",),
    "nsqext.errors": ("BatchFailed", "DeliveryUnknown", "InvalidInput", "NsqError", "PublishFailed", "ServerError"),
    "nsqext.lookup.options": ("LookupOptions",),
    "nsqext.protocol.identify": ("ExtFilter",),
    "nsqext.transport.options": ("ConnectionOptions",),
    "nsqext.types": ("Address", "Receipt", "TopicMeta"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> _typing.Any:
    if name == "errors":
        return _import_module("nsqext.errors")
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'nsqext' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
