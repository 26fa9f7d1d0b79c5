"""Services: handlers for several topics with typed bodies, and one producer.

`App` runs them; `Router` collects the handlers of a part of a service. Annotations select what a handler's parameters
receive: the decoded body, `nsqext.Message`, `Headers`, `Key`, `Tag`, a `Header`, or the result of a function
(`Depends`).
"""

from __future__ import annotations

from nsqext.app.app import App
from nsqext.app.asyncapi import asyncapi_document
from nsqext.app.health import Health, HealthEndpoint
from nsqext.app.router import Router
from nsqext.app.testing import AppTest
from nsqext.client.consumer.typed.body import decode_body, encode_body
from nsqext.client.consumer.typed.parameters import Depends, Header, Headers, Key, Tag

__all__ = (
    "App",
    "AppTest",
    "Depends",
    "Header",
    "Headers",
    "Health",
    "HealthEndpoint",
    "Key",
    "Router",
    "Tag",
    "asyncapi_document",
    "decode_body",
    "encode_body",
)
