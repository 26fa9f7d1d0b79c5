"""Messages whose extend header is given as bytes, which are stored as they are; loaded with the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.errors import InvalidHeader, InvalidInput
from nsqext.protocol.client.commands import HEADER_LENGTH, TRACE_SIZE, check_body
from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.headers import MAX_STORED_HEADER
from nsqext.protocol.messages import TRACE_ID_HEADER
from nsqext.protocol.names import check_trace_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.client.producer.options import ProducerOptions
    from nsqext.types import TopicMeta

_MOST_DIGITS = 1000


def encode_with_header(
    options: ProducerOptions,
    meta: TopicMeta,
    body: bytes,
    header: bytes,
    trace_id: int | None,
    *,
    default_trace: int | None = None,
    others: Mapping[str, object],
) -> tuple[bytes, bytes, int | None]:
    """Check a message with its own header; return body, header and trace id. Raises InvalidInput.

    The trace id by which a publish of unknown outcome is settled cannot be added to a header: without a trace id in the
    header, the outcome stays unknown.

    Args:
        options: limits for the topic.
        header: empty for no header.
        trace_id: trace id of a message without header.
        default_trace: trace id if the message has neither header nor trace id.
        others: arguments by name that would change the header; all must be None.
    """
    if not isinstance(header, bytes):
        raise InvalidHeader(f"header must be bytes, not {type(header).__name__}", hint="give a dict as headers=")
    for name, value in others.items():
        if value is not None and (name, value) != ("key_tags", 0):  # which writes no tags
            raise InvalidInput(f"header and {name} were both given", hint="a header is stored as it is: leave out one")
    limit = options.max_message_size
    if header:
        if trace_id is not None:
            raise InvalidInput("header and trace_id were both given", hint="the trace id is ##trace_id of the header")
        _check_size(options, header)
        check_body(body, limit, HEADER_LENGTH + len(header) + meta.extend_support)
        return body, header, trace_id_of(header)
    if trace_id is not None:
        check_trace_id(trace_id)
    elif default_trace is not None and len(check_body(body, limit)) + TRACE_SIZE <= limit:
        trace_id = default_trace
    check_body(body, limit, meta.extend_support if trace_id is None else TRACE_SIZE)
    return body, b"", trace_id


def _check_size(options: ProducerOptions, header: bytes) -> None:
    if len(header) > MAX_STORED_HEADER:
        raise InvalidHeader(f"the header has {len(header)} bytes, more than servers can deliver: {MAX_STORED_HEADER}")
    if options.transport == "http":
        raise InvalidHeader(
            "servers change the bytes of a header that is published over HTTP",
            hint="publish over TCP, or give headers=",
        )


def trace_id_of(header: bytes) -> int | None:
    """Return the trace id that servers read from a header: the first ``##trace_id``; None without it.

    Raises InvalidHeader where they refuse the header.
    """
    try:
        members = read_header(header, TRACE_ID_HEADER)
    except UnreadableHeader as error:
        raise InvalidHeader(f"the header is not JSON that servers accept: {error}") from error
    if TRACE_ID_HEADER not in members:
        return None
    text = members[TRACE_ID_HEADER]
    digits = isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
    if not digits or int(text) >= 1 << 64:
        raise InvalidHeader(f"{TRACE_ID_HEADER} of the header is not a text of decimal digits below 2**64")
    return int(text)
