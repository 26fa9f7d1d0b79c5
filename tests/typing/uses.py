"""Right and wrong uses of the public API, for type checkers; a wrong line ends with ``# wrong``. It is never run."""

# pyright: strict

from collections.abc import Sequence
from typing import Annotated

import nsqext
from nsqext import (
    Admin,
    App,
    Consumer,
    ConsumerSettings,
    Lookup,
    Message,
    MessageBatch,
    Producer,
    Receipt,
    Router,
    sync,
)
from nsqext.app import Depends, Header, Key
from nsqext.middleware import CallNext, HandlerTimeout, Handling, Middleware, Publishing, SendNext


class Timing(Middleware):
    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        return await call_next(handling)

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        return await send_next(publishing)


def clients() -> None:
    Producer("lookup:4161", timeout=5)
    Producer("nsq://lookup:4161?timeout=5", middleware=[Timing()])
    Producer(["a:4161", "b:4161"], on_unknown="raise", compression="gzip", tls=True, lookup_timeout=0)
    Producer(nsqd="n:4150", request_timeout=3.0, auth_secret="s", key_hash="java_string")
    Producer(env="ORDERS_")
    Producer(Lookup("lookup:4161", lookup_poll_interval=5), max_batch_count=100)
    Producer("lookup:4161", timeuot=5)  # wrong
    Producer("lookup:4161", timeout="5")  # wrong
    Producer("lookup:4161", tls=1.5)  # wrong
    Producer("lookup:4161", on_unknown="ignore")  # wrong
    Producer("lookup:4161", max_in_flight=5)  # wrong
    Producer("lookup:4161", middleware=[print])  # wrong
    Producer(4161)  # wrong
    Producer("lookup:4161", options=None)  # wrong
    Producer.from_url("nsq://lookup:4161")  # wrong
    Consumer("orders", "billing", "lookup:4161", max_in_flight=10, max_attempts=5, dead_letter="dead", tls=True)
    Consumer(["orders", "bills.*"], "billing", nsqd=["n:4150"], concurrency=4, backoff="off", requeue_jitter=0)
    Consumer("orders", "billing", start="earliest", msg_timeout=None, partitions=(0, 2))
    Consumer("orders", "billing", env="ORDERS_", start=nsqext.Position.at(1000), key="##key", dispatch="key_failover")
    Consumer("orders", "billing", "lookup:4161", middleware=[HandlerTimeout(5)], lookup_poll_interval=9)
    Consumer("orders")  # wrong
    Consumer("orders", "billing", max_inflight=10)  # wrong
    Consumer("orders", "billing", max_attempts="5")  # wrong
    Consumer("orders", "billing", backoff="never")  # wrong
    Consumer("orders", "billing", backoff_mode="off")  # wrong
    Consumer("orders", "billing", connection_tls=True)  # wrong
    Consumer("orders", "billing", on_lost="log")  # wrong
    Consumer("orders", "billing", dead_letter=7)  # wrong
    Consumer("orders", "billing", partitions="0,2")  # wrong
    Lookup("lookup:4161", poll_interval=5)  # wrong
    Lookup("lookup:4161", lookup_poll_interval="5")  # wrong
    Admin("lookup:4161", timeout=5, lookup_auth_secret="token")
    Admin("lookup:4161", tls=True)  # wrong


def shared() -> None:
    given: ConsumerSettings = {"max_attempts": 5, "dead_letter": "dead"}
    Consumer("orders", "billing", "lookup:4161", **given)
    App("lookup:4161", **given)
    one: ConsumerSettings = {"max_atempts": 5}  # wrong
    Consumer("orders", "billing", **one)


async def publish(producer: Producer, app: App) -> None:
    receipt = await producer.publish("orders", b"x", headers={"user": "42"}, key="k", trace_id=7)
    text: str = receipt.topic
    await producer.publish(text, b"x", tag="blue", partition=1, delay=0.5)
    receipts = await producer.publish_many("orders", [b"x", nsqext.OutgoingMessage(b"y", key="k")], key=b"k")
    first: Receipt = receipts[0]
    await app.publish(first.topic, {"order": 1}, headers={"user": "42"}, key="k")
    await producer.publish("orders", "x")  # wrong
    await producer.publish("orders", b"x", hedaers={})  # wrong
    await producer.publish("orders", b"x", headers={"user": 42})  # wrong
    await producer.publish("orders", b"x", partition="1")  # wrong
    await producer.publish_many("orders", ["x"])  # wrong
    await app.publish("orders", {"order": 1}, hedaers={})  # wrong
    await app.publish("orders", {"order": 1}, key=7.5)  # wrong
    number: int = receipt.topic  # wrong
    print(number)
    async with producer.batcher("orders", linger=0.01) as batcher:
        await batcher.add(b"x")
        await batcher.add("x")  # wrong


async def consume(consumer: Consumer) -> None:
    async with consumer:
        async for message in consumer:
            body: bytes = message.body
            await message.requeue(1.5, backoff=True)
            await message.requeue("1.5")  # wrong
            print(body, message.header)
            print(message.boddy)  # wrong
        batch = await consumer.fetch(10, timeout=1.0)
        await batch.finish()
    await consumer.seek(nsqext.Position.earliest(), topic="orders")
    await consumer.seek("earliest")  # wrong
    consumer.max_in_flight = 5
    consumer.max_in_flight = "5"  # wrong


class Order:
    number: int


async def ledger() -> str:
    return "ledger"


app = App("lookup:4161", middleware=[Timing()], timeout=5, concurrency=8, max_attempts=3)
App("lookup:4161", concurency=8)  # wrong
App("lookup:4161", handler_defaults={"concurrency": 8})  # wrong
router = Router()
app.include_router(router)
app.include_router("router")  # wrong


@app.handler("orders", "billing", max_attempts=0, backoff="consumer", concurrency=2, middleware=[Timing()])
async def bill(order: Order, key: Key, user: Annotated[str, Header("user")]) -> str:
    return f"{order.number} {key} {user}"


@app.publisher("invoices")
@router.handler(["orders", "bills"], "archive", auto_finish=True)
async def archive(order: Order, entries: Annotated[str, Depends(ledger)]) -> str:
    raise nsqext.Reject(f"{order} {entries}")


@router.batch_handler("orders", "ledger", max_count=100, max_wait=0.1, max_in_flight=1000)
async def write(batch: MessageBatch) -> None:
    print(len(batch))


@app.handler("orders", "misspelt", concurency=2)  # wrong
async def misspelt(order: Order) -> None: ...


@app.handler("orders", "connected", tls=True)  # wrong
async def connected(order: Order) -> None: ...


@app.handler("orders", "blocking")
def blocking(order: Order) -> None: ...


async def administer(admin: Admin) -> None:
    await admin.create_topic("orders", partitions=2, extend=True, channels=["billing"])
    info = await admin.topic("orders")
    names: tuple[str, ...] = info.channels
    await admin.create_topic("orders", partitons=2)  # wrong
    await admin.create_topic("orders", partitions="2")  # wrong
    print(names, info.chanels)  # wrong


def block(settings: ConsumerSettings) -> None:
    with sync.Producer("lookup:4161", timeout=5) as producer:
        producer.publish("orders", b"x", key="k")
        producer.publish("orders", "x")  # wrong
    with sync.Consumer("orders", "billing", "lookup:4161", start="earliest", **settings) as consumer:  # wrong
        print(consumer.settings)
    sync.Consumer("orders", "billing", "lookup:4161", max_in_flight=5, middleware=[Timing()])
    sync.Consumer("orders", "billing", max_inflight=5)  # wrong
    sync.Producer("lookup:4161", timeuot=5)  # wrong
    sync.Admin("lookup:4161", lookup_request_timeout=3)
    sync.Admin("lookup:4161", request_timout=3)  # wrong


consumer = Consumer("orders", "billing", "lookup:4161")


@consumer.handler
async def handle(message: Message) -> None:
    await message.finish()


@consumer.handler
def handle_blocking(message: Message) -> None: ...


@consumer.batch_handler(max_count=10)
async def handle_batch(batch: MessageBatch) -> None:
    await batch.finish()


@consumer.batch_handler(maxcount=10)  # wrong
async def handle_batches(batch: MessageBatch) -> None: ...


threaded = sync.Consumer("orders", "billing", "lookup:4161")


@threaded.handler
def handle_in_thread(message: sync.Message) -> None: ...


@threaded.handler(auto_finish=False)
def handle_typed(order: Order, key: Key) -> int:
    return order.number


@threaded.batch_handler(max_count=10)
def handle_threaded_batch(batch: sync.MessageBatch) -> list[str]:
    return []


@threaded.handler  # wrong
async def handle_async(message: sync.Message) -> None: ...


@threaded.handler(auto_finish=False)  # wrong
async def handle_async_later(message: sync.Message) -> None: ...


@threaded.batch_handler()  # wrong
async def handle_async_batch(batch: sync.MessageBatch) -> None: ...
