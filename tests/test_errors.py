"""Error classes: flags that drive retries, and texts."""

from __future__ import annotations

import inspect
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsqext import errors
from nsqext.errors import BatchFailed, NsqError, PublishFailed, ServerError, outside_text
from nsqext.errors.server import (
    SERVER_ERRORS,
    LeaderLost,
    NotLeader,
    PubFailed,
    PubRefused,
    RecordTooLarge,
    TooManyConnections,
    server_error,
)
from nsqext.types import Receipt

_CLASSES = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, NsqError)]

# code: retry, ask lookup, overload, closes, maybe stored
_FLAGS = {
    "E_FAILED_ON_NOT_LEADER": "RL---",
    "E_FAILED_ON_NOT_WRITABLE": "RLO-S",
    "E_TOPIC_NOT_EXIST": "RL-C-",
    "E_PUB_FAILED": "R---S",
    "E_MPUB_FAILED": "R---S",
    "E_DPUB_FAILED": "R---S",
    "E_PUB_TOO_MUCH_WAITING": "R-OC-",
    "E_EXT_NOT_SUPPORT": "-----",
    "E_INVALID_JSON_HEADER": "-----",
    "INVALID_TRACE_ID": "-----",
    "E_BAD_BODY": "---C-",
    "E_BAD_MESSAGE": "---C-",
    "E_BAD_TOPIC": "---C-",
    "E_BAD_CHANNEL": "---C-",
    "E_BAD_PARTITION": "---C-",
    "E_BAD_PARTITIONID": "---C-",
    "E_BAD_TAG": "---C-",
    "E_TAG_NOT_SUPPORT": "---C-",
    "E_BAD_PROTOCOL": "---C-",
    "E_BAD_EXT": "---C-",
    "E_INVALID": "---C-",
    "E_SUB_ORDER_IS_MUST": "RL-C-",
    "E_SUB_EXTEND_NEED": "RL-C-",
    "E_SUB_EXTEND_FORBIDDON": "RL-C-",
    "E_SUB_CHANNEL_NOT_REGISTERED": "---C-",
    "E_SUB_FAILED": "R--C-",
    "E_FIN_FAILED": "-----",
    "E_REQ_FAILED": "-----",
    "E_TOUCH_FAILED": "-----",
    "E_IDENTIFY_FAILED": "---C-",
    "E_AUTH_FIRST": "---C-",
    "E_AUTH_FAILED": "---C-",
    "E_AUTH_ERROR": "---C-",
    "E_AUTH_DISABLED": "---C-",
    "E_UNAUTHORIZED": "---C-",
    "E_CREATE_TOPIC_FAILED": "-----",
}


def _flags(kind: type[NsqError]) -> str:
    values = (kind.retryable, kind.refresh_lookup, kind.overload, kind.closes_connection, kind.maybe_stored)
    return "".join(letter if value else "-" for letter, value in zip("RLOCS", values, strict=True))


def test_every_code_has_its_flags() -> None:
    assert {code: _flags(kind) for code, kind in SERVER_ERRORS.items()} == _FLAGS


def test_errors_without_a_code_have_their_flags() -> None:
    plain = {kind.__name__: _flags(kind) for kind in _CLASSES if _flags(kind) != "-----"}
    assert plain == {
        "ProtocolError": "---C-",
        "FrameTooLarge": "---C-",
        "ConnectionFailed": "RL---",
        "ConnectionLost": "RL-C-",
        "HeartbeatMissed": "RL-C-",
        "NotSent": "RL-C-",
        "RequestTimeout": "RL--S",
        "LookupFailed": "R----",
        "LookupUnreachable": "R----",
        "TopicNotFound": "RL---",
        "TopicNotReady": "-L---",
        "PartitionUnavailable": "RL---",
        "DeliveryUnknown": "----S",
        "ReceiptsMissing": "----S",
        "RangeIncomplete": "R----",
    }
    assert _flags(LeaderLost) == "RL--S"


@pytest.mark.parametrize("code", SERVER_ERRORS)
def test_a_frame_becomes_the_class_of_its_code(code: str) -> None:
    for frame, description in ((f"{code} some text ", "some text"), (f"{code} ", ""), (code, "")):
        error = server_error(frame.encode(), node="n1:4150")
        assert type(error) is SERVER_ERRORS[code]
        assert (error.code, error.description, error.node) == (code, description, "n1:4150")
        assert error.args == (code, description)
        hint = "" if error.hint is None else f": {error.hint}"
        assert str(error) == f"{f'{code} {description}'.strip()} (node n1:4150){hint}"


@pytest.mark.parametrize(
    ("text", "kind", "flags"),
    [
        ("exiting", PubRefused, "R----"),
        ("MPUB failed exiting", PubRefused, "R----"),
        ("pub to wait channel timeout", PubRefused, "R----"),
        ("pub timeout while pop wait queue", PubRefused, "R----"),
        ("ErrType:7 ErrCode:0 : invalid message write size (127) maxMsgSize=126", RecordTooLarge, "-----"),
        ("ErrType:8 ErrCode:0 : topic coordinator is exiting", PubFailed, "R---S"),
        ("write /data/x: no space left on device", PubFailed, "R---S"),
    ],
)
def test_the_text_of_a_failed_publish_says_whether_it_was_written(text: str, kind: type[NsqError], flags: str) -> None:
    error = server_error(f"E_MPUB_FAILED {text}".encode())
    assert type(error) is kind
    assert _flags(kind) == flags
    other = server_error(f"E_REQ_FAILED {text}".encode())
    assert type(other) is SERVER_ERRORS["E_REQ_FAILED"]


@pytest.mark.parametrize(
    "frame", [b"", b" ", b"E_NEW_CODE text", b"\xff\xfe", b"lower case", b"E_INVALIDX", b"E_invalid"]
)
def test_unknown_frames_become_plain_server_errors(frame: bytes) -> None:
    error = server_error(frame)
    assert type(error) is ServerError
    assert _flags(type(error)) == "-----"
    assert str(error) == frame.decode(errors="backslashreplace").strip()


@given(st.binary(max_size=2000))
@example(b"E_INVALID a\nERROR forged\x1b[2J \xe2\x80\xae")
def test_the_text_of_a_frame_is_printable_and_bounded(frame: bytes) -> None:
    text = str(server_error(frame).message)
    assert text.isprintable()
    assert len(text) <= 500 + len(f"… ({len(frame)} bytes)")


def test_a_long_frame_is_cut_and_its_size_is_shown() -> None:
    error = server_error(b"E_INVALID " + b"x" * 600)
    assert error.description == "x" * 490 + "… (610 bytes)"
    assert server_error(b"E_INVALID " + b"x" * 490).description == "x" * 490


def test_a_text_of_the_largest_size_is_whole() -> None:
    assert (outside_text("abc", 3), outside_text("abcd", 3)) == ("abc", "abc…")
    assert outside_text("a\x1b", 3) == "a\\x…"


def test_a_refused_record_has_its_size() -> None:
    error = server_error(b"E_PUB_FAILED ErrType:7 ErrCode:0 : invalid message write size (127) maxMsgSize=126")
    assert isinstance(error, RecordTooLarge)
    assert (error.size, RecordTooLarge("E_PUB_FAILED").size) == (127, 0)


def test_a_failed_batch_names_its_first_failure() -> None:
    stored = Receipt("t", 0, "n:1")
    failed = BatchFailed([stored, PublishFailed("late"), PublishFailed("later")], topic="t")
    assert str(failed) == "2 of 3 messages failed, first: late (topic t)"
    assert failed.outcomes[0] is stored


def test_an_error_without_a_code() -> None:
    error = server_error(b"too much client connections")
    assert type(error) is TooManyConnections
    assert _flags(type(error)) == "R-OC-"
    assert str(error) == "too much client connections"


def test_the_text_says_what_where_and_what_to_do() -> None:
    error = NsqError("it failed", topic="t", partition=0, node="n:1", hint="try again")
    assert str(error) == "it failed (topic t, partition 0, node n:1): try again"
    assert str(NsqError("it failed")) == "it failed"
    error.attempts = (NotLeader("E_FAILED_ON_NOT_LEADER"),)
    assert str(error).endswith("[after 1 earlier attempts]")


def test_where_is_filled_in_once() -> None:
    error = NotLeader("E_FAILED_ON_NOT_LEADER", "", node="n:1")
    assert error.at(topic="t", partition=0, node="other") is error
    assert (error.topic, error.partition, error.node) == ("t", 0, "n:1")
    assert str(error) == "E_FAILED_ON_NOT_LEADER (topic t, partition 0, node n:1)"
    assert error.at(topic="other", partition=3).where == {"topic": "t", "partition": 0, "node": "n:1"}


@pytest.mark.parametrize("kind", _CLASSES)
def test_errors_can_be_pickled(kind: type[NsqError]) -> None:
    error = kind("E_CODE", "text") if issubclass(kind, ServerError) else kind("message", hint="hint")
    error.at(topic="t", partition=3, node="n:1")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is kind
    assert (str(again), again.args, again.__dict__) == (str(error), error.args, error.__dict__)


def test_every_class_is_exported_and_in_the_picture() -> None:
    names = {kind.__name__ for kind in _CLASSES}
    assert names <= set(errors.__all__)
    plain = {kind.__name__ for kind in _CLASSES if not issubclass(kind, ServerError) or kind is ServerError}
    assert {name for name in plain if name not in (errors.__doc__ or "")} == set()


def test_every_code_is_documented_by_its_class() -> None:
    assert {code for code, kind in SERVER_ERRORS.items() if code in (kind.__doc__ or "")} == SERVER_ERRORS.keys()
    assert "E_FAILED_ON_NOT_LEADER" in SERVER_ERRORS


def test_an_error_without_partition_shows_none() -> None:
    error = NsqError("lost", topic="orders", node="127.0.0.1:4150")
    assert str(error) == "lost (topic orders, node 127.0.0.1:4150)"
    assert "partition 0" in str(NsqError("lost", partition=0))


def test_auth_disabled_says_what_to_do() -> None:
    error = server_error(b"E_AUTH_DISABLED AUTH Disabled")
    assert "remove auth_secret, or start nsqd with -auth-http-address" in str(error)
    assert error.hint is not None
    assert type(error)("E_AUTH_DISABLED", hint="another one").hint == "another one"
