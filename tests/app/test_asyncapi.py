"""The document of AsyncAPI that describes an app, checked against the official JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import jsonschema
import msgspec
import pydantic
import pytest

from nsqext import App, Message, MessageBatch, OutgoingMessage, Router
from nsqext.app import Depends, Header, Key, Tag, asyncapi_document, encode_body
from nsqext.errors import InvalidName, InvalidSetting
from tests.support.asyncapi import checked
from tests.support.tables import table

if TYPE_CHECKING:
    from decimal import Decimal

ADDRESS = "lookup.example:4161"


class Line(msgspec.Struct):
    """A part of an order."""

    name: str
    at: tuple[int, float]


@attrs.frozen
class Order:
    number: int
    lines: list[Line] = attrs.field(factory=list)


@dataclass
class Bill:
    order: Order
    cents: int


class Invoice(pydantic.BaseModel):
    """What a customer pays."""

    cents: int = pydantic.Field(gt=0, description="the price")
    before: Invoice | None = None
    place: tuple[int, str] = (0, "")


@dataclass
class Receipt:
    invoice: Invoice
    others: dict[str, Invoice]
    folder: PurePath | None = None  # no value of JSON


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


def document(app: App, **given: Any) -> dict[str, Any]:
    return checked(asyncapi_document(app, **given))


def payload_of(kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message and the schemas of a topic with bodies of a type."""
    app = App(ADDRESS)
    app.publishes("topic", kind)
    components = document(app)["components"]
    (message,) = components["messages"].values()
    return message, components["schemas"]


def test_a_handler_is_an_operation_that_receives() -> None:
    app = App(ADDRESS)

    @app.handler("orders", "billing", tag="canary", concurrency=4, max_attempts=3, dead_letter="dead")
    async def bill(
        order: Order, key: Key, user: Annotated[str, Header()], age: Annotated[int | None, Header()]
    ) -> None:
        """Bill an order.

        Twice would be wrong.
        """

    found = document(app, title="Shop", version="2.1", description="Sells *things*.")
    assert found["info"] == {"title": "Shop", "version": "2.1", "description": "Sells *things*."}
    (server,) = found["servers"].values()
    assert (server["host"], server["protocol"]) == (ADDRESS, "nsq")
    operation = found["operations"]["bill"]
    assert operation["action"] == "receive"
    assert (operation["summary"], operation["description"]) == ("Bill an order.", "Twice would be wrong.")
    assert operation["bindings"]["x-nsq"] == {
        "channel": "billing",
        "tag": "canary",
        "concurrency": 4,
        "maxAttempts": 3,
        "deadLetter": "dead",
    }
    assert found["channels"]["orders"]["address"] == "orders"
    message = found["components"]["messages"]["orders.Order"]
    assert message["payload"] == {"$ref": "#/components/schemas/Order"}
    assert message["headers"] == {
        "type": "object",
        "properties": {
            "user": {"type": "string"},
            "age": {"type": "integer"},
            "##key": {"type": "string", "description": "the key of the message"},
        },
        "required": ["user"],
    }
    assert message["bindings"]["x-nsq"] == {"key": {"type": "string"}, "tag": {"type": "string", "const": "canary"}}
    letter = found["components"]["messages"]["dead.DeadLetter"]
    assert letter["bindings"]["x-nsq"] == {"key": {"type": "string"}}, "a dead letter keeps its key"


def test_dead_letters_are_an_operation_that_sends() -> None:
    app = App(ADDRESS)

    @app.handler("orders", "billing", max_attempts=3, dead_letter="dead")
    async def bill(order: Order, part: Annotated[str, Depends(dependency)]) -> None: ...

    found = document(app)
    (sent,) = (one for one in found["operations"].values() if one["action"] == "send")
    assert sent["channel"] == {"$ref": "#/channels/dead"}
    letter = found["components"]["messages"]["dead.DeadLetter"]
    assert letter["payload"] == {"$ref": "#/components/schemas/Order"}
    assert letter["headers"]["properties"]["dead-letter-error"] == {"type": "string"}
    assert "required" not in letter["headers"], "a topic without extend support keeps none"
    assert found["components"]["messages"]["orders.Order"]["headers"]["required"] == ["x-part"]


def test_results_and_declared_topics_are_operations_that_send() -> None:
    app, router = App(ADDRESS), Router()

    @app.handler("orders", "billing")
    @app.publisher("copies")
    @app.publisher("bills")
    def bill(order: Order) -> Bill | None:
        return None

    @app.handler("orders", "echo")
    @app.publisher("echoes")
    async def echo(order: Order) -> OutgoingMessage:
        return OutgoingMessage(b"")

    @app.handler("orders", "either")
    @app.publisher("either")
    def choose(order: Order) -> Bill | int | None:
        return order.number

    @app.handler("sales", "cents")
    @app.publisher("cents")
    async def count(message: Message) -> Decimal:
        raise NotImplementedError

    router.publishes("events", Invoice, headers={"user": str}, key=True, tag="new")
    app.include_router(router)
    found = document(app)
    assert {one["channel"]["$ref"] for one in found["operations"].values() if one["action"] == "send"} == {
        "#/channels/bills",
        "#/channels/cents",
        "#/channels/copies",
        "#/channels/echoes",
        "#/channels/either",
        "#/channels/events",
    }
    messages = found["components"]["messages"]
    assert messages["bills.Bill"]["payload"] == {"$ref": "#/components/schemas/Bill"}
    assert "payload" not in messages["echoes.Message"]
    assert "payload" not in messages["cents.Message"], "its type is known to the type checker only"
    (either,) = (one["payload"] for name, one in messages.items() if name.startswith("either."))
    assert sorted(either["anyOf"], key=str) == [{"$ref": "#/components/schemas/Bill"}, {"type": "integer"}]
    assert messages["events.Invoice"]["headers"]["required"] == ["user"]
    assert len([one for one in messages if one.startswith("orders")]) == 1  # both handlers receive the same message


def dependency(key: Key, tag: Tag, part: Annotated[float, Header("x-part")]) -> str:
    return ""


def test_headers_of_dependencies_and_the_header_of_the_key_are_described() -> None:
    app = App(ADDRESS)

    @app.handler("orders", "billing", key="customer", concurrency=2)
    async def bill(
        order: bytes, part: Annotated[str, Depends(dependency)], customer: Annotated[int, Header()]
    ) -> None: ...

    app.handler("carts", "billing", dispatch="key_failover")(print)

    @app.handler("parts", "billing")
    async def part(
        one: Annotated[str | None, Header("x-part")],
        two: Annotated[str, Header("x-part")],
        three: Annotated[str | None, Header("x-part")],
    ) -> None: ...

    messages = document(app)["components"]["messages"]
    assert messages["parts.Message"]["headers"]["required"] == ["x-part"]
    assert messages["orders.bytes"]["contentType"] == "application/octet-stream"
    assert set(messages["orders.bytes"]["headers"]["properties"]) == {"x-part", "customer"}
    assert messages["orders.bytes"]["headers"]["properties"]["customer"]["description"] == "the key of the message"
    assert set(messages["carts.Message"]["headers"]["properties"]) == {"##key"}


def test_handlers_of_messages_and_batches_leave_the_body_open() -> None:
    app = App(ADDRESS)

    @app.handler(["orders.*", "o?d", "?.*"], "all")
    async def watch(message: Message) -> None: ...

    @app.batch_handler("clicks#ephemeral", "rows", max_count=70)
    async def rows(batch: MessageBatch) -> None: ...

    found = document(app)
    assert all("payload" not in one for one in found["components"]["messages"].values())
    assert found["channels"]["orders._"]["address"] == "orders.{part1}"
    assert found["channels"]["o_d"]["bindings"] == {"x-nsq": {"pattern": "o?d"}}
    assert found["channels"]["o_d"]["parameters"] == {"part1": {"description": "any character"}}
    assert found["channels"]["_._"]["address"] == "{part1}.{part2}"
    assert found["operations"]["rows"]["bindings"] == {"x-nsq": {"channel": "rows", "batch": 70}}
    assert found["channels"]["clicks_ephemeral"]["address"] == "clicks#ephemeral"
    assert [one["bindings"]["x-nsq"].get("batch") for one in found["operations"].values()] == [None] * 3 + [70]


@table(
    "kind, value",
    [
        (Order, Order(1, [Line("x", (1, 2.0))])),
        (Bill, Bill(Order(1), 2)),
        (Line, Line("x", (1, 2.0))),
        (Invoice, Invoice(cents=3, before=Invoice(cents=1))),
        (list[Invoice], [Invoice(cents=3)]),
        (Cat | Dog, Dog("x")),
        (Receipt, Receipt(Invoice(cents=3, before=Invoice(cents=1)), {"a": Invoice(cents=2)})),
        (dict[str, list[int]], {"a": [1]}),
        (Any, {"a": [1]}),
    ],
)
def test_the_schema_accepts_what_is_published(kind: Any, value: object) -> None:
    message, schemas = payload_of(kind)
    assert message["contentType"] == "application/json"
    whole = {**message["payload"], "components": {"schemas": schemas}}
    body = msgspec.json.decode(encode_body(value))
    jsonschema.Draft7Validator(whole).validate(body)
    if kind is not Any:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(whole).validate("something else")


def test_schemas_are_those_of_their_types_in_any_order() -> None:
    app = App(ADDRESS)
    for topic, kind in (("a", Invoice), ("b", Order), ("c", Receipt), ("d", Bill)):
        app.publishes(topic, kind)
    messages = document(app)["components"]["messages"].values()
    assert [one["payload"]["$ref"].rpartition("/")[2] for one in messages] == ["Invoice", "Order", "Receipt", "Bill"]


def test_schemas_have_what_validation_accepts() -> None:
    class Total(pydantic.BaseModel):
        cents: list[int]
        pair: tuple[int, str] | None = None

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def total(self) -> int:
            return sum(self.cents)

    _, schemas = payload_of(Total)
    assert set(schemas["Total"]["properties"]) == {"cents", "pair"}
    pair = schemas["Total"]["properties"]["pair"]["anyOf"][0]
    assert pair["items"] == [{"type": "integer"}, {"type": "string"}], "prefixItems has no meaning in draft 07"


def test_a_reference_keeps_what_stands_beside_it() -> None:
    class Outer(pydantic.BaseModel):
        inner: Invoice = pydantic.Field(description="the newest")

    _, schemas = payload_of(Outer)
    assert schemas["Outer"]["properties"]["inner"] == {
        "description": "the newest",
        "allOf": [{"$ref": "#/components/schemas/Invoice"}],
    }


def _of_pydantic() -> Any:
    class Same(pydantic.BaseModel):
        a: int

    return Same


def _of_msgspec() -> Any:
    return msgspec.defstruct("Same", [("b", str)])


def _of_another_module() -> Any:
    class Same(pydantic.BaseModel):
        c: int

    return Same


@table("makers", [(_of_pydantic, _of_msgspec), (_of_pydantic, _of_another_module)])
def test_classes_of_the_same_name_have_different_schemas(makers: tuple[Callable[[], Any], ...]) -> None:
    app = App(ADDRESS)
    for make in makers:
        app.publishes("topic", make())
    found = document(app)["components"]
    assert len(found["schemas"]) == 2
    assert len({one["payload"]["$ref"] for one in found["messages"].values()}) == 2


def test_a_declaration_is_checked() -> None:
    app = App(ADDRESS)
    with pytest.raises(InvalidName):
        app.publishes("no topic")
    with pytest.raises(InvalidName):
        app.publishes("topic", tag="no tag")
    with pytest.raises(InvalidSetting, match="cannot be decoded as App"):
        app.publishes("topic", App)
    with pytest.raises(InvalidSetting, match="the header 'x'"):
        app.publishes("topic", headers={"x": bytes})
    assert app.published == []


def test_an_app_with_addresses_of_nsqd_names_them() -> None:
    found = document(App(nsqd="127.0.0.1:4150, 127.0.0.2:4150"))
    assert [one["host"] for one in found["servers"].values()] == ["127.0.0.1:4150", "127.0.0.2:4150"]
    assert found["operations"] == {}
