"""Import apps by name, and describe them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from nsqext import App
from nsqext.errors import InvalidSetting


def load_app(place: str) -> App:
    """Import an app from ``module:name``; the name may have dots, and is by default ``app``."""
    module, _, name = place.partition(":")
    if not module or module.startswith("."):
        raise InvalidSetting(f"{place!r} names no module", hint="write module:app")
    try:
        found: object = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # raised in the app's module
        raise InvalidSetting(f"{place}: no module {error.name!r}", hint="run it in the folder of the module") from None
    for part in (name or "app").split("."):
        found = getattr(found, part, None)
    if not isinstance(found, App):
        raise InvalidSetting(f"{place} is not an nsqext.App", hint="write module:app")
    return found


def described(place: str) -> dict[str, Any]:
    """Return the document of an app, ``module:app`` found from the current folder, or from a file."""
    if place.endswith(".json"):
        try:
            found: Any = orjson.loads(Path(place).read_bytes())
        except orjson.JSONDecodeError as error:
            raise InvalidSetting(f"{place} is not JSON: {error}") from None
        if not isinstance(found, dict) or not str(found.get("asyncapi")).startswith("3."):
            raise InvalidSetting(
                f"{place} is not a document of AsyncAPI 3", hint="nsqext app schema module:app writes it"
            )
        return found
    from nsqext.app import asyncapi_document

    if str(Path.cwd()) not in sys.path:  # a program that pip installed starts without it
        sys.path.insert(0, str(Path.cwd()))
    return asyncapi_document(load_app(place))
