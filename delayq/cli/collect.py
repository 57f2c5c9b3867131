"""Reads the figures of `stats`: bounded statements in one short transaction.

Each part may fail alone (it took too long, a privilege is missing): it is then named and left
out, and the rest is shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeVar

from delayq.cli import figures
from delayq.cli.figures import Count, Due, Live, NodeFigures, Paces
from delayq.cli.text import one_line
from delayq.errors import DatabaseError, PrivilegeMissing, SchemaMissing
from delayq.instants import EPOCH
from delayq.report_store import Days, Part, ReportStore

T = TypeVar("T")

WINDOW: Final = timedelta(hours=1)
SOON: Final = timedelta(minutes=1)
_LIMIT_MS: Final = 2_000
_EACH: Final = 40  # rows a bucket and end: 256 buckets hold 10,000 of them
_SAMPLE_PAGES: Final = 250
_COUNT_PAGES: Final = 1_000
_PACE_PAGES: Final = 200
_NODES: Final = 1_000


@dataclass(slots=True)
class Stats:
    """All figures. What is None could not be read; `unavailable` says why."""

    at: datetime
    live: Live | None = None
    due: Due | None = None
    soon: Due | None = None
    paces: Paces | None = None
    finished: dict[str, Count] | None = None
    dead: dict[str, int] | None = None
    nodes: list[NodeFigures] | None = None
    paused: list[str] | None = None
    unavailable: list[str] = field(default_factory=list)

    @property
    def unserved(self) -> list[str]:
        """Kinds with tasks and without a live node that serves them, as far as was seen."""
        if self.nodes is None:
            return []
        seen: set[str] = set(self.live.by_kind) if self.live else set()
        for due in (self.due, self.soon):
            seen |= set(due.waiting) if due else set()
        return figures.unserved(seen, self.nodes)


async def collect(store: ReportStore) -> Stats:
    """Read all figures. Raises only if the database is gone or has no schema."""
    async with store.report(_LIMIT_MS):
        stats = Stats(at=(await store.clock())["clock"])
        await _Collector(store, stats).all()
    return stats


class _Collector:
    def __init__(self, store: ReportStore, stats: Stats) -> None:
        self._store = store
        self._stats = stats

    async def all(self) -> None:
        stats = self._stats
        stats.live = await self._part("live tasks", self._live)
        stats.due = await self._part("due tasks", self._due)
        stats.soon = await self._part("tasks due soon", self._soon)
        stats.dead = await self._part("dead tasks", self._dead)
        stats.nodes = await self._part("nodes", self._nodes)
        stats.paused = await self._part("paused kinds", self._store.paused)
        await self._part("finished tasks", self._finished)

    async def _part(self, what: str, read: Callable[[], Awaitable[T]]) -> T | None:
        try:
            async with self._store.figure():
                return await read()
        except SchemaMissing:
            raise
        except (DatabaseError, PrivilegeMissing) as error:
            self._stats.unavailable.append(f"{what}: {one_line(error)}")
            return None

    async def _live(self) -> Live:
        rows = await self._store.live(figures.COUNTED + 1)
        if sum(row["tasks"] for row in rows) <= figures.COUNTED:
            return figures.live_of(rows)
        return figures.live_estimate(await self._store.sample(_SAMPLE_PAGES))

    async def _due(self) -> Due:
        return figures.due_of(await self._store.window(EPOCH, self._stats.at, _EACH))

    async def _soon(self) -> Due:
        at = self._stats.at
        return figures.due_of(await self._store.window(at, at + SOON, _EACH))

    async def _dead(self) -> dict[str, int]:
        return figures.totals(await self._store.dead(figures.COUNTED + 1), "kind")

    async def _nodes(self) -> list[NodeFigures]:
        return [figures.node_of(row) for row in await self._store.nodes(_NODES)]

    async def _finished(self) -> None:
        """Counts and paces of the last hour, from the newest pages of history alone."""
        stats, since = self._stats, self._stats.at - WINDOW
        leaves = await self._store.leaves()
        rows = await self._store.finished_count(since, _days(leaves, stats.at, _COUNT_PAGES))
        counted = figures.totals(rows, "state")
        older = any(row["older"] for row in rows)
        cut = figures.is_cut(leaves, since, _COUNT_PAGES, older)
        stats.finished = {
            state: Count(tasks, "at_least" if cut else "exact") for state, tasks in counted.items()
        }
        paces = await self._store.finished(since, _days(leaves, stats.at, _PACE_PAGES))
        stats.paces = figures.paces_of(paces)
        stats.paces.cut = stats.paces.all.tasks < sum(counted.values())


def _days(leaves: figures.Row, at: datetime, pages: int) -> Days:
    midnight = leaves["midnight"]
    # empty, so that its partition is not even opened
    yesterday = midnight - timedelta(days=1) if at - WINDOW < midnight else midnight
    # without a partition of its own a day's tasks are in the default one
    today_pages = leaves["today"] or leaves["default"]
    yesterday_pages = leaves["yesterday"] or leaves["default"]
    return Days(
        Part(midnight, at + WINDOW, figures.begin_of(today_pages, pages)),
        Part(yesterday, midnight, figures.begin_of(yesterday_pages, pages)),
    )
