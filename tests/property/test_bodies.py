"""Bodies: `decode_body` reads what `encode_body` writes, or the value is refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import math
import uuid
from typing import Annotated, Any

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass as pydantic_dataclass

from nsqext import OutgoingMessage
from nsqext.app import decode_body, encode_body
from nsqext.errors import InvalidBody, InvalidSetting


class Currency(enum.Enum):
    EURO = "EUR"
    YEN = "JPY"


class PydanticLine(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    article: int = pydantic.Field(alias="articleId")
    price: decimal.Decimal = pydantic.Field(validation_alias=pydantic.AliasChoices("price", "unitPrice"))

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> decimal.Decimal:
        return 2 * self.price


class PydanticOrder(pydantic.BaseModel):
    id: uuid.UUID = pydantic.Field(alias="orderId")
    lines: list[PydanticLine]
    first: PydanticLine | None = None
    by_name: dict[str, PydanticLine] = pydantic.Field(alias="byName")
    at: datetime.datetime
    day: datetime.date | None
    currency: Currency


@pydantic_dataclass
class PydanticDataclass:
    amount: Annotated[int, pydantic.Field(alias="Amount")]
    note: str | None = None


class Struct(msgspec.Struct, rename="camel"):
    order_id: uuid.UUID
    unit_price: decimal.Decimal
    placed_at: datetime.datetime
    raw_bytes: bytes
    known_tags: frozenset[str]
    per_country: dict[str, float]
    next_order: Struct | None = None


class Tagged(msgspec.Struct, tag=True):
    count: int


class OtherTagged(msgspec.Struct, tag=True):
    name: str


@attrs.frozen
class AttrsOrder:
    id: int
    lines: tuple[Tagged | OtherTagged, ...]
    lasts: datetime.timedelta
    currency: Currency | None = None


@dataclasses.dataclass(frozen=True)
class DataclassOrder:
    id: int
    inner: AttrsOrder
    inners: list[AttrsOrder]
    at: datetime.time | None
    share: float = 0.0


@attrs.frozen
class AttrsChild(AttrsOrder):
    share: float = 0.0
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class DataclassChild(DataclassOrder):
    note: str | None = None


class PydanticShare(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    share: float = 0.0


class PydanticChild(PydanticShare):
    note: str | None = None


class StructChild(Tagged):
    share: float = 0.0
    note: str | None = None


DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9)
TIMES = st.datetimes(timezones=st.just(datetime.UTC), min_value=datetime.datetime(1970, 1, 1))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LINES = st.builds(PydanticLine, articleId=st.integers(0, 2**53), price=DECIMALS)
ORDERS = st.builds(
    PydanticOrder,
    orderId=st.uuids(),
    lines=st.lists(LINES, max_size=3),
    first=st.none() | LINES,
    byName=st.dictionaries(st.text(max_size=5), LINES, max_size=3),
    at=TIMES,
    day=st.none() | st.dates(),
    currency=st.sampled_from(Currency),
)
STRUCTS: st.SearchStrategy[Struct] = st.deferred(
    lambda: st.builds(
        Struct,
        order_id=st.uuids(),
        unit_price=DECIMALS,
        placed_at=TIMES,
        raw_bytes=st.binary(max_size=20),
        known_tags=st.frozensets(st.text(max_size=5), max_size=3),
        per_country=st.dictionaries(st.text(max_size=3), FINITE, max_size=3),
        next_order=st.none() | STRUCTS,
    )
)
ATTRS = st.builds(
    AttrsOrder,
    id=st.integers(-(2**63), 2**63 - 1),
    lines=st.lists(
        st.builds(Tagged, count=st.integers(0, 9)) | st.builds(OtherTagged, name=st.text(max_size=5)), max_size=3
    ).map(tuple),
    lasts=st.timedeltas(min_value=datetime.timedelta(0), max_value=datetime.timedelta(days=10**5)),
    currency=st.none() | st.sampled_from(Currency),
)
DATACLASSES = st.builds(
    DataclassOrder,
    id=st.integers(0, 9),
    inner=ATTRS,
    inners=st.lists(ATTRS, max_size=2),
    at=st.none() | st.times(),
    share=FINITE,
)


def returned(value: object, kind: Any) -> object:
    """Encode a value and decode it."""
    decoded: object = decode_body(encode_body(value), kind)
    return decoded


@given(ORDERS)
def test_pydantic_models_with_aliases_survive_a_round_trip(order: PydanticOrder) -> None:
    assert returned(order, PydanticOrder) == order
    assert returned([order], list[PydanticOrder]) == [order]
    assert returned({"a": order}, dict[str, PydanticOrder]) == {"a": order}


@given(st.integers(), st.none() | st.text())
def test_pydantic_dataclasses_survive_a_round_trip(amount: int, note: str | None) -> None:
    value = PydanticDataclass(Amount=amount, note=note)  # type: ignore[call-arg]
    assert b'"Amount"' in encode_body(value)
    assert returned(value, PydanticDataclass) == value


@given(STRUCTS)
def test_structs_with_renamed_fields_survive_a_round_trip(value: Struct) -> None:
    assert returned(value, Struct) == value


@given(DATACLASSES)
def test_dataclasses_and_attrs_classes_survive_a_round_trip(value: DataclassOrder) -> None:
    assert returned(value, DataclassOrder) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FINITE | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ).filter(lambda value: not isinstance(value, str))  # text is published as it is, without quotes
)
def test_json_values_survive_a_round_trip(value: object) -> None:
    assert returned(value, Any) == value


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 8))
def test_floats_that_json_cannot_say_are_refused(value: float, place: int) -> None:
    nested: list[object] = [
        value,
        [1.0, None, {"a": value}],
        DataclassOrder(1, AttrsOrder(1, (), datetime.timedelta(0)), [], None, value),
        {"a": None, "b": (value,)},
        DataclassChild(1, AttrsOrder(1, (), datetime.timedelta(0)), [], None, value, "fields of a base class count"),
        [AttrsChild(1, (), datetime.timedelta(0), None, value)],
        {"a": PydanticChild(share=value)},
        PydanticChild(more=[value]),  # type: ignore[call-arg]
        StructChild(1, value, "x"),
    ]
    with pytest.raises(InvalidBody, match="is not a number of JSON"):
        encode_body(nested[place])


def test_finite_floats_beside_null_are_not_refused() -> None:
    for value in (AttrsChild(1, (), datetime.timedelta(0), None, 0.5), PydanticChild(share=0.5), StructChild(1, 0.5)):
        assert returned(value, type(value)) == value
    assert returned({"a": None, "b": {0.5}}, dict[str, set[float] | None]) == {"a": None, "b": {0.5}}


def test_names_that_validation_accepts_are_those_of_fields_and_of_aliases() -> None:
    class Named(pydantic.BaseModel):
        word: str = pydantic.Field(validation_alias="wort")
        secret: str = pydantic.Field("", exclude=True)
        again: Named | None = None
        number: int = pydantic.Field(
            0,
            validation_alias=pydantic.AliasChoices("nr", "zahl", pydantic.AliasPath("a", 0)),
            serialization_alias="zahl",
        )

    value = Named(wort="x", secret="s", nr=3)  # type: ignore[call-arg]
    assert returned(value, Named) == Named(wort="x", nr=3)  # type: ignore[call-arg]
    assert decode_body(b'{"wort": "x"}', Named).word == "x"


def test_types_that_are_not_checked_and_things_that_are_no_types() -> None:
    assert [decode_body(b'{"a": [1, null]}', kind) for kind in (object, Any)] == [{"a": [1, None]}] * 2
    kinds: list[Any] = [5, "x"]
    for kind in kinds:
        with pytest.raises(InvalidSetting, match=f"bodies cannot be decoded as {kind}:"):
            decode_body(b"[]", kind)


def test_an_alias_that_only_serialization_has_is_refused() -> None:
    class Report(pydantic.BaseModel):
        total: int = pydantic.Field(serialization_alias="sum")

    with pytest.raises(InvalidBody, match=r"the field total of .*Report is written as 'sum'"):
        encode_body(Report(total=1))


def test_a_required_field_that_is_excluded_is_refused() -> None:
    class Secret(pydantic.BaseModel):
        word: str = pydantic.Field(exclude=True)

    class Outer(pydantic.BaseModel):
        secrets: list[Secret] = []

    with pytest.raises(InvalidBody, match=r"the required field word of .*Secret is excluded"):
        encode_body(Outer(secrets=[Secret(word="x")]))


@attrs.define
class Private:
    _total: int


@attrs.define
class Around:
    inner: list[Private]


def test_fields_that_begin_with_an_underscore_are_refused_in_both_directions() -> None:
    with pytest.raises(InvalidBody, match="the field _total of Private begins with an underscore"):
        encode_body(Around([Private(1)]))
    for kind in (Around, list[Private], dict[str, Private | None]):
        with pytest.raises(InvalidSetting, match="the field _total of Private begins with an underscore"):
            decode_body(b"{}", kind)
    values: list[object] = [[Private(1)], {"a": Private(1)}, (1, Private(1))]
    for value in values:
        with pytest.raises(InvalidBody, match="the field _total of Private begins with an underscore"):
            encode_body(value)


@dataclasses.dataclass
class Team:
    name: str
    members: list[Person] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Person:
    name: str
    team: Team | None = None


class PydanticTeam(pydantic.BaseModel):
    members: list[PydanticPerson] = []


class PydanticPerson(pydantic.BaseModel):
    team: PydanticTeam | None = None


def test_classes_that_contain_each_other_survive_a_round_trip() -> None:
    values = (Team("a", [Person("b", Team("c"))]), PydanticTeam(members=[PydanticPerson(team=PydanticTeam())]))
    for value in values:
        assert returned(value, type(value)) == value


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    at: datetime.datetime = pydantic.Field(alias="placedAt")


@dataclasses.dataclass
class DataclassAround:
    model: StrictModel
    models: dict[str, list[StrictModel]]
    missing: StrictModel | None = None


@attrs.frozen
class AttrsAround:
    model: StrictModel


class StructAround(msgspec.Struct):
    model: StrictModel


@given(TIMES)
def test_members_that_are_pydantic_models_survive_a_round_trip(at: datetime.datetime) -> None:
    model = StrictModel(placedAt=at)
    values: tuple[object, ...] = (
        DataclassAround(model, {"a": [model]}),
        AttrsAround(model),
        StructAround(model),
        {"a": [AttrsAround(model)]},
    )
    for value in values[:3]:
        assert returned(value, type(value)) == value
    assert returned(values[3], dict[str, list[AttrsAround]]) == values[3]


def test_a_member_that_is_no_valid_model_is_named_without_its_value() -> None:
    with pytest.raises(ValueError, match=r"datetime.*`placedAt`.*\$\.model") as caught:
        decode_body(b'{"model": {"placedAt": "secret"}}', AttrsAround)
    assert "secret" not in str(caught.value)


def test_hints_that_are_unknown_where_a_body_is_encoded_do_not_matter() -> None:
    class Local:
        pass

    @dataclasses.dataclass
    class Order:
        id: int
        local: Local | None = None

    assert encode_body(Order(1)) == b'{"id":1,"local":null}'


def test_values_that_contain_themselves_are_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidBody, match=r"a list cannot be encoded as a body: .*recursion"):
        encode_body(endless)


def test_messages_are_no_bodies() -> None:
    message = OutgoingMessage(b"x")
    for value in (message, [message], (message, message)):
        with pytest.raises(InvalidBody, match="an OutgoingMessage is not a body"):
            encode_body(value)
