"""The HTTP application of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from nsqext.http.api import Call, Form, application, at_first_request, first_values, route

if TYPE_CHECKING:
    from starlette.applications import Starlette

pytestmark = pytest.mark.anyio


async def test_the_first_value_of_a_name_counts() -> None:
    assert first_values("a=1&b=&a=2") == {"a": "1", "b": ""}


async def test_an_application_is_made_once_by_its_first_request() -> None:
    made: list[Starlette] = []

    def ping(call: Call) -> str:
        return "OK"

    def make() -> Starlette:
        made.append(application([route("GET", "/ping", ping, Form.TEXT)]))
        return made[-1]

    app = at_first_request(make)
    assert made == []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        assert [(await client.get("/ping")).text for _ in range(2)] == ["OK", "OK"]
    assert len(made) == 1


async def test_an_error_of_an_endpoint_is_an_internal_error() -> None:
    def broken(call: Call) -> str:
        raise RuntimeError("broken")

    transport = httpx.ASGITransport(application([route("GET", "/x", broken, Form.TEXT)]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await client.get("/x")
    assert (answer.status_code, answer.json()) == (500, {"message": "INTERNAL_ERROR"})
