"""How far a read of the table has come: a watermark for each bucket.

Everything before the watermark of a bucket (instant, kind, id, in index order) was read into
memory or is gone. What appears behind it later is found by hints, and by the re-check, which
reads the slice that is loaded already for rows younger than the last sweep's snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from delayq.instants import EARLIEST_US, LATEST_US
from delayq.store import Cursors, Page

BEGINNING_US: Final = EARLIEST_US
"""Before any task: the schema refuses earlier instants."""
END_US: Final = LATEST_US

Start = Callable[[int], int]
"""From which instant on a bucket is read at all."""


def _start(_bucket: int) -> int:
    return BEGINNING_US


@dataclass(slots=True)
class Mark:
    """The last row read of one bucket. An empty kind sorts before every row of its instant."""

    at_us: int = BEGINNING_US - 1
    kind: str = ""
    id: int = 0


class Watermarks:
    """The watermarks of the buckets in which this node has a role."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    @property
    def buckets(self) -> list[int]:
        """The buckets that are watched."""
        return list(self._marks)

    def watch(self, buckets: Iterable[int], again: Iterable[int], start: Start = _start) -> None:
        """Watch just these; new ones, and those in `again`, are read from their start on."""
        wanted = set(buckets)
        afresh = set(again)
        self._marks = {
            bucket: Mark(start(bucket) - 1)
            if bucket in afresh or bucket not in self._marks
            else self._marks[bucket]
            for bucket in wanted
        }

    def rewind(self, to_us: int = BEGINNING_US, start: Start = _start) -> None:
        """Read again from `to_us` on (not before the bucket's start), where the mark is beyond."""
        for bucket, mark in self._marks.items():
            from_us = max(to_us, start(bucket))
            if mark.at_us >= from_us:
                self._marks[bucket] = Mark(from_us - 1)

    def edge_us(self) -> int:
        """Up to where every bucket is read. Far behind if there is none."""
        return min((mark.at_us for mark in self._marks.values()), default=END_US)

    def cursors(self, until_us: int) -> Cursors:
        """What is left to read up to `until_us`: the buckets whose mark is before it."""
        left = {bucket: mark for bucket, mark in self._marks.items() if mark.at_us < until_us}
        return _cursors(left, dict.fromkeys(left, until_us))

    def cursors_behind(self, from_us: int) -> Cursors:
        """The slice that is loaded already, from `from_us` up to each bucket's mark."""
        behind = {
            bucket: mark.at_us for bucket, mark in self._marks.items() if mark.at_us > from_us
        }
        return _cursors({bucket: Mark(from_us - 1) for bucket in behind}, behind)

    def note(self, cursors: Cursors, page: Page, limit: int) -> Cursors:
        """Move the marks as far as the page was read; what is left to read of these buckets."""
        left = rest(cursors, page, limit)
        unread = set(left.buckets)
        for bucket, until_us in zip(cursors.buckets, cursors.until_us, strict=True):
            if bucket in self._marks and bucket not in unread:
                self._marks[bucket] = Mark(until_us)
        for bucket, at_us, kind, task_id in zip(
            left.buckets, left.at_us, left.kinds, left.ids, strict=True
        ):
            if bucket in self._marks:
                self._marks[bucket] = Mark(at_us, kind, task_id)
        return left


def rest(cursors: Cursors, page: Page, limit: int) -> Cursors:
    """What is left to read after a page: the buckets whose page came back full, from its end."""
    counts: dict[int, int] = {}
    last = {}
    for row in page.rows:
        bucket = row[1]
        counts[bucket] = counts.get(bucket, 0) + 1
        last[bucket] = row
    until = dict(zip(cursors.buckets, cursors.until_us, strict=True))
    full = {
        bucket: Mark(last[bucket][2], last[bucket][3], last[bucket][0])
        for bucket, count in counts.items()
        if count >= limit
    }
    return _cursors(full, until)


def _cursors(marks: dict[int, Mark], until: dict[int, int]) -> Cursors:
    return Cursors(
        buckets=list(marks),
        at_us=[mark.at_us for mark in marks.values()],
        kinds=[mark.kind for mark in marks.values()],
        ids=[mark.id for mark in marks.values()],
        until_us=[until[bucket] for bucket in marks],
    )
