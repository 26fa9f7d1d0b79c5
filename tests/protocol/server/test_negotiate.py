"""The server's side of IDENTIFY, in both generations."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from nsqext.protocol.server.negotiate import ClientSettings, ServerLimits, identify_reply, negotiate
from nsqext.protocol.server.request_error import RequestError
from tests.support.tables import table

_REDESIGNED = ServerLimits()
_ORIGINAL = ServerLimits.original()


def _identify(limits: ServerLimits, **members: Any) -> ClientSettings:
    settings = ClientSettings.defaults(limits)
    negotiate(orjson.dumps({"feature_negotiation": True, **members}), limits, settings)
    return settings


def _reply(limits: ServerLimits, **members: Any) -> dict[str, Any]:
    reply: dict[str, Any] = orjson.loads(identify_reply(_identify(limits, **members), limits))
    return reply


def test_defaults_are_the_servers() -> None:
    reply = _reply(_REDESIGNED)
    assert reply == {
        "max_rdy_count": 2500, "version": "0.3.7-HA.1.13.0", "max_msg_timeout": 900000, "msg_timeout": 60000,
        "tls_v1": False, "deflate": False, "deflate_level": 0, "max_deflate_level": 6, "snappy": False,
        "sample_rate": 0, "auth_required": False, "output_buffer_size": 100, "output_buffer_timeout": 50,
    }  # fmt: skip
    reply = _reply(_ORIGINAL)
    assert (reply["output_buffer_size"], reply["output_buffer_timeout"], reply["deflate_level"]) == (16384, 250, 6)
    assert (reply["topology_region"], reply["topology_zone"]) == ("", "")


def test_without_negotiation_the_reply_is_ok_and_no_layer_begins() -> None:
    settings = ClientSettings()
    limits = ServerLimits(tls=True)
    negotiate(b'{"tls_v1":true,"snappy":true,"heartbeat_interval":5000}', limits, settings)
    assert identify_reply(settings, limits) == b"OK"
    assert not (settings.tls or settings.snappy or settings.deflate)
    assert settings.heartbeat_interval == 5.0


def test_settings_of_the_client_are_kept() -> None:
    settings = _identify(
        _REDESIGNED, client_id="c", hostname="h", user_agent="u", desired_tag="té", extend_support=True,
        ext_filter={"type": 4, "filter_ext_key": "any", "filter_data_list": [{"filter_ext_key": "k"}]},
    )  # fmt: skip
    assert (settings.client_id, settings.hostname, settings.user_agent) == ("c", "h", "u")
    assert (settings.desired_tag, settings.extend_support) == ("té", True)
    assert settings.ext_filter["filter_data_list"] == [{"filter_ext_key": "k"}]
    assert orjson.loads(identify_reply(settings, _REDESIGNED))["desired_tag"] == "té"
    legacy = _identify(_REDESIGNED, short_id="s", long_id="l")
    assert (legacy.client_id, legacy.hostname) == ("s", "l")
    original = _identify(_ORIGINAL, short_id="s", desired_tag="t" * 200, extend_support=True)
    assert (original.client_id, original.desired_tag, original.extend_support) == ("", "", False)


def test_identifying_again_keeps_unnamed_settings() -> None:
    settings = _identify(
        _REDESIGNED, desired_tag="t", heartbeat_interval=2000, msg_timeout=3000, extend_support=True, snappy=True
    )
    negotiate(b'{"client_id":"again"}', _REDESIGNED, settings)
    assert (settings.desired_tag, settings.heartbeat_interval, settings.msg_timeout) == ("t", 2.0, 3.0)
    assert settings.extend_support
    assert not settings.snappy


@table(
    ("members", "name", "expected"),
    [
        ({"heartbeat_interval": -1}, "heartbeat_interval", 0.0),
        ({"heartbeat_interval": 60000}, "heartbeat_interval", 60.0),
        ({"output_buffer_size": -1}, "output_buffer_size", 1),
        ({"output_buffer_size": 64}, "output_buffer_size", 64),
        ({"output_buffer_size": 1 << 40}, "output_buffer_size", 65536),
        ({"output_buffer_timeout": 3}, "output_buffer_timeout", 0.01),
        ({"output_buffer_timeout": -1}, "output_buffer_timeout", 0.0),
        ({"output_buffer_timeout": 1000}, "output_buffer_timeout", 1.0),
        ({"sample_rate": 99}, "sample_rate", 99),
        ({"msg_timeout": 1000}, "msg_timeout", 1.0),
        ({"msg_timeout": 0}, "msg_timeout", 60.0),
        ({"deflate": True, "deflate_level": 3}, "deflate_level", 3),
        ({"deflate": True, "deflate_level": 9}, "deflate_level", 6),
        ({"deflate": True}, "deflate_level", 0),
        ({"deflate": True, "deflate_level": -9}, "deflate_level", -1),
    ],
)
def test_settings_granted_by_the_redesigned_server(members: dict[str, Any], name: str, expected: float) -> None:
    assert getattr(_identify(_REDESIGNED, **members), name) == expected


@pytest.mark.parametrize(
    ("members", "name", "expected"),
    [
        ({"output_buffer_size": -1}, "output_buffer_timeout", 0.0),
        ({"output_buffer_timeout": 25}, "output_buffer_timeout", 0.025),
        ({"output_buffer_timeout": 30000}, "output_buffer_timeout", 30.0),
        ({"deflate": True}, "deflate_level", 6),
        ({"deflate": True, "deflate_level": 2}, "deflate_level", 2),
        ({"deflate": True, "deflate_level": 9}, "deflate_level", 6),
        ({"deflate_level": 2}, "deflate_level", 6),
    ],
)
def test_settings_granted_by_the_original_server(members: dict[str, Any], name: str, expected: float) -> None:
    assert getattr(_identify(_ORIGINAL, **members), name) == expected


@table(
    ("limits", "members", "text"),
    [
        (_REDESIGNED, {"heartbeat_interval": 999}, "heartbeat interval (999) is invalid"),
        (_REDESIGNED, {"heartbeat_interval": 60001}, "heartbeat interval (60001) is invalid"),
        (_REDESIGNED, {"heartbeat_interval": -2}, "heartbeat interval (-2) is invalid"),
        (_REDESIGNED, {"output_buffer_size": 63}, "output buffer size (63) is invalid"),
        (_REDESIGNED, {"output_buffer_size": -2}, "output buffer size (-2) is invalid"),
        (_ORIGINAL, {"output_buffer_size": 65537}, "output buffer size (65537) is invalid"),
        (_REDESIGNED, {"output_buffer_timeout": 1001}, "output buffer timeout (1001) is invalid"),
        (_ORIGINAL, {"output_buffer_timeout": 24}, "output buffer timeout (24) is invalid"),
        (_REDESIGNED, {"sample_rate": 100}, "sample rate (100) is invalid"),
        (_REDESIGNED, {"sample_rate": -1}, "sample rate (-1) is invalid"),
        (_REDESIGNED, {"msg_timeout": 999}, "msg timeout (999) is invalid"),
        (_REDESIGNED, {"msg_timeout": -1}, "msg timeout (-1) is invalid"),
        (_ORIGINAL, {"msg_timeout": 900001}, "msg timeout (900001) is invalid"),
        (_REDESIGNED, {"desired_tag": "é" * 51}, "invalid tag len 102, exceed limit 100"),
        (_REDESIGNED, {"desired_tag": 5}, "failed to decode JSON body"),
        (_ORIGINAL, {"topology_zone": 5}, "failed to decode JSON body"),
    ],
)
def test_refused_settings(limits: ServerLimits, members: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        _identify(limits, **members)
    assert str(caught.value) == f"E_BAD_BODY IDENTIFY {text}"
    assert caught.value.fatal


def test_the_first_error_in_the_servers_order_is_answered() -> None:
    bad = {"output_buffer_size": 1, "output_buffer_timeout": 99999, "sample_rate": 100, "msg_timeout": 1}
    with pytest.raises(RequestError, match="output buffer size"):
        _identify(_REDESIGNED, **bad)
    with pytest.raises(RequestError, match="output buffer timeout"):
        _identify(_ORIGINAL, **bad)


@pytest.mark.parametrize("limits", [_REDESIGNED, _ORIGINAL])
def test_two_compressions_are_refused(limits: ServerLimits) -> None:
    with pytest.raises(RequestError, match="E_IDENTIFY_FAILED cannot enable both deflate and snappy compression"):
        _identify(limits, snappy=True, deflate=True)
    assert _identify(ServerLimits(snappy=False), snappy=True, deflate=True).deflate


def test_layers_are_granted_as_the_server_has_them() -> None:
    assert not _identify(_REDESIGNED, tls_v1=True).tls
    assert _reply(ServerLimits(tls=True), tls_v1=True)["tls_v1"] is True
    assert _reply(_REDESIGNED, msg_timeout=1500)["msg_timeout"] == 1500
    assert _reply(_REDESIGNED, snappy=True)["snappy"] is True
    assert _reply(ServerLimits(auth=True))["auth_required"] is True
