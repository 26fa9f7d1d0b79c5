"""Decisions by the flags of errors, and the error that callers receive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.producer.attempt_errors import AttemptErrors, outcome_unknown
from nsqext.client.producer.options import ProducerOptions
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    DeliveryUnknown,
    LookupFailed,
    NotLookupd,
    NotSent,
    NsqError,
    PublishFailed,
    RequestTimeout,
    ServerError,
    TopicNotFound,
)
from nsqext.errors.server import SERVER_ERRORS, BadMessage, LeaderLost, NotLeader, PubFailed


def test_errors_after_which_a_message_may_be_stored() -> None:
    assert outcome_unknown(ConnectionLost("x"))
    assert outcome_unknown(PubFailed("E_PUB_FAILED"))
    assert outcome_unknown(LeaderLost("E_FAILED_ON_NOT_LEADER"))
    for error in (NotSent("x"), ConnectionFailed("x"), NotLeader("E_FAILED_ON_NOT_LEADER"), LookupFailed("x")):
        assert not outcome_unknown(error)


@pytest.mark.parametrize("code", sorted(SERVER_ERRORS))
def test_every_code_is_decided(code: str) -> None:
    error = SERVER_ERRORS[code](code)
    assert AttemptErrors(ProducerOptions(), [error]).final() is not error.retryable
    assert AttemptErrors(ProducerOptions(on_unknown="raise"), [error]).final() is (
        not error.retryable or error.maybe_stored
    )


@pytest.mark.parametrize("before", [1, 2, 40])
def test_an_unknown_outcome_is_final_in_any_attempt_if_requested(before: int) -> None:
    errors = [NotLeader("x")] * before + [ConnectionLost("x")]
    assert AttemptErrors(ProducerOptions(on_unknown="raise"), errors).final()
    assert not AttemptErrors(ProducerOptions(), errors).final()


def test_an_unknown_code_is_not_retried() -> None:
    assert AttemptErrors(ProducerOptions(), [ServerError("E_NEW")]).final()


def test_an_unknown_topic_is_final_as_the_first_error_and_retried_after_another_one() -> None:
    options = ProducerOptions()
    assert AttemptErrors(options, [TopicNotFound("x")]).final()
    assert not AttemptErrors(options, [NotLeader("x"), TopicNotFound("x")]).final()
    assert not AttemptErrors(options, [LookupFailed("x")]).final()
    assert AttemptErrors(options, [NotLookupd("x")]).final()


@given(st.integers(min_value=1, max_value=10_000), st.booleans())
def test_pauses_grow_up_to_their_bound(count: int, paced: bool) -> None:
    options = ProducerOptions(retry_wait=0.01, max_retry_wait=0.5)
    errors = AttemptErrors(options, [ConnectionLost("lost")])
    errors.count = count
    assert 0 <= errors.pause(paced=paced) <= min(0.1 if paced else 0.5, 0.01 * 2 ** min(count, 30))


@pytest.mark.parametrize(
    ("first", "kind"), [(NotLeader("E_FAILED_ON_NOT_LEADER"), BadMessage), (ConnectionLost("lost"), DeliveryUnknown)]
)
def test_a_rejection_after_an_unknown_outcome_stays_unknown(first: NsqError, kind: type[NsqError]) -> None:
    refusal = AttemptErrors(ProducerOptions(), [first, BadMessage("E_BAD_MESSAGE")]).refusal()
    assert type(refusal) is kind
    assert refusal.attempts[0] is first
    assert refusal not in refusal.attempts, "the attempts before it"


def test_the_error_of_an_abandoned_publish() -> None:
    assert type(AttemptErrors(ProducerOptions(), [NotLeader("x")]).given_up("within 1 s")) is PublishFailed
    assert (
        type(AttemptErrors(ProducerOptions(), [NotLeader("x")]).given_up("within 1 s", in_doubt=True))
        is DeliveryUnknown
    )
    assert (
        type(AttemptErrors(ProducerOptions(), [ConnectionLost("x"), NotLeader("x")]).given_up("within 1 s"))
        is DeliveryUnknown
    )
    assert type(AttemptErrors(ProducerOptions()).given_up("within 1 s")) is PublishFailed
    assert type(AttemptErrors(ProducerOptions()).given_up("within 1 s", in_doubt=True)) is DeliveryUnknown
    assert (
        type(AttemptErrors(ProducerOptions(), [NotLeader("x"), LookupFailed("x")]).given_up("within 1 s"))
        is LookupFailed
    )


def test_the_cause_of_an_abandoned_publish_is_the_missing_response_not_an_earlier_refusal() -> None:
    """A search of the log took the earlier refusal for the end of the attempt that was still open."""
    unknown = AttemptErrors(ProducerOptions(), [NotLeader("x")]).given_up("within 1 s", in_doubt=True)
    assert [type(error) for error in unknown.attempts] == [NotLeader, RequestTimeout]
    assert isinstance(unknown.__cause__, RequestTimeout)
    assert unknown.message == "the message may have been stored: no response within 1 s"


def test_an_abandoned_publish_of_unknown_outcome_names_its_last_error() -> None:
    errors = AttemptErrors(ProducerOptions(), [ConnectionLost("lost"), NotLeader("E_FAILED_ON_NOT_LEADER")])
    assert errors.given_up("within 1 s").message == (
        "the message may have been stored: no attempt succeeded within 1 s; last error: E_FAILED_ON_NOT_LEADER"
    )


def test_the_errors_of_many_attempts_are_bounded_and_keep_unknown_outcomes() -> None:
    errors = AttemptErrors(ProducerOptions(), (NotLeader("x") for _ in range(5)))
    errors.add(ConnectionLost("lost"))
    for _ in range(10_000):
        errors.add(NotLeader("x"))
    assert errors.count == 10_006
    assert len(errors.kept) == 20
    assert type(errors.given_up("within 1 s")) is DeliveryUnknown
