"""Requests to lookup nodes and nodes; every failure is a `LookupFailed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, NotLookupd, NsqError, PartitionUnavailable
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.lookup.options import url_of
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    import httpx

    from nsqext.http.client import Reason
    from nsqext.lookup.options import LookupOptions
    from nsqext.types import Address

_BARE = {"Accept": "application/vnd.nsq; version=1.0"}  # bare responses with true status codes
_ERRORS: dict[Reason, tuple[type[LookupFailed], str | None]] = {
    "unreachable": (LookupUnreachable, "check that the node runs"),
    "not HTTP": (NotLookupd, "give the address of nsqlookupd's HTTP side (4161 by default)"),
    "untrusted": (
        NotLookupd,
        "give the CA certificates of the lookup service: LookupOptions(ca=...) or NSQEXT_LOOKUP_CA",
    ),
    "too long": (LookupFailed, "raise max_answer_size"),
}


class LookupHttp:
    """HTTP requests to nsqlookupd and nsqd; a given httpx transport is closed by the caller."""

    def __init__(self, options: LookupOptions, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._options = options
        self._client = HttpClient(
            options.request_timeout, most=options.max_answer_size, tls=options.tls_context, transport=transport
        )

    async def ask(self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET") -> Any:
        """Return the data of a response; raises TopicNotFound, LookupFailed or InvalidState."""
        status, body = await self.fetch(address, path, params, method)
        return unwrap(status, body, address)

    async def fetch(
        self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body of a response; raises LookupUnreachable, LookupFailed, NotLookupd or InvalidState."""
        options, headers = self._options, _BARE
        if options.auth_secret is not None and options.may_authenticate(address):
            headers = {**_BARE, "Authorization": f"Bearer {options.auth_secret}"}
        try:
            url = f"{url_of(address)}{path}{'?' if params else ''}{urlencode(params)}"
            reply = await self._client.request(method, url, headers=headers, content=body)
        except (HttpRequestFailed, UnicodeError) as error:
            raise _lookup_error(error, str(address)) from error.__cause__
        return reply.status, reply.content

    async def fetch_node(
        self,
        address: Address,
        path: str,
        params: Mapping[str, str | int],
        method: str = "GET",
        body: bytes = b"",
        *,
        failure: type[NsqError] = PartitionUnavailable,
        **where: Any,
    ) -> tuple[int, bytes]:
        """Return status and body of an nsqd's response, as `fetch`, which raises the errors of lookup nodes."""
        try:
            return await self.fetch(address, path, params, method, body)
        except LookupFailed as error:
            hint = error.hint or "check that the node's HTTP side can be reached"
            raise failure(f"no response to {path}: {error.message}", node=error.node, hint=hint, **where) from error

    async def aclose(self) -> None:
        """Cancel pending requests and close the connections, also when it is cancelled."""
        await self._client.aclose()


def _lookup_error(error: HttpRequestFailed | UnicodeError, node: str) -> LookupFailed | InvalidState:
    if isinstance(error, UnicodeError):
        return LookupFailed(f"no response: {error}", node=node)
    if error.reason == "closed":
        return InvalidState(error.text.replace("the client", "the lookup client"), node=node)
    kind, hint = _ERRORS.get(error.reason, (LookupFailed, None))
    return kind(error.text, node=node, hint=hint)
