"""The watermarks against a simulated index: what the window statement would return, in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayq.store import Cursors, Page
from delayq.window import BEGINNING_US, END_US, Watermarks, rest

T0 = 1_790_000_000_000_000
Row = tuple[int, int, int, str, int]  # id, bucket, execute_at_us, kind, priority


class Index:
    """Pending rows by bucket, in the order (execute_at, kind, id)."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows = list(rows)
        self.fresh: set[int] = set()
        """ids written since the last re-check"""
        self.pages = 0

    def page(self, cursors: Cursors, limit: int, *, only_fresh: bool = False) -> Page:
        self.pages += 1
        found: list[Row] = []
        for bucket, at_us, kind, task_id, until_us in zip(
            cursors.buckets,
            cursors.at_us,
            cursors.kinds,
            cursors.ids,
            cursors.until_us,
            strict=True,
        ):
            beyond = (at_us, kind, task_id)
            matching = [
                row
                for row in self.rows
                if row[1] == bucket
                and (row[2], row[3], row[0]) > beyond
                and row[2] <= until_us
                and (not only_fresh or row[0] in self.fresh)
            ]
            found += sorted(matching, key=lambda row: (row[2], row[3], row[0]))[:limit]
        return Page(1, 1, found)

    def load(self, marks: Watermarks, until_us: int, limit: int, pages: int = 10**9) -> list[int]:
        """What the timer manager does: page by page, at most so many."""
        read: list[int] = []
        cursors = marks.cursors(until_us)
        while cursors.buckets and pages > 0:
            page = self.page(cursors, limit)
            read += [row[0] for row in page.rows]
            cursors = marks.note(cursors, page, limit)
            pages -= 1
        return read

    def recheck(self, marks: Watermarks, from_us: int, limit: int) -> list[int]:
        read: list[int] = []
        cursors = marks.cursors_behind(from_us)
        while cursors.buckets:
            page = self.page(cursors, limit, only_fresh=True)
            read += [row[0] for row in page.rows]
            cursors = rest(cursors, page, limit)
        return read


def watching(*buckets: int) -> Watermarks:
    marks = Watermarks()
    marks.watch(buckets, buckets)
    return marks


_ids = count(1)
ROWS = st.lists(
    st.builds(
        lambda bucket, at, kind: (next(_ids), bucket, T0 + 2 * at, kind, 0),
        bucket=st.integers(0, 2),
        at=st.integers(0, 8),
        kind=st.sampled_from(["", "a", "b", "é"]),
    ),
    max_size=60,
)
# Edges lie between the rows' instants, so that a row is on one side of each.
EDGES = st.lists(st.integers(0, 9).map(lambda at: T0 + 2 * at - 1), min_size=1, max_size=6)


@settings(max_examples=400, deadline=None)
@given(ROWS, EDGES, st.integers(1, 5), st.integers(1, 3))
def test_no_row_is_skipped_or_read_twice_whatever_the_pages(
    rows: list[Row], edges: list[int], limit: int, pages: int
) -> None:
    index, marks = Index(rows), watching(0, 1, 2)
    read: Counter[int] = Counter()
    for until_us in edges:  # also backwards, and cut off after a few pages
        read.update(index.load(marks, until_us, limit, pages))
    read.update(index.load(marks, max(edges), limit))
    due = {row[0] for row in rows if row[2] <= max(edges)}
    assert set(read) == due
    assert max(read.values(), default=1) == 1


@settings(max_examples=400, deadline=None)
@given(ROWS, st.lists(st.tuples(ROWS, st.integers(0, 9), st.integers(1, 3)), max_size=5))
def test_what_appears_behind_a_mark_is_found_by_the_recheck_and_what_appears_before_it_by_the_load(
    rows: list[Row], steps: list[tuple[list[Row], int, int]]
) -> None:
    index, marks = Index(rows), watching(0, 1, 2)
    seen = set(index.load(marks, T0 + 5, 2, pages=2))
    for more, at, pages in steps:
        index.rows += more
        index.fresh.update(row[0] for row in more)
        seen.update(index.load(marks, T0 + 2 * at - 1, 2, pages))
        seen.update(index.recheck(marks, BEGINNING_US, 2))
        index.fresh.clear()
    seen.update(index.load(marks, T0 + 100, 2))
    assert seen == {row[0] for row in index.rows}


@settings(max_examples=300, deadline=None)
@given(ROWS, st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_after_a_rewind_everything_from_there_on_is_read_again_and_nothing_before_it(
    rows: list[Row], edge: int, back: int, limit: int
) -> None:
    index, marks = Index(rows), watching(0, 1, 2)
    edge_us, back_us = T0 + 2 * edge + 1, T0 + 2 * back
    index.load(marks, edge_us, limit)
    marks.rewind(back_us)
    again = index.load(marks, edge_us, limit)
    assert sorted(again) == sorted(row[0] for row in rows if back_us <= row[2] <= edge_us)


def test_fifty_thousand_ties_are_read_once_each() -> None:
    rows = [(task_id, task_id & 1, T0, "a", 0) for task_id in range(2_000)]
    index, marks = Index(rows), watching(0, 1)
    read = index.load(marks, T0 + 1, 100)
    assert sorted(read) == list(range(2_000))
    assert index.pages <= 11


def test_ties_at_the_very_edge_are_not_lost_when_the_edge_moves_on() -> None:
    index, marks = Index([(1, 0, T0, "a", 0), (2, 0, T0, "b", 0)]), watching(0)
    read = index.load(marks, T0, 1)
    index.rows.append((3, 0, T0, "", 0))  # at the instant of the edge, behind the last row in order
    read += index.load(marks, T0 + 1, 1)
    assert set(read) == {1, 2, 3}


def test_a_crowded_bucket_neither_holds_up_the_others_nor_makes_them_be_read_again() -> None:
    crowd = [(task_id, 0, T0 + task_id, "a", 0) for task_id in range(100)]
    others = [(1_000 + bucket, bucket, T0 + 500, "a", 0) for bucket in range(1, 5)]
    index, marks = Index(crowd + others), watching(0, 1, 2, 3, 4)
    first = index.load(marks, T0 + 1_000, 10, pages=1)
    assert sorted(first) == [*range(10), 1_001, 1_002, 1_003, 1_004]
    assert marks.edge_us() == T0 + 9
    assert marks.cursors(T0 + 1_000).buckets == [0]
    second = index.load(marks, T0 + 1_000, 10)
    assert sorted(second) == list(range(10, 100))
    assert marks.edge_us() == T0 + 1_000


def test_everything_is_read_from_the_very_first_instant_that_the_schema_allows() -> None:
    index, marks = Index([(1, 0, BEGINNING_US, "", 0)]), watching(0)
    assert index.load(marks, T0, 5) == [1]
    marks.rewind()
    assert index.load(marks, T0, 5) == [1]


def test_a_rewind_to_beyond_the_marks_changes_nothing() -> None:
    index, marks = Index([(1, 0, T0, "a", 0)]), watching(0)
    index.load(marks, T0 + 10, 5)
    marks.rewind(T0 + 11)
    assert marks.edge_us() == T0 + 10
    assert index.load(marks, T0 + 10, 5) == []


def test_gained_buckets_are_read_from_the_beginning_and_kept_ones_go_on() -> None:
    rows = [(bucket, bucket, T0, "a", 0) for bucket in range(4)]
    index, marks = Index(rows), watching(0, 1)
    assert sorted(index.load(marks, T0 + 1, 5)) == [0, 1]
    marks.watch([1, 2, 3], again=[3])
    assert sorted(marks.buckets) == [1, 2, 3]
    assert sorted(index.load(marks, T0 + 1, 5)) == [2, 3]  # 2 is new, 3 is gained for a kind
    marks.watch([1, 2, 3], again=[1])
    assert index.load(marks, T0 + 1, 5) == [1]


def test_a_page_about_a_bucket_that_is_watched_no_more_changes_nothing() -> None:
    index, marks = Index([(1, 0, T0, "a", 0)]), watching(0, 1)
    cursors = marks.cursors(T0 + 1)
    marks.watch([1], again=[])
    marks.note(cursors, index.page(cursors, 1), 1)
    assert marks.buckets == [1]


def test_a_node_without_a_role_has_nothing_to_read() -> None:
    marks = Watermarks()
    assert marks.edge_us() == END_US
    assert marks.cursors(END_US).buckets == []
    assert marks.cursors_behind(BEGINNING_US).buckets == []


@pytest.mark.parametrize("from_us", [T0 + 10, T0 + 11])
def test_nothing_lies_behind_a_mark_from_there_on(from_us: int) -> None:
    index, marks = Index(), watching(0)
    index.load(marks, T0 + 10, 5)
    assert marks.cursors_behind(from_us).buckets == []
