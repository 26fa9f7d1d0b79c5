"""Writes the AsyncAPI document of ``examples/orders``: ``python -m docs.asyncapi_example``."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from unittest import mock

import orjson

from nsqext.app import asyncapi_document
from nsqext.transactions import OutboxStore

PATH = Path(__file__).parents[1] / "examples" / "orders" / "asyncapi.json"
_MODULE = "examples.orders.worker"


def document() -> bytes:
    """Return the document, made without a cluster and with an empty database of SQLite in place of PostgreSQL."""
    given = {"NSQEXT_LOOKUPD": "lookupd:4161", "ORDERS_DATABASE": "postgresql://shop@db/shop"}
    with tempfile.TemporaryDirectory() as folder, OutboxStore(f"sqlite:///{folder}/shop.db", create=True) as store:
        with mock.patch.dict(os.environ, given), mock.patch("nsqext.transactions.OutboxStore", lambda _: store):
            app = import_module(_MODULE).app
        del sys.modules[_MODULE]  # its relay has the store
        found = asyncapi_document(app, title="Orders")
    return orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n"


if __name__ == "__main__":
    PATH.write_bytes(document())
