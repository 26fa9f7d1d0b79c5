"""Call handlers with the values that their parameters select: body, headers, key, tag, message, dependencies."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from operator import attrgetter
from types import FrameType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from attrs import define, field, frozen

from nsqext.client.consumer.handler_functions import in_package, is_message, stand_in, takes_message
from nsqext.client.consumer.message import Message, Reject, Requeue
from nsqext.errors import InvalidSetting, outside_text

if TYPE_CHECKING:
    from nsqext.client.consumer.options import FailureOptions

logger: logging.Logger = logging.getLogger("nsqext.consumer")

Handler = Callable[[Message], Awaitable[object]]
_Source = Callable[[Message], Any]


class _Field(enum.Enum):
    """An attribute of the message."""

    KEY = "key"
    TAG = "tag"
    HEADERS = "headers"


Key = Annotated[str | None, _Field.KEY]
"""Annotation of a parameter for the key of the message."""
Tag = Annotated[str | None, _Field.TAG]
"""Annotation of a parameter for the tag of the message."""
Headers = Annotated[Mapping[str, Any], _Field.HEADERS]
"""Annotation of a parameter for all extend headers."""


@frozen
class Header:
    """Marks a parameter for an extend header: ``user: Annotated[str, Header("user")]``.

    A message without it is not decodable, unless the parameter has a default.
    """

    name: str | None = None  #: None for the name of the parameter


@frozen
class Depends:
    """Marks a parameter for the result of a function: ``db: Annotated[Database, Depends(database)]``.

    The function is called once per message, with the values that its own parameters select (all except the body). It
    may be a coroutine function, or a generator of either kind with one ``yield``, which is resumed after the handler.
    An error of the handler is raised in the generator, and fails the message also if the generator catches it.
    """

    function: Callable[..., Any]


class _Dependency:
    def __init__(self, function: Callable[..., Any], arguments: _Arguments) -> None:
        self.function = function
        self.arguments = arguments
        self.manager: Callable[..., Any] | None = None
        called: Any = type(function).__call__  # of an object that is called as a function
        if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(called):
            self.manager = asynccontextmanager(function)
        elif inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(called):
            self.manager = contextmanager(function)

    @property
    def managed(self) -> bool:
        """Whether this dependency, or a dependency of it, is resumed after the handler."""
        return self.manager is not None or any(other.managed for other in self.arguments.dependencies)


@define(eq=False)
class _Call:
    """The dependencies of a message."""

    _message: Message
    _stack: AsyncExitStack | None  # ends the dependencies; None if none is resumed
    _results: dict[_Dependency, Any] = field(factory=dict)

    async def call(self, function: Callable[..., Any], arguments: _Arguments) -> Any:
        """Call a function with its arguments, in the order of its parameters; await an awaitable result."""
        message, results = self._message, self._results
        values: list[Any] = []
        for source in arguments.sources:
            if not isinstance(source, _Dependency):
                values.append(source(message))
                continue
            if source not in results:
                results[source] = await self._result(source)
            values.append(results[source])
        result = arguments.pass_to(function, values)
        return await result if hasattr(result, "__await__") else result

    async def _result(self, dependency: _Dependency) -> Any:
        manager, stack = dependency.manager, self._stack
        if manager is None or stack is None:
            return await self.call(dependency.function, dependency.arguments)
        context = await self.call(manager, dependency.arguments)
        if isinstance(context, AbstractAsyncContextManager):
            return await stack.enter_async_context(context)
        return stack.enter_context(context)


@frozen
class _Arguments:
    """The sources of the arguments of a call."""

    sources: tuple[_Source | _Dependency, ...]
    names: tuple[str, ...]  #: of the last arguments, passed as keywords

    @property
    def dependencies(self) -> list[_Dependency]:
        return [source for source in self.sources if isinstance(source, _Dependency)]

    def pass_to(self, function: Callable[..., Any], values: list[Any]) -> Any:
        if not self.names:
            return function(*values)
        first = len(values) - len(self.names)
        return function(*values[:first], **dict(zip(self.names, values[first:], strict=True)))


@frozen
class HeaderInput:
    """An extend header that a handler reads."""

    name: str
    kind: type  #: str, int or float
    required: bool


@frozen
class Inputs:
    """What a handler and its dependencies read of a message."""

    body: Any = None  #: annotation of the parameter; None if no parameter receives the decoded body
    headers: tuple[HeaderInput, ...] = ()
    key: bool = False
    tag: bool = False


class _Undecodable(Exception):
    """The message lacks what the parameters select."""


@frozen(eq=False)
class CallPlan:
    """How to call a handler, prepared once."""

    _function: Callable[..., Awaitable[object]]
    _arguments: _Arguments
    inputs: Inputs

    def handler(self, failure: FailureOptions) -> Handler:
        """Return the function that a consumer calls with a message.

        An undecodable message is sent to the dead letters, or requeued with the longest delay, without backoff: it is
        neither lost nor redelivered in a tight loop.
        """
        call = self._with_dependencies() if self._arguments.dependencies else self._plain()

        async def handle(message: Message) -> object:
            try:
                return await call(message)
            except _Undecodable as error:
                decision = _decide(message, error, failure)
                raise decision from error.__cause__

        stand_in(handle, self._function)
        return handle

    def _plain(self) -> Handler:
        function, arguments = self._function, self._arguments
        sources: Any = arguments.sources
        if len(sources) == 1 and not arguments.names:
            source = sources[0]
            return lambda message: function(source(message))
        return lambda message: arguments.pass_to(function, [source(message) for source in sources])

    def _with_dependencies(self) -> Handler:
        function, arguments = self._function, self._arguments

        async def managed(message: Message) -> object:
            async with AsyncExitStack() as stack:
                try:
                    return await _Call(message, stack).call(function, arguments)
                except BaseException as error:
                    failure = error
                    raise
            raise failure  # a dependency hid it, as after a rollback; a return would finish the message

        if any(dependency.managed for dependency in arguments.dependencies):
            return managed
        return lambda message: _Call(message, None).call(function, arguments)


def _decide(message: Message, error: _Undecodable, failure: FailureOptions) -> Reject | Requeue:
    where = {"topic": message.topic, "partition": message.partition, "attempts": message.attempts}
    if failure.dead_letter is not None:
        logger.error("%r is rejected: %s", message, error, extra=where)
        return Reject(str(error))
    delay = failure.max_requeue_delay
    logger.error("%r is requeued for %g s: %s; set dead_letter", message, delay, error, extra=where)
    return Requeue(delay, backoff=False)


def plan_call(function: Callable[..., Awaitable[object]]) -> CallPlan | None:
    """Plan the call of a handler; None for a handler of messages.

    A parameter without annotation, of type `nsqext.Message` or ``object`` receives the message. A marker (`Header`,
    `Depends`) or an annotation of this module (`Key`, `Tag`, `Headers`) selects its value. One further parameter
    receives the body, decoded by its annotation.

    Raises InvalidSetting.
    """
    if takes_message(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    planner = _Planner(function)
    arguments = planner.arguments(parameters, function)
    return CallPlan(function, arguments, planner.inputs)


def message_handler(function: Callable[..., Awaitable[object]], failure: FailureOptions) -> Handler:
    """Return the function, or a wrapper that passes its arguments; raises InvalidSetting."""
    plan = plan_call(function)
    return function if plan is None else plan.handler(failure)


class _Planner:
    """Finds the sources of a handler's parameters and dependencies."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._name = getattr(handler, "__qualname__", repr(handler))
        self._body: str | None = None
        self._locals = _local_names(inspect.currentframe())
        self._dependencies: dict[Callable[..., Any], _Dependency] = {}
        self._planning: set[Callable[..., Any]] = set()
        self._kind: Any = None  # of the body
        self._headers: dict[str, HeaderInput] = {}
        self._fields: set[_Field] = set()

    @property
    def inputs(self) -> Inputs:
        """What the parameters planned so far read of a message."""
        fields = self._fields
        return Inputs(self._kind, tuple(self._headers.values()), _Field.KEY in fields, _Field.TAG in fields)

    def _check_annotated(self, parameters: list[inspect.Parameter]) -> None:
        """Refuse a parameter without annotation beside another that receives the message."""
        messages = [one for one in parameters if is_message(one.annotation)]
        bare = [one for one in messages if one.annotation is inspect.Parameter.empty]
        if bare and len(messages) > 1:
            name = bare[-1].name
            first = next(one.name for one in messages if one.name != name)
            raise InvalidSetting(
                f"the parameter {name} of the handler {self._name} has no annotation, and {first} receives the message",
                hint=f"annotate it: {name}: Order, Annotated[..., Depends(...)] or Annotated[str, Header()]",
            )

    def arguments(
        self, parameters: list[inspect.Parameter], function: Callable[..., Any], *, body: bool = True
    ) -> _Arguments:
        if body:
            self._check_annotated(parameters)
        hints = self._hints(function)
        positional: list[_Source | _Dependency] = []
        skipped: list[_Source] = []  # of parameters that keep their defaults; passed only if others follow
        keyword: dict[str, _Source | _Dependency] = {}
        for parameter in parameters:
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise InvalidSetting(f"the handler {self._name} has a parameter *{parameter.name}", hint="name it")
            source = self._source(parameter, hints.get(parameter.name, parameter.annotation), body=body)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                if source is not None:
                    keyword[parameter.name] = source
            elif source is None:
                skipped.append(_constant(parameter.default))
            else:
                positional += (*skipped, source)
                skipped.clear()
        return _Arguments((*positional, *keyword.values()), tuple(keyword))

    def _hints(self, function: Callable[..., Any]) -> dict[str, Any]:
        while isinstance(function, functools.partial):
            function = function.func
        if not inspect.isroutine(function):
            function = function if inspect.isclass(function) else type(function).__call__
        target = function.__init__ if inspect.isclass(function) else function
        try:
            return get_type_hints(target, localns=self._locals, include_extras=True)
        except NameError as error:
            raise InvalidSetting(
                f"an annotation of the handler {self._name} is unknown: {error}",
                hint="import the type outside of 'if TYPE_CHECKING'",
            ) from None

    def _source(self, parameter: inspect.Parameter, annotation: Any, *, body: bool) -> _Source | _Dependency | None:
        base, *markers = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        self._check_marker(parameter, markers)
        if is_message(annotation):
            return lambda message: message
        for marker in markers:
            if isinstance(marker, _Field):
                self._fields.add(marker)
                return attrgetter(marker.value)
            if isinstance(marker, Header):
                wanted = _header_input(marker.name or parameter.name, base, parameter)
                if wanted.required or wanted.name not in self._headers:
                    self._headers[wanted.name] = wanted
                return _header(wanted, None if parameter.default is inspect.Parameter.empty else parameter.default)
            if isinstance(marker, Depends):
                return self._dependency(marker.function)
        if not body:
            raise InvalidSetting(
                f"the parameter {parameter.name!r} of a dependency of {self._name} cannot be filled",
                hint="dependencies may have the message, headers, key, tag and other dependencies",
            )
        if self._body is not None:
            if parameter.default is not inspect.Parameter.empty:
                return None
            raise InvalidSetting(
                f"the handler {self._name} has two parameters for the body: {self._body!r} and {parameter.name!r}",
                hint="annotate the other one with Header, Headers, Key, Tag, Depends or nsqext.Message",
            )
        self._body, self._kind = parameter.name, annotation
        return _body(annotation)

    def _check_marker(self, parameter: inspect.Parameter, markers: list[Any]) -> None:
        """Refuse a marker in place of a default, and one that was not called: the parameter would receive the body."""
        default = parameter.default
        if isinstance(default, (Header, Depends)) or any(
            one is Header or one is Depends for one in (default, *markers)
        ):
            raise InvalidSetting(
                f"the marker of the parameter {parameter.name!r} of the handler {self._name} has no effect",
                hint=f"write {parameter.name}: Annotated[..., Depends(function)] or Annotated[str, Header()]",
            )

    def _dependency(self, function: Callable[..., Any]) -> _Dependency:
        if function in self._planning:
            raise InvalidSetting(f"the dependency {function!r} of {self._name} depends on itself")
        found = self._dependencies.get(function)
        if found is None:
            self._planning.add(function)
            parameters = list(inspect.signature(function).parameters.values())
            found = _Dependency(function, self.arguments(parameters, function, body=False))
            self._planning.discard(function)
            self._dependencies[function] = found
        return found


def _constant(value: Any) -> _Source:
    return lambda message: value


def _local_names(frame: FrameType | None) -> dict[str, Any]:
    """Return the names visible where the handler is defined."""
    while frame is not None and in_package(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return dict(frame.f_locals) if frame is not None else {}


def _body(annotation: Any) -> _Source:
    # consumers of plain messages do not load msgspec
    from nsqext.client.consumer.typed.body import body_decoder, type_name

    decode = body_decoder(annotation)
    if decode is None:
        return lambda message: message.body
    name = type_name(annotation)
    decoder = decode

    def read(message: Message) -> Any:
        try:
            return decoder(message.body)
        except (ValueError, RecursionError) as error:
            raise _Undecodable(f"the body is not a valid {name}: {outside_text(str(error))}") from error

    return read


_HEADER_KINDS = (str, int, float)


def _header_input(name: str, annotation: Any, parameter: inspect.Parameter) -> HeaderInput:
    """Return the header that a parameter of type str, int or float receives; raises InvalidSetting."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    options = [one for one in kinds if one is not type(None)]
    if len(options) != 1 or options[0] not in _HEADER_KINDS:
        raise InvalidSetting(
            f"the header {name!r} cannot be read as {annotation!r}", hint="headers are str, int or float"
        )
    required = parameter.default is inspect.Parameter.empty and type(None) not in kinds
    return HeaderInput(name, options[0], required)


def _header(wanted: HeaderInput, default: Any) -> _Source:
    """Return a reader of a header."""
    name, required, convert = wanted.name, wanted.required, wanted.kind

    def source(message: Message) -> Any:
        value = message.header_value(name)
        if value is None:
            found = message.all_headers().get(name)
            value = repr(found) if isinstance(found, float) else None  # of other clients: nsqext writes text
        if value is None:
            if required:
                raise _Undecodable(f"the header {name!r} is missing")
            return default
        try:
            return convert(value)
        except ValueError as error:
            raise _Undecodable(f"the header {name!r} is not a number: {outside_text(str(error))}") from error

    return source
