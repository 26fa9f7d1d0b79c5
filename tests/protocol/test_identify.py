"""The client's side of IDENTIFY."""

from __future__ import annotations

import os
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.identify import FILTER_EQUAL, FILTER_MULTI, ExtFilter, IdentifyRequest, Negotiated
from nsqext.protocol.server.negotiate import ClientSettings, ServerLimits, identify_reply, negotiate
from tests.support.tables import table


def _members(request: IdentifyRequest) -> dict[str, Any]:
    members: dict[str, Any] = orjson.loads(request.encode())
    return members


def test_unset_options_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host.example")
    members = _members(IdentifyRequest())
    assert set(members) == {"client_id", "hostname", "user_agent", "feature_negotiation"}
    assert members["feature_negotiation"] is True
    assert members["user_agent"].startswith("nsqext/")
    assert (members["client_id"], members["hostname"]) == (f"host-{os.getpid()}", "host.example")


def test_everything_is_sent_in_the_servers_units() -> None:
    request = IdentifyRequest(
        client_id="c", hostname="h.example", user_agent="u", heartbeat_interval=1.5, msg_timeout=90, sample_rate=10,
        output_buffer_size=64, output_buffer_timeout=0.25, tls=True, deflate_level=3, desired_tag="t",
        extend_support=True, ext_filter=ExtFilter(FILTER_EQUAL, "k", "v"), extra={"topology_zone": "z"},
    )  # fmt: skip
    assert _members(request) == {
        "client_id": "c", "hostname": "h.example", "user_agent": "u", "feature_negotiation": True,
        "heartbeat_interval": 1500, "msg_timeout": 90000, "sample_rate": 10, "output_buffer_size": 64,
        "output_buffer_timeout": 250, "tls_v1": True, "deflate": True, "deflate_level": 3, "desired_tag": "t",
        "extend_support": True, "topology_zone": "z",
        "ext_filter": {"type": 1, "inverse": False, "filter_ext_key": "k", "filter_data": "v"},
    }  # fmt: skip


def test_a_filter_of_several_names() -> None:
    found = ExtFilter(FILTER_MULTI, "any", pairs=(("a", "1"), ("b", "2")), inverse=True).as_json()
    assert found == {
        "type": 4,
        "inverse": True,
        "filter_ext_key": "any",
        "filter_data": "",
        "filter_data_list": [
            {"filter_ext_key": "a", "filter_data": "1"},
            {"filter_ext_key": "b", "filter_data": "2"},
        ],
    }


@table(
    ("options", "text"),
    [
        ({"snappy": True, "deflate_level": 1}, "cannot be used together"),
        ({"sample_rate": 100}, "sample_rate=100"),
        ({"sample_rate": -1}, "sample_rate=-1"),
        ({"deflate_level": 10}, "deflate_level=10"),
        ({"heartbeat_interval": -1}, "heartbeat_interval=-1 is not a time"),
        ({"heartbeat_interval": float("nan")}, "heartbeat_interval=nan"),
        ({"msg_timeout": float("inf")}, "msg_timeout=inf"),
        ({"msg_timeout": "5"}, "msg_timeout='5'"),
        ({"msg_timeout": True}, "msg_timeout=True"),
        ({"extra": {"x": object()}}, "cannot be written as JSON"),
        ({"desired_tag": "\ud800"}, "cannot be written as JSON"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        IdentifyRequest(**options).encode()


def test_both_roles_agree() -> None:
    limits = ServerLimits(tls=True, auth=True)
    settings = ClientSettings.defaults(limits)
    request = IdentifyRequest(tls=True, snappy=True, msg_timeout=2, sample_rate=5, desired_tag="t", extend_support=True)
    negotiate(request.encode(), limits, settings)
    granted = Negotiated.decode(identify_reply(settings, limits))
    assert granted == Negotiated(
        version="0.3.7-HA.1.13.0", max_rdy_count=2500, msg_timeout=2.0, max_msg_timeout=900.0, tls=True, snappy=True,
        deflate_level=0, auth_required=True, sample_rate=5, desired_tag="t",
    )  # fmt: skip
    assert granted.redesigned
    assert settings.extend_support


def test_a_server_without_negotiation_has_defaults() -> None:
    assert Negotiated.decode(b"OK") == Negotiated()
    assert not Negotiated.decode(b'{"version":"1.3.0-rc1"}').redesigned
    assert Negotiated.decode(b'{"max_msg_timeout":300000}').max_msg_timeout == 300.0


def test_deflate_without_a_level_is_deflate() -> None:
    assert Negotiated.decode(b'{"deflate":true,"deflate_level":0}').deflate_level == 6
    assert Negotiated.decode(b'{"deflate":false,"deflate_level":6}').deflate_level == 0


@table(
    "data",
    [
        b"", b"KO", b"[]", b"5", b"null{", b'"OK"', b"\xff", b'{"tls_v1":"yes"}', b'{"max_rdy_count":0}',
        b'{"max_rdy_count":"many"}', b'{"msg_timeout":[1]}', b'{"msg_timeout":-5}', b'{"sample_rate":{}}',
        b'{"deflate":true,"deflate_level":99}', b"<html>", b'{"max_rdy_count":1e999}',
    ],
)  # fmt: skip
def test_an_invalid_response_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the response to IDENTIFY"):
        Negotiated.decode(data)


@given(text=st.text(), times=st.sampled_from([1, 1000]))
@example(text="1\n\x1b[2J\u202e", times=1)
def test_texts_of_a_response_are_printable_and_bounded(text: str, times: int) -> None:
    members = dict.fromkeys(("version", "desired_tag", "dispatch"), text.encode(errors="replace").decode() * times)
    found = Negotiated.decode(orjson.dumps(members))
    for shown in (found.version, found.desired_tag, found.dispatch):
        assert shown.isprintable()
        assert len(shown) <= 501
