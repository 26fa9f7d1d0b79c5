"""Mistakes in key ranges and buckets."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "buckets are released while others are free",
        "key_ranges.py",
        "    if free:\n        return Moves(tuple(claim))\n    surplus",
        "    surplus",
    ),
    Mistake(
        "every consumer claims every free bucket",
        "key_ranges.py",
        "        if poorest == me:\n            claim.append(tag)\n",
        "        claim.append(tag)\n",
    ),
    Mistake(
        "consumers of equal count claim the same bucket",
        "key_ranges.py",
        "        poorest = min(counts, key=lambda member: (counts[member], member))\n"
        "        counts[poorest] += 1\n"
        "        if poorest",
        "        poorest = min(counts, key=lambda member: (counts[member], member != me))\n"
        "        counts[poorest] += 1\n"
        "        if poorest",
    ),
    Mistake(
        "buckets that are being released are released again",
        "key_ranges.py",
        "max(0, surplus - releasing)",
        "max(0, surplus)",
    ),
    Mistake(
        "a consumer releases the buckets of others",
        "key_ranges.py",
        "        surplus += richest == me\n",
        "        surplus += 1\n",
    ),
    Mistake(
        "buckets move to and fro between equal consumers",
        "key_ranges.py",
        "if counts[richest] <= counts[poorest] + 1:",
        "if counts[richest] <= counts[poorest]:",
    ),
    Mistake(
        "a claimed bucket does not count",
        "key_ranges.py",
        "        counts[poorest] += 1\n        if poorest",
        "        if poorest",
    ),
    Mistake(
        "consumers without a connection own their buckets",
        "key_ranges.py",
        "        if not connected:\n            free.append(tag)\n",
        "        if tag not in owners:\n            free.append(tag)\n",
    ),
    Mistake(
        "a consumer is not one of its members",
        "key_ranges.py",
        "for member in {*members, me}",
        "for member in members",
    ),
    Mistake(
        "the bucket follows the partition",
        "key_ranges.py",
        "position_of(key) * count >> 32",
        "position_of(key) % count",
    ),
    Mistake(
        "tags of other numbers of buckets are accepted",
        "key_ranges.py",
        "if tag.startswith(_PREFIX) and number and",
        "if number and",
    ),
    Mistake(
        "keys of a cell belong to its upper neighbour",
        "key_ranges.py",
        "owners[bisect_right(self._starts, position) - 1]",
        "owners[min(bisect_right(self._starts, position), len(owners) - 1)]",
    ),
    Mistake(
        "a new consumer gets the idle range",
        "key_ranges.py",
        "place = max(places, key=lambda place: (self._weight(place)",
        "place = min(places, key=lambda place: (self._weight(place)",
    ),
    Mistake(
        "a new consumer gets the lower half",
        "key_ranges.py",
        "self._owners.insert(place + 1, consumer)",
        "self._owners.insert(place, consumer)",
    ),
    Mistake(
        "the busier neighbour inherits",
        "key_ranges.py",
        "heir = min(neighbours",
        "heir = max(neighbours",
    ),
    Mistake(
        "the line is a ring",
        "key_ranges.py",
        "for other in (place - 1, place + 1) if 0 <= other < len(self._owners)]",
        "for other in ((place - 1) % len(self._owners), (place + 1) % len(self._owners)) if other != place]",
    ),
    Mistake(
        "the range of a removed consumer goes to the upper neighbour",
        "key_ranges.py",
        "del self._starts[max(place, heir)], self._owners[place]",
        "del self._starts[place], self._owners[place]",
    ),
    Mistake(
        "borders move for a single busy key",
        "key_ranges.py",
        "        if after > _WORTH * busiest:\n            return False\n",
        "",
    ),
    Mistake(
        "borders move although no consumer is too busy",
        "key_ranges.py",
        "        if busiest * count <= _BUSY:\n            return False\n",
        "",
    ),
    Mistake(
        "a few messages decide",
        "key_ranges.py",
        "[messages + _EVEN * count / CELLS for messages in self._load.cells()]",
        "self._load.cells()",
    ),
    Mistake(
        "what is left is not divided",
        "key_ranges.py",
        "            remaining -= taken\n",
        "",
    ),
    Mistake(
        "the share ignores the window",
        "key_ranges.py",
        "return self._load.between(*self._bounds(place)) + self._width",
        "return self._width",
    ),
    Mistake(
        "the newer half of the window is dropped",
        "key_ranges.py",
        "self._older = self._newer if complete",
        "self._older = self._older if complete",
    ),
    Mistake(
        "the window never turns",
        "key_ranges.py",
        "        if now - self._began >= self._half:\n",
        "        if now - self._began >= 1e9:\n",
    ),
    Mistake(
        "an old half stays after a pause",
        "key_ranges.py",
        'self._newer if complete else array("Q", _NOTHING)',
        "self._newer",
    ),
    Mistake(
        "a rate counts the whole window",
        "key_ranges.py",
        "        return self._half + now - self._began\n",
        "        return 2 * self._half\n",
    ),
    Mistake(
        "a part of a cell counts as the cell",
        "key_ranges.py",
        "return sum(cells[first:last]) - before + behind",
        "return float(sum(cells[first:last]))",
    ),
    Mistake(
        "the first part of a cell is counted twice",
        "key_ranges.py",
        "- before + behind",
        "+ before + behind",
    ),
    Mistake(
        "a consumer is added twice",
        "key_ranges.py",
        "        if consumer in self._owners:\n"
        '            raise InvalidInput(f"consumer {consumer!r} has a range already"',
        '        if consumer is None:\n            raise InvalidInput(f"consumer {consumer!r} has a range already"',
    ),
)
