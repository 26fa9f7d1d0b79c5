"""The bodies of the topics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Order:
    """An order; its number is chosen by the customer, who may send it twice."""

    number: int
    customer: str
    cents: int


@dataclass
class Invoice:
    """The invoice of an order."""

    order: int
    customer: str
    cents: int
