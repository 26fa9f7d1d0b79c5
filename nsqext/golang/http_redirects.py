"""Redirects of the real servers' router for paths that are wrong only in case, slashes or dots."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import Route

_UNQUOTED = "/$&+,:;=@"
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})


def _clean(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def _canonical(table: list[Route], method: str, path: str) -> str | None:
    wanted = _clean(path)
    for known in table:
        fixed, _, variable = known.path.partition("{")
        rest = wanted[len(fixed) :]
        same = wanted.lower().startswith(fixed) and bool(rest) == bool(variable) and "/" not in rest
        if same and method in (known.methods or ()):
            return fixed + rest
    return None


def redirect(table: list[Route], request: Request) -> Response | None:
    """Return a redirect; None if the path is wrong in other ways."""
    path = _canonical(table, request.method, request.scope["path"])
    if path is None:
        return None
    query = request.scope["query_string"].decode("latin-1")
    target = quote(path, safe=_UNQUOTED) + (f"?{query}" if query else "")
    if request.method != "GET":
        return Response(status_code=307, headers={"Location": target})
    text = f'<a href="{target.translate(_HTML)}">Moved Permanently</a>.\n\n'
    return Response(text, 301, {"Location": target}, "text/html; charset=utf-8")
