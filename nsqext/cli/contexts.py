"""Contexts: named connection settings in a file, one URL each.

The file is ``~/.config/nsqext/contexts.toml``, or the path in ``NSQEXT_CONTEXTS_FILE``. It may contain secrets, so only
its owner can read it.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path

from attrs import field, frozen

from nsqext.errors import InvalidSetting

FILE_VARIABLE = "NSQEXT_CONTEXTS_FILE"


@frozen
class Contexts:
    """Content of the contexts file."""

    urls: dict[str, str] = field(factory=dict)
    current: str | None = None  # name of the context to use if no address is given, or None

    def url(self, name: str) -> str:
        """Return the URL of a context."""
        if name not in self.urls:
            known = ", ".join(sorted(self.urls)) or "none"
            raise InvalidSetting(
                f"there is no context {name!r}", hint=f"known: {known}; `nsqext config set {name} URL` creates one"
            )
        return self.urls[name]


def contexts_file() -> Path:
    """Return the path of the file."""
    chosen = os.environ.get(FILE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nsqext" / "contexts.toml"


def load_contexts() -> Contexts:
    """Read the file; a missing file counts as empty."""
    path = contexts_file()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}") from error
    urls, current = data.get("contexts", {}), data.get("current")
    sound = isinstance(urls, dict) and all(isinstance(url, str) for url in urls.values())
    if not sound or not isinstance(current, (str, type(None))):
        raise InvalidSetting(f"{path} is not a contexts file", hint='write NAME = "URL" below [contexts]')
    return Contexts(urls, current)


def save_contexts(contexts: Contexts) -> None:
    """Replace the file atomically."""
    # strings of JSON are strings of TOML
    lines = [f"current = {json.dumps(contexts.current)}"] if contexts.current else []
    lines += ["[contexts]", *(f"{json.dumps(name)} = {json.dumps(url)}" for name, url in contexts.urls.items()), ""]
    path = contexts_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # readable by its owner only
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    Path(temporary).replace(path)
