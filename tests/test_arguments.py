"""Checks of arguments and options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import attrs
import pytest

from nsqext.arguments import (
    check_counts,
    check_flags,
    check_groups,
    check_kinds,
    check_number,
    check_plain_function,
    check_texts,
    check_time,
    is_coroutine_function,
    is_delay,
    is_number,
    is_secret_name,
    is_whole,
    refuse_unknown,
    suggest,
)
from nsqext.errors import InvalidInput, InvalidSetting, UnknownSetting
from tests.support.tables import table


@table(
    ("value", "number", "whole"),
    [
        (0, True, True),
        (1.5, True, False),
        (9, True, True),
        (10, False, False),
        (-1, False, False),
        (True, False, False),
        ("5", False, False),
        (math.nan, False, False),
    ],
)
def test_numbers_are_within_their_bounds_and_no_booleans(value: object, number: bool, whole: bool) -> None:
    assert (is_number(value, 0, 9), is_whole(value, 0, 9)) == (number, whole)


@table(
    ("check", "text"),
    [
        (lambda: check_number("n", 0, 1), "n=0 is not a positive number: give a whole number of 1 or more"),
        (lambda: check_number("n", -1), "n=-1 is not a number: give a whole number of 0 or more"),
        (lambda: check_number("n", 4, 5), "n=4 is not 5 or more: give a whole number of 5 or more"),
        (lambda: check_number("n", 7, 1, 6), "n=7 is not within 1..6: give a whole number"),
        (lambda: check_time("t", 0, zero=False), "t=0 is not a positive time in seconds"),
        (lambda: check_time("t", -1), "t=-1 is not a time in seconds"),
        (lambda: check_time("t", "5"), "t='5' is text: give a number of seconds; only a URL and the environment"),
        (lambda: check_texts("l", "ab"), "l='ab' is not a tuple of texts: l=('first', 'second')"),
        (lambda: check_texts("l", ["a"]), "l=['a'] is not a tuple of texts"),
        (lambda: check_texts("l", ("a", 1)), "l=('a', 1) is not a tuple of texts"),
        (lambda: check_flags(a=True, b="no"), "b='no' is not True or False: b=True or b=False"),
        (lambda: check_plain_function("f", 3), "f=3 is not a function: give a function, and do not call it"),
        (lambda: check_plain_function("f", _wait), "is a coroutine function, which would not be awaited"),
    ],
)
def test_what_is_refused_is_named(check: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check()
    assert text in str(caught.value)


async def _wait() -> None:
    """Never called."""


class _Awaited:
    async def __call__(self) -> None:
        """Never called."""


def test_what_is_within_the_bounds_is_accepted() -> None:
    assert check_number("n", 6, 1, 6) == 6
    check_time("t", 0)
    check_time("t", math.inf)
    check_texts("l", ())
    check_plain_function("f", len)
    assert (is_delay(0), is_delay(999_999_999), is_delay(1e9), is_delay(-1)) == (True, True, False, False)


def test_an_object_that_is_called_with_await_is_a_coroutine_function() -> None:
    assert (is_coroutine_function(_Awaited()), is_coroutine_function(_wait), is_coroutine_function(len)) == (
        True,
        True,
        False,
    )


@attrs.frozen
class _Inner:
    size: int = 1


@attrs.frozen
class _Options:
    word: Literal["a", "b"] = "a"
    flag: bool = False
    text: str | None = None
    first: int = 1
    second: int = 1
    inner: _Inner = attrs.Factory(_Inner)


@table(
    ("values", "text"),
    [
        ({"word": "c"}, "word='c' is neither 'a' nor 'b'"),
        ({"flag": "no"}, "flag='no' is not True or False"),
        ({"text": 5}, "text is a int: give text"),
        ({"second": 0}, "second=0 is not a positive number"),
        ({"inner": {"size": 1}}, "inner={'size': 1} is not a _Inner"),
    ],
)
def test_options_of_another_kind_are_refused(values: dict[str, Any], text: str) -> None:
    options = _Options(**values)
    with pytest.raises(InvalidSetting) as caught:
        for check in (check_kinds, check_groups, lambda given: check_counts(given, "first", "second")):
            check(options)
    assert text in str(caught.value)


@table(
    ("name", "known", "meant"),
    [
        ("time-out", ("timeout", "retry_wait"), "timeout"),
        ("MAX_IN_FLIGT", ("max_in_flight",), "max_in_flight"),
        ("request_timeout", ("lookup_request_timeout", "port"), "lookup_request_timeout"),
        ("connection_tls", ("tls", "port"), "tls"),
        ("connection-tls", ("tls", "port"), "tls"),
        ("connection_tls_ca", ("ca", "tls_ca"), "tls_ca"),
        ("wait", ("first_wait", "second_wait"), None),
        ("colour", ("timeout",), None),
    ],
)
def test_a_similar_name_is_suggested(name: str, known: tuple[str, ...], meant: str | None) -> None:
    assert suggest(name, known) == meant


def test_an_unknown_argument_is_named_with_those_of_the_function() -> None:
    class Client:
        def publish(self, topic: str, **others: object) -> None:
            """Never called."""

    with pytest.raises(UnknownSetting, match=r"Client.publish: unknown argument 'colour': its arguments are topic$"):
        refuse_unknown(Client.publish, ["colour"])
    with pytest.raises(UnknownSetting, match=r"did you mean topic\?"):
        refuse_unknown(Client.publish, ["topc"])


def test_names_of_secrets() -> None:
    assert all(map(is_secret_name, ("auth_secret", "PASSWORD", "AuthToken", "credentials")))
    assert not is_secret_name("timeout")
