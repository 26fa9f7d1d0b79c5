# mypy: ignore-errors
"""Sends orders and refunds to the FastStream service of the migration guide, on FastStream's test broker."""

import asyncio
import json
import sys

from faststream import TestApp
from faststream.nats import TestNatsBroker

from examples.migration import faststream_before as service

given = json.loads(sys.argv[1])
published = []


async def main():
    @service.broker.subscriber("invoices")
    async def collect(invoice: dict):
        published.append(invoice)

    async with TestNatsBroker(service.broker) as broker, TestApp(service.app):
        for topic, body, headers in given:
            await broker.publish(body, topic, headers=headers)
        total = service.app.context.get("ledger").total()
    sys.stdout.write(json.dumps({"published": published, "total": total}))


asyncio.run(main())
