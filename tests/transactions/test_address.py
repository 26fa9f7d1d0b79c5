"""Addresses of databases: forms that are understood, and passwords that no error shows."""

from __future__ import annotations

import traceback
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting
from nsqext.transactions import OutboxStore
from nsqext.transactions.address import parse_address
from tests.support.command_line import run
from tests.support.tables import table

FORMS = (
    "postgresql://bob:{}@127.0.0.1:1/shop",
    "postgresql+psycopg://bob:{}@127.0.0.1:1/shop",
    "postgresql+asyncpg://bob:{}@127.0.0.1:1/shop",
    "postgres:/bob:{}@127.0.0.1:1/shop",
    "postgres:bob:{}@127.0.0.1:1/shop",
    "postgresql:///shop?host=127.0.0.1&port=1&password={}",
    "postgresql://127.0.0.1:1/shop?password={}&user=bob",
    "postgresql://bob:{}@",
    "postgresql://bob:{}",
    "postgresql://:{}@127.0.0.1:1/shop?sslmode=odd",
    "postgresql://bob:{}@[::1/shop",
    "postgresql://bob:{}@127.0.0.1:port/shop",
    "mysql://bob:{}@127.0.0.1/shop",
    "mysql+pymysql://bob:{}@127.0.0.1/shop",
    "mongodb+srv://bob:{}@host",
    "sqlite://bob:{}@host",
    "sqlite:bob:{}",
    "bob:{}@127.0.0.1/shop",
    "{}",
    "host=127.0.0.1 port=1 user=bob password={}",
    "host=127.0.0.1 port=1 user=bob password='{}'",
    "host=127.0.0.1 port=1 pasword={}",
    "host=127.0.0.1 port=odd password={}",
    "password={} host=127.0.0.1 port=1 =",
    "postgresql+psycopg://bob:{}@127.0.0.1:1/shop host=127.0.0.1",
)
SECRETS = st.text(st.sampled_from("abcXYZ019%/?#@:&=+ '\"\\\n\t\u00e4$"), min_size=0, max_size=8).map(
    lambda text: f"Zq7{text}kV9"
)


@given(form=st.sampled_from(FORMS), secret=SECRETS, quoted=st.booleans())
def test_no_error_shows_a_password(form: str, secret: str, quoted: bool) -> None:
    address = form.replace("{}", quote(secret, safe="") if quoted else secret)
    with pytest.raises(InvalidSetting) as caught:
        OutboxStore(address)
    error = caught.value
    said = "".join([str(error), repr(error), *traceback.format_exception(error)])
    for part in ("Zq7", "kV9", secret):
        assert part not in said


@table(
    ("address", "dialect", "target"),
    [
        ("postgresql://bob:p@db/shop", "postgresql", "postgresql://bob:p@db/shop"),
        ("postgres://db/shop", "postgresql", "postgresql://db/shop"),
        ("postgresql+psycopg://bob@db/shop", "postgresql", "postgresql://bob@db/shop"),
        ("postgresql+asyncpg://db,other:6432/shop", "postgresql", "postgresql://db,other:6432/shop"),
        ("host=db dbname=shop", "postgresql", "host=db dbname=shop"),
        ("sqlite:///shop.db", "sqlite", "shop.db"),
        ("sqlite:////var/shop.db", "sqlite", "/var/shop.db"),
        ("sqlite+aiosqlite:///shop.db", "sqlite", "shop.db"),
    ],
)
def test_addresses_of_libpq_and_of_sqlalchemy_are_understood(address: str, dialect: str, target: str) -> None:
    assert parse_address(address) == (dialect, target)


@table(
    ("address", "text"),
    [
        ("mysql://bob:secret@db/shop", "has the scheme 'mysql'"),
        ("postgresql://bob:se/cret@db/shop", "percent-encode"),
        ("postgresql://bob:50%off@db/shop", "percent-encode"),
        ("sqlite://", "has no path"),
        ("shop.db", "no scheme that is known"),
        (7, "is a int, not text"),
    ],
)
def test_other_addresses_are_refused_by_name(address: str, text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        parse_address(address)


@pytest.mark.parametrize("words", [("outbox", "status"), ("outbox", "relay", "--lookupd", "127.0.0.1:1")])
def test_commands_do_not_print_a_password(words: tuple[str, ...], tmp_path: Path) -> None:
    for form in FORMS[:6]:
        done = run(*words, "--database", form.replace("{}", "Zq7p%kV9"), cwd=tmp_path)
        assert done.returncode != 0
        assert b"Zq7" not in done.stdout + done.stderr
        assert b"kV9" not in done.stdout + done.stderr


@table(
    "address",
    [
        "postgresql://bob:Zq7kV9@db/shop",
        "postgresql://bob:Zq7%6BV9@db/shop",
        "postgresql://db/shop?password=Zq7kV9",
        "host=db password=Zq7kV9",
        "host=db password = 'Zq7kV9'",
    ],
)
def test_an_error_of_the_driver_is_shown_without_the_password(address: str) -> None:
    """None of today's libpq contains it."""
    shown = parse_address(address).shown(ValueError(f"cannot read Zq7kV9 in {address}, or on db"))
    assert "Zq7" not in shown
    assert "kV9" not in shown
    assert shown.startswith("cannot read ***")
    assert shown.endswith("or on db")


@pytest.mark.parametrize(("given", "timeout"), [("", "30000"), ("tcp_user_timeout=5000", "5000")])
def test_a_connection_to_a_server_that_vanished_ends(postgres: str, given: str, timeout: str) -> None:
    with OutboxStore(f"{postgres} {given}", create=True) as store, closing(store.connect()) as connection:
        assert connection.info.get_parameters()["tcp_user_timeout"] == timeout


@pytest.mark.parametrize(
    ("given", "environment", "seconds"), [("", "", "30"), ("connect_timeout=5", "", "5"), ("", "7", "7")]
)
def test_a_connection_to_a_server_that_does_not_respond_ends(
    postgres: str, given: str, environment: str, seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("PGCONNECT_TIMEOUT", environment)
    with OutboxStore(f"{postgres} {given}", create=True) as store, closing(store.connect()) as connection:
        assert connection.info.get_parameters()["connect_timeout"] == seconds


def test_a_password_that_is_a_part_of_words_does_not_hide_them() -> None:
    assert parse_address("postgresql://bob:on@db/shop").shown(ValueError("connection lost")) == "connection lost"
