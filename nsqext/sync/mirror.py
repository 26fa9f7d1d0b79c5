"""Members of blocking objects that are those of the asynchronous object of the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, overload

if TYPE_CHECKING:
    from typing import Protocol

    class Blocking(Protocol):
        """A blocking object."""

        _original: Any

        def _run(
            self, function: Callable[..., Coroutine[Any, Any, Any]], /, *args: object, **keywords: object
        ) -> Any: ...


P = ParamSpec("P")
T = TypeVar("T")


class Method(Generic[P, T]):
    """A method that calls the asynchronous object's method of this name in the event loop, and waits for its result.

    Assigned to a name of the class with ``Final``, without which its type would count as unknown to users.
    """

    @overload
    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None: ...

    @overload
    def __init__(self, function: Callable[Concatenate[Any, P], T]) -> None: ...

    def __init__(self, function: Callable[Concatenate[Any, P], Any]) -> None:
        self._function = function  # the asynchronous method, which has the parameters and the result

    def __set_name__(self, owner: type, name: str) -> None:
        """Replace this by a function, which documentation and inspection show as a method."""

        def call(self: Blocking, /, *args: object, **keywords: object) -> object:
            return self._run(getattr(self._original, name), *args, **keywords)

        original = self._function
        # the names of annotations are looked up in the globals of the original
        method = FunctionType(call.__code__, original.__globals__, name, None, call.__closure__)
        functools.update_wrapper(method, original)
        del vars(method)["__wrapped__"]  # mocks would count it as a coroutine function
        vars(method)["__signature__"] = inspect.signature(original)
        method.__module__, method.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        method.__doc__ = f"See `nsqext.{owner.__name__}.{name}`."
        setattr(owner, name, method)

    if TYPE_CHECKING:

        @overload
        def __get__(self, blocking: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...

        @overload
        def __get__(self, blocking: object, owner: type) -> Callable[P, T]: ...

        def __get__(self, blocking: object, owner: type) -> Any:
            """Bind the method."""


class Same(Generic[T]):
    """A property that has the value and the meaning of the asynchronous object's member of this name."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Replace this by a property, which cannot be assigned to."""
        setattr(owner, name, property(attrgetter(f"_original.{name}"), doc=f"See `nsqext.{owner.__name__}.{name}`."))

    if TYPE_CHECKING:

        @overload
        def __get__(self, blocking: None, owner: type) -> Self: ...

        @overload
        def __get__(self, blocking: Blocking, owner: type) -> T: ...

        def __get__(self, blocking: Blocking | None, owner: type) -> T | Self:
            """Return the value."""

        def __set__(self, blocking: Blocking, value: Never) -> None:
            """Raise AttributeError."""
