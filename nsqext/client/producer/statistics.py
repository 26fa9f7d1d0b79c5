"""The statistics of producers."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class ProducerStatistics:
    """Numbers of a producer since it was opened; a snapshot."""

    connections: int  #: connections to nodes at the moment
    pending: int  #: commands that were sent and have received no response so far
    stored: int  #: messages that were stored
    failed: int  #: messages that were not stored, and whose publish raised an error other than `InvalidInput`
    unknown: int  #: messages whose publish raised `DeliveryUnknown`
    retries: int  #: attempts after the first of a publish
    bytes_sent: int  #: bytes of publish commands that received a response
    lookup_age: float | None  #: seconds since lookup last answered; None where it never did, or there is no lookup
    lookup_failures: int  #: rounds in a row in which no lookup node returned a usable response
