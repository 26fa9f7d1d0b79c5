"""`Router`: collect handlers, publishers and lifespans for an app."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from attrs import field, frozen

from nsqext.arguments import check_kinds
from nsqext.client.consumer.handler_functions import coroutine_handler
from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.client.consumer.handlers.workers import BatchLimits
from nsqext.client.consumer.subscriptions.topics import TopicSelection
from nsqext.client.consumer.typed.parameters import CallPlan, plan_call
from nsqext.client.middleware import Middleware, check_middleware
from nsqext.client.settings import consumer_settings, handler_settings
from nsqext.client.tasks import Runnable
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.protocol.names import check_channel, check_tag, check_topic
from nsqext.settings import unknown_setting

if TYPE_CHECKING:
    from nsqext.client.consumer.settings import HandlerSettings

HandlerFunction = Callable[..., object]
F = TypeVar("F", bound=HandlerFunction)
B = TypeVar("B", bound=Callable[[MessageBatch], object])
LifespanManager = Callable[..., AbstractAsyncContextManager[object]]
L = TypeVar("L", bound=Callable[..., AsyncIterator[object]])


@frozen
class HandlerSpec:
    """A handler and its settings."""

    topics: TopicSelection
    channel: str
    function: HandlerFunction
    call: Callable[..., Awaitable[object]]  #: the function, or its call in a thread
    plan: CallPlan | None  #: None if the function receives the message
    settings: Mapping[str, Any] = field(factory=dict)
    middleware: tuple[Middleware, ...] = ()
    auto_finish: bool = True  #: see `nsqext.Consumer.handler`
    batch: BatchLimits | None = None  #: None for single messages

    def __attrs_post_init__(self) -> None:
        check_kinds(self)


@frozen
class PublishedTopic:
    """A topic that a service publishes to, see `Router.publishes`."""

    topic: str
    kind: Any  #: type of the bodies; None if not known
    headers: Mapping[str, type]
    key: bool
    tag: str | None


class Router:
    """Collects the handlers of a part of a service; `App.include_router` adds them to an app.

    What is added behind that would not run: it raises `InvalidState`.
    """

    def __init__(self) -> None:
        self.specs: list[HandlerSpec] = []
        self.publishers: dict[HandlerFunction, list[str]] = {}
        self.published: list[PublishedTopic] = []
        self.lifespans: list[LifespanManager] = []
        self.included: bool = False  #: whether an app or router has its handlers

    def handler(
        self,
        topics: str | Sequence[str],
        channel: str,
        *,
        middleware: Sequence[Middleware] = (),
        auto_finish: bool = True,
        **settings: Unpack[HandlerSettings],
    ) -> Callable[[F], F]:
        """Decorator: register a function as the handler of one or several topics; a blocking function runs in a thread.

        Parameters, and the effect of returns and exceptions: `nsqext.Consumer.handler`.

        Args:
            topics: see `nsqext.Consumer`.
            middleware: around this handler, inside the app's middleware.
            auto_finish: see `nsqext.Consumer.handler`.
            settings: see `HandlerSettings`; they take precedence over the app's.

        Raises:
            InvalidName: a topic, pattern, channel or tag that servers refuse.
            InvalidSetting: no function, a parameter without a known source, an invalid setting, or another handler of
                the app receives the same messages.
            UnknownSetting: unknown setting; the error suggests a known name.
            InvalidState: the app is running, or the router was included.
        """
        around = check_middleware(middleware)
        selection = self._select(topics, channel, settings, "auto_finish")

        def add(function: F) -> F:
            self._check_changeable()
            call = coroutine_handler(function)
            self._add(HandlerSpec(selection, channel, function, call, plan_call(call), settings, around, auto_finish))
            return function

        return add

    def batch_handler(
        self,
        topics: str | Sequence[str],
        channel: str,
        *,
        max_count: int = 500,
        max_wait: float = 0.2,
        middleware: Sequence[Middleware] = (),
        **settings: Unpack[HandlerSettings],
    ) -> Callable[[B], B]:
        """Decorator: register a function as a handler of batches; see `nsqext.Consumer.batch_handler`.

        Middleware receives the batch. The function's result is not published.

        Args:
            topics: see `nsqext.Consumer`.
            max_count, max_wait: see `nsqext.Consumer.batches`.
            middleware: see `handler`.

        Raises:
            InvalidName: a topic, pattern, channel or tag that servers refuse.
            InvalidSetting: no function, an invalid setting, or another handler of the app receives the same messages.
            UnknownSetting: unknown setting; the error suggests a known name.
            InvalidState: the app is running, or the router was included.
        """
        selection = self._select(topics, channel, settings, "max_count", "max_wait")
        limits = BatchLimits(max_count, max_wait)
        around = check_middleware(middleware)

        def add(function: B) -> B:
            self._check_changeable()
            call = coroutine_handler(function)
            self._add(HandlerSpec(selection, channel, function, call, None, settings, around, batch=limits))
            return function

        return add

    def _select(
        self, topics: str | Sequence[str], channel: str, settings: Mapping[str, Any], *arguments: str
    ) -> TopicSelection:
        self._check_changeable()
        check_channel(channel)
        place = f"the handler of {topics}/{channel}"
        for name in settings:
            if name in consumer_settings() and name not in handler_settings():
                raise InvalidSetting(f"{place} has {name} of its own", hint=f"set it for the app: App({name}=...)")
            if name not in handler_settings():
                raise unknown_setting(place, name, (*handler_settings(), *arguments))
        if settings.get("tag") is not None:
            check_tag(settings["tag"])
        return TopicSelection(topics)

    def _add(self, spec: HandlerSpec) -> None:
        self.specs.append(spec)

    def _remove_from(self, index: int) -> None:
        """Remove the handlers from an index on."""
        del self.specs[index:]

    def _check_changeable(self) -> None:
        """Raise `InvalidState` if no handler can be added any more."""
        if self.included:
            raise InvalidState(
                "the router was included before: what is added now would not run",
                hint="include it behind its last handler, such as at the end of the program's imports",
            )

    def publisher(self, topic: str) -> Callable[[F], F]:
        """Decorator: publish the result of a handler before its message is finished.

        None is not published; `nsqext.OutgoingMessage` is published with headers, tag, trace id and key; other values
        are encoded by `nsqext.app.encode_body`. If the publish fails, the message is requeued.

        Raises:
            InvalidName: a topic that servers refuse.
            InvalidState: the app is running, or the router was included.
        """
        check_topic(topic)

        def add(function: F) -> F:
            self._check_changeable()
            self.publishers.setdefault(function, []).append(topic)
            return function

        return add

    def publishes(
        self,
        topic: str,
        kind: Any = None,
        *,
        headers: Mapping[str, type] | None = None,
        key: bool = False,
        tag: str | None = None,
    ) -> None:
        """Declare a topic that handlers, lifespans or an outbox publish to.

        The app checks at its start that it can be published to, and `asyncapi_document` describes its messages. The
        topics of `publisher` need no declaration.

        Args:
            kind: type of the bodies, see `encode_body`; None if not known.
            headers: names and types of the extend headers: str, int or float.
            key: whether the messages have keys.
            tag: tag of the messages.

        Raises:
            InvalidName: a topic or tag that servers refuse.
            InvalidSetting: a type that bodies or headers cannot have.
            InvalidState: the app is running, or the router was included.
        """
        self._check_changeable()
        check_topic(topic)
        if tag is not None:
            check_tag(tag)
        if kind is not None:
            from nsqext.client.consumer.typed.body import body_decoder

            body_decoder(kind)
        found = dict(headers or {})
        for name, one in found.items():
            if one not in (str, int, float):
                raise InvalidSetting(f"the header {name!r} cannot be a {one!r}", hint="headers are str, int or float")
        self.published.append(PublishedTopic(topic, kind, found, key, tag))

    def lifespan(self, function: L) -> L:
        """Decorator: register an asynchronous generator function for startup and shutdown of the app.

        It is called with the app before the first message, and resumed after its ``yield`` when the last handler has
        ended. Lifespans end in reverse order.

        Raises:
            InvalidSetting: no asynchronous generator function.
            InvalidState: the app is running, or the router was included.
        """
        self._check_changeable()
        if not (inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(type(function).__call__)):
            raise InvalidSetting(
                f"the lifespan {function!r} is not an asynchronous generator function",
                hint="declare it with 'async def' and one 'yield', without @asynccontextmanager",
            )
        self.lifespans.append(asynccontextmanager(function))
        return function

    def include_router(self, router: Router) -> None:
        """Add the handlers, publishers, declared topics and lifespans of a router; all, or after an error nothing.

        Raises:
            InvalidSetting: no router, an app, this router, or a handler that receives the same messages as another one.
            InvalidState: the app is running, or this router was included.
        """
        if not isinstance(router, Router):
            raise InvalidSetting(f"{router!r} is not a router", hint="give an object of nsqext.Router")
        if router is self:
            raise InvalidSetting("a router cannot include itself")
        if isinstance(router, Runnable):  # an app
            raise InvalidSetting(
                "an app cannot be included: its settings, middleware and readiness checks would have no effect",
                hint="collect the handlers in an nsqext.Router, which several apps can include",
            )
        self._check_changeable()
        before = len(self.specs)
        try:
            for spec in router.specs:
                self._add(spec)
        except BaseException:
            self._remove_from(before)
            raise
        for function, topics in router.publishers.items():
            self.publishers.setdefault(function, []).extend(topics)
        self.published.extend(router.published)
        self.lifespans.extend(router.lifespans)
        router.included = True
