"""The mutants of the consumer that change nothing that a caller could observe, each with the reason."""

from __future__ import annotations

__all__ = ("CONSUMER",)

CONSUMER: dict[tuple[str, str, str], str] = {
    (
        "client/consumer/subscriptions/early_messages.py",
        "Lt to LtE",
        "if message.header.find(DUE_HEADER.encode()) < 0:",
    ): "a header begins with a brace",
    (
        "client/consumer/unpacking.py",
        "number + 1",
        "return int(size) if size.isascii() and size.isdigit() and len(size) < 20 else MAX_UNPACKED",
    ): "a number of 20 digits is above the bound as well",
    (
        "client/consumer/subscriptions/early_messages.py",
        "number + 1",
        "self._added += 1",
    ): "the numbers only have to rise",
    ("client/consumer/handlers/iteration.py", "LtE to Lt", "if pause <= 0:"): "a wait of no seconds ends at once",
    (
        "client/consumer/subscriptions/subscription.py",
        "Gt to GtE",
        "if len(counts) > 2 * self.in_flight + _SPARE_COUNTS:",
    ): "counts of answered messages are dropped one message sooner",
    (
        "client/consumer/subscriptions/subscription.py",
        "plus and minus",
        "if len(counts) > 2 * self.in_flight + _SPARE_COUNTS:",
    ): "how many counts of answered messages are kept is chosen",
    (
        "client/consumer/subscriptions/subscription.py",
        "number + 1",
        "if len(counts) > 2 * self.in_flight + _SPARE_COUNTS:",
    ): "how many counts of answered messages are kept is chosen",
    (
        "client/consumer/subscriptions/subscription.py",
        "Gt to GtE",
        "if len(pending) > self._most_pending:",
    ): "how many answers are sent without waiting is chosen",
    (
        "client/consumer/subscriptions/subscription.py",
        "GtE to Gt",
        "if unpack and message.header.find(_COMPRESSED) >= 0:",
    ): "a header begins with a brace",
    (
        "client/consumer/subscriptions/subscription.py",
        "number + 1",
        "if unpack and message.header.find(_COMPRESSED) >= 0:",
    ): "a header begins with a brace",
    (
        "client/consumer/subscriptions/subscription.py",
        "GtE to Gt",
        "if extend and message.header.find(_DELAYED) >= 0:",
    ): "a header begins with a brace",
    (
        "client/consumer/subscriptions/subscription.py",
        "number + 1",
        "if extend and message.header.find(_DELAYED) >= 0:",
    ): "a header begins with a brace",
    (
        "client/consumer/subscriptions/partition_reader.py",
        "number + 1",
        "self._largest = 0",
    ): "the first RDY count that is set is 1 or more",
    (
        "client/consumer/handlers/iteration.py",
        "number + 1",
        "_SPARE = 16  # groups beyond twice the unanswered groups, before answered groups are forgotten",
    ): "the number is chosen",
    (
        "client/consumer/handlers/workers.py",
        "number + 1",
        "_MOST_NAMED = 3  # messages named in a report of a blocked event loop",
    ): "the number is chosen",
    (
        "client/consumer/subscriptions/key_buckets.py",
        "number + 1",
        "_TAKEOVER_LOOKS = 5",
    ): "the number of looks is chosen",
    (
        "client/consumer/subscriptions/key_buckets.py",
        "number + 1",
        "_BLOCKED = 5  # reads in a row without delivery of a partition before an error or a log message",
    ): "the number of looks is chosen",
    (
        "client/pulse.py",
        "number + 1",
        "_LIST_FROM = 4  # topics of a service from which on the list of all topics is read, if it is not long",
    ): "the number of topics is chosen",
    ("client/consumer/subscriptions/order_check.py", "number + 1", "_id: int = -1"): "no id is negative",
    (
        "client/consumer/subscriptions/order_check.py",
        "number + 1",
        "_offset: int = -1",
    ): "no offset of an ordered subscription is negative",
    (
        "client/consumer/subscriptions/rdy_distributor.py",
        "number + 1",
        "self._turns += 1",
    ): "the numbers only have to rise",
    (
        "client/consumer/subscriptions/rdy_distributor.py",
        "number + 1",
        "found.size = max(mean, found.size + (mean - found.size) / 16)",
    ): "the weight of a message in the average is chosen",
    (
        "client/consumer/handlers/message_keys.py",
        "number + 1",
        "return (crc32(key) * 0x9E3779B1 >> 8) % count",
    ): "which lane a key has is chosen",
    (
        "client/consumer/handlers/key_lanes.py",
        "Gt to GtE",
        "if count > _MOST_RETURNED or size > _MOST_RETURNED_BYTES:",
    ): "the bounds are chosen",
    (
        "client/consumer/handlers/iteration.py",
        "Gt to GtE",
        "if len(self._holdings) > self._holdings_limit:",
    ): "how many answered messages are kept is chosen",
    (
        "client/consumer/handlers/iteration.py",
        "plus and minus",
        "self._holdings_limit = 2 * len(self._holdings) + _SPARE",
    ): "speed only: when answered messages are forgotten",
    (
        "client/consumer/handlers/iteration.py",
        "number + 1",
        "self._holdings_limit = 2 * len(self._holdings) + _SPARE",
    ): "how many answered messages are kept is chosen",
    (
        "client/consumer/handlers/workers.py",
        "and to or",
        "if self._limit and seconds > self._limit / 2:",
    ): "speed only: the report leaves out what took too short",
    (
        "client/consumer/handlers/workers.py",
        "Gt to GtE",
        "if self._limit and seconds > self._limit / 2:",
    ): "speed only: the report leaves out what took too short",
    (
        "client/consumer/handlers/workers.py",
        "number + 1",
        "if self._limit and seconds > self._limit / 2:",
    ): "speed only: the report leaves out what took too short",
    (
        "client/consumer/handlers/workers.py",
        "Gt to GtE",
        "if message.attempts > 1 and self.source.policy.attempts_exhausted(message):",
    ): "speed only: a first attempt exhausts nothing",
    (
        "client/consumer/handlers/batches.py",
        "Gt to GtE",
        "used_up = message.attempts > 1 and policy.attempts_exhausted(message)",
    ): "speed only: a first attempt exhausts nothing",
    (
        "client/pulse.py",
        "GtE to Gt",
        "listed = len(self.since) >= _LIST_FROM and self.metadata.lists_cheaply(len(self.since))",
    ): "the number of topics is chosen",
    (
        "client/pulse.py",
        "plus and minus",
        "if self.silence.due + PAST_DUE < self.due_at:",
    ): "one tick more",
    (
        "client/consumer/subscriptions/subscription_group.py",
        "plus and minus",
        "self.on_time_until = now + _TICK  # shorter stalls are not noticed anyway",
    ): "speed only: each read asks since when its bytes may have been there",
    (
        "client/consumer/typed/body.py",
        "other bool",
        "places = error.errors(include_url=False, include_context=False, include_input=False)",
    ): "what is left out is not read",
    (
        "client/consumer/subscriptions/subscription_group.py",
        "other bool",
        "return False",
    ): "speed only: RDY is distributed again",
    (
        "client/consumer/handlers/iteration.py",
        "Gt to GtE",
        "if len(self._reads) > self._reads_limit:",
    ): "how many answered reads are kept is chosen",
    (
        "client/consumer/handlers/iteration.py",
        "number + 1",
        "self._reads_limit = 2 * len(self._reads) + _SPARE",
    ): "how many answered reads are kept is chosen",
    (
        "client/consumer/handlers/iteration.py",
        "plus and minus",
        "self._reads_limit = 2 * len(self._reads) + _SPARE",
    ): "speed only: when answered reads are dropped",
    (
        "client/consumer/handlers/receiver_queues.py",
        "Lt to LtE",
        "if timeout < self._shortest:",
    ): "speed only: one more look at what has to be touched",
    (
        "client/consumer/subscriptions/key_buckets.py",
        "number + 1",
        "self._raise_ready(subscription, 0 if last is None or found is None else min(last.ready, found.unconfirmed))",
    ): "two messages are requested at least",
    (
        "client/consumer/subscriptions/key_buckets.py",
        "number + 1",
        "self._raise_ready(subscription, 0)",
    ): "two messages are requested at least",
    (
        "client/consumer/replay.py",
        "number + 1",
        "topic, channel, lookup, max_in_flight=1, start=Position.earliest(), decompress=False, **connection",
    ): "how many dead letters are in flight is chosen",
}
"""Module, operator and line of code -> why nothing differs."""
