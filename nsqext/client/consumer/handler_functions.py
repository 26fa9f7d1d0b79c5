"""Functions that programs register as handlers, and their wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

from nsqext.arguments import is_coroutine_function
from nsqext.errors import InvalidSetting, InvalidState


def coroutine_handler(function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
    """Return a handler as a coroutine function: a blocking handler is called in a thread. Raises InvalidSetting."""
    check_handler_function(function)
    if is_coroutine_function(function):
        return cast("Callable[..., Awaitable[object]]", function)
    from nsqext.client.consumer.blocking import check_blocking_handler, in_thread

    check_blocking_handler(function)
    return in_thread(function)


def stand_in(wrapper: Any, function: object, *, published: bool = False) -> None:
    """Give a wrapper its handler's name and return annotation; None if its result is published."""
    wrapper.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
    returns = getattr(function, "__annotations__", {}).get("return", object)
    wrapper.__annotations__ = {**wrapper.__annotations__, "return": None if published else returns}
    wrapper.runs_in_thread = getattr(function, "runs_in_thread", False)


def check_handler_function(function: object) -> None:
    """Raise InvalidSetting unless a handler is a function, no generator, and no unbound method."""
    name = getattr(function, "__qualname__", None) or repr(function)
    if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(type(function).__call__):
        raise InvalidSetting(
            f"the handler {name} is an asynchronous generator",
            hint="remove 'yield' from it; publish what it yields with a producer",
        )
    if inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(type(function).__call__):
        raise InvalidSetting(f"the handler {name} is a generator", hint="remove 'yield' from it")
    if not callable(function) or inspect.isclass(function):
        raise InvalidSetting(f"the handler {name} is not a function", hint="declare it with 'async def' or 'def'")
    plain = inspect.unwrap(function, stop=inspect.ismethod)
    if inspect.isfunction(plain) and next(iter(inspect.signature(plain).parameters), "") == "self":
        raise InvalidSetting(
            f"the handler {plain.__qualname__} is a method without its object",
            hint="register the method of an object: consumer.handler(service.handle)",
        )


def check_unopened(loop: object, topic: str) -> None:
    """Raise InvalidState if an event loop has opened the consumer of a handler."""
    if loop is not None:
        raise InvalidState(
            "the consumer was opened before, and would not call this handler",
            topic=topic,
            hint="register the handler before start, serve or async with",
        )


_PACKAGE = __name__.partition(".")[0]


def takes_message(function: Callable[..., object]) -> bool:
    """Return whether a handler receives messages, not values that its annotations select."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True
    if len(parameters) == 1 and is_message(parameters[0].annotation):
        return True
    return bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL


def is_message(annotation: object) -> bool:
    """Return whether a parameter with this annotation receives the message."""
    if isinstance(annotation, str):  # possibly imported for type checkers only
        return annotation == "object" or annotation.rpartition(".")[2] == "Message"
    if annotation in (inspect.Parameter.empty, object):
        return True
    # blocking clients have another message class
    return isinstance(annotation, type) and annotation.__name__ == "Message" and in_package(annotation.__module__)


def in_package(module: str) -> bool:
    """Return whether a module is of this package."""
    return module.partition(".")[0] == _PACKAGE
