"""Share the keys of a channel by tags, where its server does not share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.errors import InvalidSetting
from nsqext.key_ranges import shared_tag
from nsqext.protocol.messages import KEY_HEADER

if TYPE_CHECKING:
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.protocol.identify import Negotiated
    from nsqext.types import TopicMeta

_ALONE = "give one consumer key= instead of dispatch: its lanes keep the order on any server"


def tags_instead(options: ConsumerOptions, negotiated: Negotiated, topic: str) -> tuple[int, str]:
    """Return number of buckets and tag for a server that does not share keys; raises InvalidSetting."""
    count = options.bucket_count
    if not count:
        chosen = [name for name in ("tag", "ext_filter") if getattr(options, name) is not None]
        given = chosen[0] if chosen else "key_tags=0"
        raise InvalidSetting(
            f"{_lacking(negotiated)}, and {given} leaves no tags to share the keys by",
            topic=topic,
            hint=f"leave out {given}, or {_ALONE}",
        )
    return count, shared_tag(count)


def check_tags(
    options: ConsumerOptions, negotiated: Negotiated, meta: TopicMeta, topic: str, partition: int | None
) -> None:
    """Raise InvalidSetting where tags cannot share the keys."""
    lacks = _lacking(negotiated)
    if partition is None:
        raise InvalidSetting(
            f"{lacks}, and key_tags needs a redesigned NSQ with lookup: the original has no tags, and only lookup "
            "knows the partitions",
            topic=topic,
            hint=_ALONE,
        )
    if not meta.extend_support:
        raise InvalidSetting(
            f"{lacks}, and the topic does not support extend headers, which key_tags needs",
            topic=topic,
            hint="create it with extend, or upgrade it: Admin.upgrade_topic",
        )
    key = options.key
    if isinstance(key, str) and key != KEY_HEADER:
        raise InvalidSetting(
            f"{lacks}, and tags share the keys of publish(key=...), not keys of the header {key!r}",
            topic=topic,
            hint=f"leave out key={key!r} and publish with key=, or {_ALONE}",
        )
    if negotiated.dispatch and options.key_tags is None:
        raise InvalidSetting("the server supports dispatch by key_failover now", topic=topic)


def _lacking(negotiated: Negotiated) -> str:
    """Return the reason for an error of a consumer that shares keys by tags."""
    if negotiated.dispatch:
        return "keys are shared by tags"
    return f"the server (version {negotiated.version or 'unknown'}) does not support dispatch by key_failover"
