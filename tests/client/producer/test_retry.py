"""What the flags of errors decide, and what callers are told in the end."""

from __future__ import annotations

import pytest
from attrs import define, field

from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.retry import RetryPolicy, given_up, outcome_unknown
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    DeliveryUnknown,
    LookupFailed,
    NotSent,
    NsqError,
    PublishFailed,
    ServerError,
    TopicNotFound,
)
from nsqext.errors.server import SERVER_ERRORS, BadMessage, NotLeader, PubFailed

pytestmark = pytest.mark.anyio


@define
class _Attempts:
    errors: list[NsqError] = field(factory=list)
    moves: bool = True
    paced: bool = True


def test_what_may_have_been_stored() -> None:
    assert outcome_unknown(ConnectionLost("x"))
    assert outcome_unknown(PubFailed("E_PUB_FAILED"))
    for error in (NotSent("x"), ConnectionFailed("x"), NotLeader("E_FAILED_ON_NOT_LEADER"), LookupFailed("x")):
        assert not outcome_unknown(error)


@pytest.mark.parametrize("code", sorted(SERVER_ERRORS))
def test_every_code_is_decided(code: str) -> None:
    error = SERVER_ERRORS[code](code)
    assert RetryPolicy(ProducerOptions()).final([error]) is not error.retryable
    assert RetryPolicy(ProducerOptions(on_unknown="raise")).final([error]) is (
        not error.retryable or error.maybe_stored
    )


def test_an_unknown_code_is_not_retried() -> None:
    assert RetryPolicy(ProducerOptions()).final([ServerError("E_NEW")])


def test_a_topic_that_was_never_found_is_told_at_once_and_one_that_vanished_is_waited_for() -> None:
    policy = RetryPolicy(ProducerOptions())
    assert policy.final([TopicNotFound("x")])
    assert policy.final([LookupFailed("x")])
    assert not policy.final([NotLeader("x"), TopicNotFound("x")])


async def test_going_on_until_it_is_stored() -> None:
    attempts = _Attempts([NotLeader("E_FAILED_ON_NOT_LEADER")])
    results: list[NsqError | str] = [NotLeader("again"), ConnectionLost("x"), "stored"]

    async def again() -> str:
        result = results.pop(0)
        if isinstance(result, NsqError):
            raise result
        return result

    assert await RetryPolicy(ProducerOptions(retry_wait=0.001)).go_on(attempts, again) == "stored"
    assert [type(error) for error in attempts.errors] == [NotLeader, NotLeader, ConnectionLost]


@pytest.mark.parametrize(
    ("first", "kind"), [(NotLeader("E_FAILED_ON_NOT_LEADER"), BadMessage), (ConnectionLost("lost"), DeliveryUnknown)]
)
async def test_a_refusal_after_all(first: NsqError, kind: type[NsqError]) -> None:
    attempts = _Attempts([first])

    async def again() -> str:
        raise BadMessage("E_BAD_MESSAGE")

    with pytest.raises(kind) as caught:
        await RetryPolicy(ProducerOptions(retry_wait=0.001)).go_on(attempts, again)
    assert caught.value.attempts[0] is first


def test_what_is_told_when_time_is_up() -> None:
    assert type(given_up("within 1 s", [NotLeader("x")], in_doubt=False)) is PublishFailed
    assert type(given_up("within 1 s", [NotLeader("x")], in_doubt=True)) is DeliveryUnknown
    assert type(given_up("within 1 s", [ConnectionLost("x"), NotLeader("x")], in_doubt=False)) is DeliveryUnknown
    assert type(given_up("within 1 s", [], in_doubt=False)) is PublishFailed
    assert type(given_up("within 1 s", [], in_doubt=True)) is DeliveryUnknown
