"""The overview's list of topics: searched, sorted and paged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from attrs import frozen

from nsqext.errors import InvalidInput

if TYPE_CHECKING:
    from nsqext.admin import TopicInfo, TopicStats
    from nsqext.web.actions import ActionForm
    from nsqext.web.monitor import Rate, Snapshot

__all__ = ("TopicList", "TopicRow", "topic_list")

_PER_PAGE = 25


@frozen
class TopicRow:
    """A topic in the overview, with totals of its partitions and channels."""

    name: str
    topic: TopicInfo
    stats: TopicStats | None  #: None without a response
    rate: Rate  #: received messages
    partitions: int  #: on the redesigned NSQ as created, led or not; on the original NSQ nodes
    messages: int
    depth: int
    lag: int
    in_flight: int


@frozen
class Column:
    """A sortable column."""

    label: str
    value: Callable[[TopicRow], object]
    falling: bool = True  #: the first click sorts the largest number first


COLUMNS: Mapping[str, Column] = {
    "name": Column("Topic", lambda row: row.name, falling=False),
    "rate": Column("Messages/s", lambda row: row.rate.now),
    "partitions": Column("Partitions", lambda row: row.partitions),
    "channels": Column("Channels", lambda row: len(row.topic.channels)),
    "messages": Column("Messages", lambda row: row.messages),
    "depth": Column("Depth", lambda row: row.depth),
    "lag": Column("Lag", lambda row: row.lag),
    "in_flight": Column("In flight", lambda row: row.in_flight),
}


@frozen
class TopicList:
    """A page of topics with a text in their names."""

    rows: tuple[TopicRow, ...]
    search: str  #: text in names; empty for all
    sort: str  #: a key of `COLUMNS`
    falling: bool
    page: int  #: from 1
    pages: int
    found: int
    total: int

    @property
    def first(self) -> int:
        """Number of the first row, from 1; 0 without rows."""
        return (self.page - 1) * _PER_PAGE + 1 if self.rows else 0

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1 if self.rows else 0

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns by name in a URL."""
        return COLUMNS

    def direction(self, column: str) -> str:
        if column != self.sort:
            return "none"
        return "descending" if self.falling else "ascending"

    def sorted_by(self, column: str) -> str:
        """Return the URL of the list sorted by a column; reversed for the present column."""
        falling = not self.falling if column == self.sort else COLUMNS[column].falling
        return self._url(column, falling, 1)

    def at(self, page: int) -> str:
        return self._url(self.sort, self.falling, page)

    def _url(self, sort: str, falling: bool, page: int) -> str:
        given = {
            "search": self.search,
            "sort": "" if sort == "name" else sort,
            "order": "" if falling == COLUMNS[sort].falling else "falling" if falling else "rising",
            "page": str(page) if page > 1 else "",
        }
        query = urlencode({name: value for name, value in given.items() if value})
        return f"/?{query}" if query else "/"


def topic_list(snapshot: Snapshot, form: ActionForm) -> TopicList:
    """Return the page of topics for a query.

    Raises:
        InvalidInput: unknown column or order, or a page that is not a number.
    """
    search, sort, order = form.given("search"), form.given("sort") or "name", form.given("order")
    if sort not in COLUMNS or order not in ("", "rising", "falling"):
        raise InvalidInput(
            f"topics are not sorted by {sort} {order}".rstrip(),
            hint=f"sort={'|'.join(COLUMNS)}, order=rising|falling",
        )
    falling = COLUMNS[sort].falling if not order else order == "falling"
    wanted = search.casefold()
    rows = [_row(snapshot, name) for name in sorted(snapshot.topics) if wanted in name.casefold()]
    rows.sort(key=COLUMNS[sort].value, reverse=falling)  # type: ignore[arg-type]
    pages = max(-(-len(rows) // _PER_PAGE), 1)
    page = min(max(form.number("page", 1), 1), pages)
    shown = tuple(rows[(page - 1) * _PER_PAGE : page * _PER_PAGE])
    return TopicList(shown, search, sort, falling, page, pages, len(rows), len(snapshot.topics))


def _row(snapshot: Snapshot, name: str) -> TopicRow:
    topic, stats = snapshot.topics[name], snapshot.stats.get(name)
    channels = stats.channels.values() if stats else ()
    created = topic.meta.partition_num if topic.meta else len(topic.leaders)
    return TopicRow(
        name=name,
        topic=topic,
        stats=stats,
        rate=snapshot.publish_rate(name),
        partitions=len(topic.nodes) if topic.generation == "original" else created,
        messages=stats.messages if stats else 0,
        depth=sum(channel.depth for channel in channels),
        lag=sum(channel.lag for channel in channels),
        in_flight=sum(channel.in_flight for channel in channels),
    )
