"""The statistics of producers."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ProducerStatistics:
    """Numbers of a producer since it was opened."""

    connections: int  #: open now
    pending: int  #: sent commands without response
    stored: int  #: messages
    #: messages whose publish raised another error than `InvalidInput`, `InvalidState` or `DeliveryUnknown`
    failed: int
    unknown: int  #: messages whose publish raised `DeliveryUnknown`
    retries: int  #: attempts after a publish's first
    bytes_sent: int  #: bytes of publish commands with a response
    lookup_age: float | None  #: seconds since lookup's last answer; None before, and without lookup
    lookup_failures: int  #: consecutive rounds without a usable response from lookup
