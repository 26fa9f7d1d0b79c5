"""An auth server for nsqd: grants everything for one secret."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "s3cr3t-that-is-granted"

_GRANT = (
    b'{"ttl":60,"identity":"tests","identity_url":"","authorizations":'
    b'[{"permissions":["subscribe","publish"],"topic":".*","channels":[".*"]}]}'
)


class _Authority(BaseHTTPRequestHandler):
    secret = SECRET

    def do_GET(self) -> None:
        body = _GRANT if f"secret={self.secret}" in self.path else b""
        self.send_response(200 if body else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def auth_server(secret: str = SECRET) -> Iterator[str]:
    """Run an auth server that grants everything for a secret; give its ``host:port``."""
    handler = type("Authority", (_Authority,), {"secret": secret})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
