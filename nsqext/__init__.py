"""nsqext: a smart client, a reference cluster and a Spark source for the redesigned and the original NSQ.

The client is here; the reference cluster is `nsqext.broker.Cluster`; errors are in `nsqext.errors`. Names are imported
on first use: ``import nsqext`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module as _import_module

from nsqext._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nsqext import errors
    from nsqext.admin import Admin
    from nsqext.admin.options import AdminSettings
    from nsqext.app.app import App
    from nsqext.app.router import Router
    from nsqext.app.settings import AppSettings
    from nsqext.client.consumer.consumer import Consumer
    from nsqext.client.consumer.handlers.batches import MessageBatch
    from nsqext.client.consumer.message import Finish, Message, Reject, Requeue
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.replay import replay_dead_letters
    from nsqext.client.consumer.settings import ConsumerSettings, HandlerSettings
    from nsqext.client.consumer.statistics import ConsumerConnection, ConsumerStatistics
    from nsqext.client.events import ClientEvent
    from nsqext.client.producer.batcher import Batcher
    from nsqext.client.producer.producer import Producer
    from nsqext.client.producer.publishing import OutgoingMessage
    from nsqext.client.producer.settings import ProducerSettings
    from nsqext.client.producer.statistics import ProducerStatistics
    from nsqext.client.trace_log import trace_log
    from nsqext.errors import BatchFailed, DeliveryUnknown, InvalidInput, NsqError, PublishFailed, ServerError
    from nsqext.lookup.lookup import Lookup
    from nsqext.lookup.settings import LookupSettings
    from nsqext.protocol.identify import ExtFilter
    from nsqext.transport.settings import ConnectionSettings
    from nsqext.types import Address, RawJson, Receipt, TopicMeta

__all__ = (
    "Address",
    "Admin",
    "AdminSettings",
    "App",
    "AppSettings",
    "BatchFailed",
    "Batcher",
    "ClientEvent",
    "ConnectionSettings",
    "Consumer",
    "ConsumerConnection",
    "ConsumerSettings",
    "ConsumerStatistics",
    "DeliveryUnknown",
    "ExtFilter",
    "Finish",
    "HandlerSettings",
    "InvalidInput",
    "Lookup",
    "LookupSettings",
    "Message",
    "MessageBatch",
    "NsqError",
    "OutgoingMessage",
    "Position",
    "Producer",
    "ProducerSettings",
    "ProducerStatistics",
    "PublishFailed",
    "RawJson",
    "Receipt",
    "Reject",
    "Requeue",
    "Router",
    "ServerError",
    "TopicMeta",
    "__version__",
    "errors",
    "replay_dead_letters",
    "trace_log",
)

_HOMES = {
    "nsqext.admin": ("Admin",),
    "nsqext.admin.options": ("AdminSettings",),
    "nsqext.app.app": ("App",),
    "nsqext.app.router": ("Router",),
    "nsqext.app.settings": ("AppSettings",),
    "nsqext.client.producer.batcher": ("Batcher",),
    "nsqext.client.consumer.consumer": ("Consumer",),
    "nsqext.client.consumer.statistics": ("ConsumerConnection", "ConsumerStatistics"),
    "nsqext.client.events": ("ClientEvent",),
    "nsqext.client.consumer.settings": ("ConsumerSettings", "HandlerSettings"),
    "nsqext.client.consumer.handlers.batches": ("MessageBatch",),
    "nsqext.client.consumer.message": ("Finish", "Message", "Reject", "Requeue"),
    "nsqext.client.producer.settings": ("ProducerSettings",),
    "nsqext.client.consumer.position": ("Position",),
    "nsqext.client.consumer.replay": ("replay_dead_letters",),
    "nsqext.client.producer.producer": ("Producer",),
    "nsqext.client.producer.publishing": ("OutgoingMessage",),
    "nsqext.client.producer.statistics": ("ProducerStatistics",),
    "nsqext.client.trace_log": ("trace_log",),
    "nsqext.errors": ("BatchFailed", "DeliveryUnknown", "InvalidInput", "NsqError", "PublishFailed", "ServerError"),
    "nsqext.lookup.settings": ("LookupSettings",),
    "nsqext.lookup.lookup": ("Lookup",),
    "nsqext.protocol.identify": ("ExtFilter",),
    "nsqext.transport.settings": ("ConnectionSettings",),
    "nsqext.types": ("Address", "RawJson", "Receipt", "TopicMeta"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # for type checkers, a name that is not imported above does not exist

    def __getattr__(name: str) -> object:
        if name == "errors":
            return _import_module("nsqext.errors")
        module = _HOME.get(name)
        if module is None:
            raise AttributeError(f"module 'nsqext' has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(module), name)
        return value


del TYPE_CHECKING


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
