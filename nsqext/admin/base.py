"""Open, settings and end of an administration client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, Unpack

from anyio.lowlevel import current_token

from nsqext.admin.options import AdminOptions, AdminSettings, admin_schema
from nsqext.admin.requests import ClusterRequests
from nsqext.errors import InvalidState
from nsqext.lookup.client import LookupClient
from nsqext.settings import build

_REQUEST_TIMEOUT = 15.0  # default of `lookup_request_timeout`, in seconds


class AdminBase:
    """What the groups of methods of `nsqext.Admin` share; its arguments are documented there."""

    def __init__(
        self, lookupd: str | Sequence[str] = (), *, env: str | None = None, **settings: Unpack[AdminSettings]
    ) -> None:
        schema = admin_schema()
        given = schema.collect(lookupd, (), env, settings)
        # nsqlookupd forwards a change to the nodes before it responds
        values = {"lookup_request_timeout": _REQUEST_TIMEOUT, **given.values}
        self._options = build(AdminOptions, schema.own, values)
        self._requests = ClusterRequests(LookupClient(given.lookupd, self._options.lookup), self._options.timeout)
        self._closed = False
        self._loop: object = None  # the event loop of the first call, which has the connections

    @property
    def settings(self) -> Mapping[str, object]:
        """The values of all settings by name, defaults included; secrets are ``***``."""
        return admin_schema().effective(self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Closing twice does nothing."""
        self._closed = True
        await self._requests.client.aclose()

    def _open(self) -> ClusterRequests:
        if self._closed:
            raise InvalidState("the admin client is closed", hint="create a new one")
        loop = current_token().native_token
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidState(
                "the admin client is used from another event loop than before",
                hint="create one for each event loop; nsqext.sync.Admin serves threads",
            )
        return self._requests
