"""Loads the timers of a node from the table, and keeps them true.

Two reads, each with watermarks of its own, so that neither holds up the other:

* the *window*, from now up to the horizon, goes into the heaps of owner and understudy;
* the *backlog*, what is due already and this node owns, goes to the ready queue as fast as that
  empties, and is never held in memory as a whole.

What appears behind a watermark later is found by hints, by the re-check (rows of the loaded window
younger than the last sweep's snapshot), by the look for overdue tasks of anybody, and once a minute
by reading the backlog again from the beginning.
"""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from delayq.errors import DelayQError
from delayq.log import log
from delayq.ranks import BUCKETS, Role, Roles, bucket_of
from delayq.store import Cursors, Page
from delayq.timer_heap import Timer
from delayq.timers import TURN_ROWS
from delayq.window import BEGINNING_US, Start, Watermarks, rest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq.commons import Commons
    from delayq.dispatcher import Dispatcher
    from delayq.executor import Executor
    from delayq.holdings import Holdings
    from delayq.timers import Row, Timers

_PAGE_ROWS: Final = 2_000
_LOW: Final = 1_000
"""The backlog is read on when fewer than this are ready."""
_OVERDUE_BACK_US: Final = 60_000_000
_OVERDUE_ROWS: Final = 500
_AT_US: Final = itemgetter(2)  # of a row


class TimerManager:
    """The reads of one incarnation. Its methods are steps; the loops belong to the node."""

    def __init__(
        self,
        commons: Commons,
        holdings: Holdings,
        timers: Timers,
        dispatcher: Dispatcher,
        executor: Executor,
        kinds: Iterable[str],
    ) -> None:
        settings = commons.settings
        self._store = commons.store
        self._clock = commons.database_clock
        self._counters = commons.counters
        self._holdings = holdings
        self._timers = timers
        self._dispatcher = dispatcher
        self._executor = executor
        self._sweep_us = commons.sweep_us
        self._horizon_us = round(settings.horizon_effective_s * 1e6)
        self._understudy_us = settings.understudy_delay_ms * 1000
        self._page_rows = min(_PAGE_ROWS, timers.limit // 4)
        self.served = frozenset(kinds)
        """the kinds of this node, paused or not"""
        self._kinds = sorted(self.served)
        self._window = Watermarks()
        self._backlog = Watermarks()
        self._backlog_left = True
        self._overdue_left = False
        self._overdue_from_us = BEGINNING_US
        self._reading = asyncio.Lock()
        self._more = asyncio.Event()
        self._snapshot: int | None = None  # xmin from before the first page of the last re-check
        self._server_started_us: int | None = None
        self._server_changed = False

    # --- ranks and kinds -----------------------------------------------------------------------

    @property
    def roles(self) -> Roles:
        """The present ranks of this node."""
        return self._timers.roles

    async def adjust(self, roles: Roles) -> None:
        """The ranks changed: hand timers over at once, then read what was gained."""
        gained = roles.gained(self._timers.roles)
        before = self._timers.roles.owned
        await self._timers.assume(roles)
        async with self._reading:
            self._window.watch(roles.owned | roles.understudied, gained, self._window_start())
            self._backlog.watch(roles.owned, gained | (roles.owned - before))
            self._backlog_left = True
            await self._load()

    async def serve(self, paused: frozenset[str]) -> None:
        """Kinds were paused or resumed."""
        kinds = sorted(self.served - paused)
        if kinds == self._kinds:
            return
        resumed = set(kinds) - set(self._kinds)
        self._kinds = kinds
        self._dispatcher.paused = paused
        if resumed:
            await self.rescan()

    # --- the passes ----------------------------------------------------------------------------

    async def rescan(self) -> None:
        """Read everything again: at a start, after a lost LISTEN, after a failover."""
        await self.rescan_from(BEGINNING_US)

    async def rescan_from(self, from_us: int) -> None:
        """A hint says that there is too much to list from this instant on."""
        async with self._reading:
            self._rewind(from_us)
            await self._load()

    async def sweep(self) -> None:
        """The periodic pass: new slice, re-check of the loaded one, cancel flags, overdue."""
        async with self._reading:
            await self._load()
            await self._recheck()
            await self._load_window()  # what the re-check had no room for
            if self._server_changed:
                # transaction ids may have gone back, and who knows what was missed: all again
                self._server_changed = False
                self._snapshot = None
                self._rewind(BEGINNING_US)
                await self._load()
        if self._executor.running:
            flagged = await self._store.cancel_flags(list(self._executor.running))
            self._executor.request_cancel(flagged)
        recent_us = self._clock.now_us() - _OVERDUE_BACK_US
        await self._take_overdue(self._overdue_from_us if self._overdue_left else recent_us)

    async def full_scan(self) -> None:
        """Once a minute: everything due, however old, whoever should have fired it."""
        async with self._reading:
            self._backlog.rewind()
            self._backlog_left = True
            await self._load_backlog()
        await self._take_overdue(BEGINNING_US)

    async def keep_loaded(self) -> None:
        """Load more when what is loaded runs out before the next sweep; loops until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                async with self._reading:
                    await self._load()
                if self._overdue_left:
                    await self._take_overdue(self._overdue_from_us)
            except DelayQError as error:
                log.bind(error=str(error)).warning("window.retry")
                await asyncio.sleep(0.5)
                self._more.set()

    def read_on(self) -> None:
        """What is held or ready may run out: wake `keep_loaded` if there is anything to read."""
        ready = self._dispatcher.ready
        if (
            ((self._backlog_left or ready.reopened) and ready.takeable < _LOW)
            or (self._overdue_left and self._dispatcher.idle)
            or (self._timers.room > self._timers.limit // 2 and self._runs_out())
        ):
            self._more.set()

    def _rewind(self, to_us: int) -> None:
        self._window.rewind(to_us, self._window_start())
        self._backlog.rewind(to_us)
        self._backlog_left = True

    def _recent_us(self) -> int:
        """Since when rows may have appeared that the last sweep did not see."""
        return self._clock.now_us() - 2 * self._sweep_us

    def _window_start(self) -> Start:
        """What is due in an own bucket is backlog; an understudy also looks back a little."""
        owned, now_us, recent_us = self._timers.roles.owned, self._clock.now_us(), self._recent_us()
        return lambda bucket: now_us if bucket in owned else recent_us

    # --- the window ----------------------------------------------------------------------------

    async def _load(self) -> None:
        await self._load_window()
        await self._load_backlog()

    async def _load_window(self) -> None:
        """Read on from the watermarks; full heaps keep the earliest."""
        self._note_cuts()
        now_us = self._clock.now_us()
        if self._window.edge_us() - now_us > self._sweep_us + self._sweep_us // 2:
            return
        cursors = self._window.cursors(self._reach_us(now_us))
        while cursors.buckets:
            limit = max(8, self._page_rows // len(cursors.buckets))
            page = await self._page(cursors, limit, None)
            await self._timers.hold(page.rows)
            self._window.note(cursors, page, limit)
            cursors = self._window.cursors(self._reach_us(now_us))

    def _reach_us(self, now_us: int) -> int:
        """Up to where to load: the horizon, or if the heaps are full the latest timer held."""
        timers = self._timers
        if timers.room > self._page_rows:
            return now_us + self._horizon_us
        latest_us = max(timers.owned, timers.standby, key=len).latest_at_us()
        return BEGINNING_US if latest_us is None else min(latest_us, now_us + self._horizon_us)

    def _runs_out(self) -> bool:
        heaps = self._timers.owned, self._timers.standby
        edge_us = min([self._window.edge_us(), *(h.cut_us for h in heaps if h.cut_us is not None)])
        return edge_us - self._clock.now_us() < self._sweep_us

    def _note_cuts(self) -> None:
        """What a full heap refused or dropped is read again later."""
        for heap in (self._timers.owned, self._timers.standby):
            cut_us = heap.take_cut_us()
            if cut_us is not None:
                self._window.rewind(cut_us, self._window_start())
                if cut_us <= self._clock.now_us():
                    self._backlog.rewind(cut_us)
                    self._backlog_left = True

    async def _recheck(self) -> None:
        """Rows that appeared in the loaded slice since the last sweep, or were moved into it."""
        newer_than = self._snapshot
        cursors = self._window.cursors_behind(self._recent_us())
        if not cursors.buckets:
            return
        # the xmin that is remembered is the one from before the first page: a row that commits
        # between two pages is younger than it and is found the next time
        first_xmin: int | None = None
        while cursors.buckets and (first_xmin is None or self._timers.room > self._page_rows):
            limit = max(8, self._page_rows // len(cursors.buckets))
            page = await self._page(cursors, limit, newer_than)
            first_xmin = page.xmin if first_xmin is None else first_xmin
            await self._timers.hold(page.rows)
            cursors = rest(cursors, page, limit)
        if cursors.buckets:  # no room for the rest: the load comes back to it
            self._window.rewind(min(cursors.at_us))
        self._snapshot = first_xmin

    async def _page(self, cursors: Cursors, limit: int, newer_than: int | None) -> Page:
        # what ends while the page is read is still pending in its snapshot: not to be held again
        self._holdings.page_begins()
        page = await self._store.window(cursors, self._kinds, limit, newer_than)
        self._compare_server(page)
        if self._snapshot is None:  # the first load: the first re-check looks for what came since
            self._snapshot = page.xmin
        return page

    def _compare_server(self, page: Page) -> None:
        """Notice a restart, a recovery or a failover."""
        known_us, self._server_started_us = self._server_started_us, page.server_started_us
        if (known_us is not None and known_us != page.server_started_us) or (
            self._snapshot is not None and page.xmin < self._snapshot
        ):
            self._server_changed = True

    # --- the backlog ---------------------------------------------------------------------------

    async def _load_backlog(self) -> None:
        """Read on in what is overdue and ours, as far as the ready queue has room."""
        # whole pages only: a small one visits as many buckets for a few rows
        while self._backlog_is_left() and self._timers.ready_room >= self._page_rows:
            cursors = self._backlog.cursors(self._clock.now_us())
            kinds = self._open_kinds()
            if not cursors.buckets or not kinds:
                self._backlog_left = False
                return
            limit = max(1, self._page_rows // len(cursors.buckets))
            self._holdings.page_begins()
            page = await self._store.window(cursors, kinds, limit, None)
            await self._offer_backlog(page.rows)
            left = self._backlog.note(cursors, page, limit)
            self._backlog_left = bool(left.buckets)

    def _backlog_is_left(self) -> bool:
        """Asked between two pages, never while one is read: that moves the marks when it ends."""
        ready = self._dispatcher.ready
        if ready.reopened:
            # a kind was at its limit, and what waited beyond that was let go
            ready.reopened = False
            self._backlog.rewind()
            self._backlog_left = True
        return self._backlog_left

    async def _offer_backlog(self, rows: Sequence[Row]) -> None:
        """The oldest first, in short turns: each of many rows goes through two dicts and a heap."""
        rows = sorted(rows, key=_AT_US)
        for start in range(0, len(rows), TURN_ROWS):
            self._offer_some(rows[start : start + TURN_ROWS])
            await asyncio.sleep(0)

    def _offer_some(self, rows: Sequence[Row]) -> None:
        has_ended, role_of = self._holdings.has_ended, self._timers.roles.role
        owned = self._timers.owned
        make = tuple.__new__  # a third of what the named tuple's own constructor costs
        owner = Role.OWNER
        due = [
            make(Timer, (task_id, at_us, kind, priority))
            for task_id, bucket, at_us, kind, priority in rows
            if not has_ended(task_id) and role_of(kind, bucket) is owner
        ]
        for timer in due if len(owned) else ():
            owned.discard(timer.id)
        self._dispatcher.offer(due)

    def _open_kinds(self) -> list[str]:
        """The kinds of which more may be taken: not those with a long line at their limit."""
        full = self._dispatcher.ready.full_kinds
        return [kind for kind in self._kinds if kind not in full] if full else self._kinds

    async def _take_overdue(self, from_us: int) -> None:
        """Liveness and work stealing: overdue tasks that nobody fires, while workers are free.

        A pass that came back full goes on from its last instant as soon as a worker is free: with
        vacuum held back, the beginning is a graveyard.
        """
        self._overdue_left = False
        kinds = self._open_kinds()
        if not self._dispatcher.idle or self._timers.stopped or self._backlog_left or not kinds:
            return
        until_us = self._clock.now_us() - 2 * self._understudy_us
        limit = min(_OVERDUE_ROWS, max(1, self._dispatcher.free))
        rows = await self._store.overdue(
            list(range(BUCKETS)), from_us, until_us, kinds, self._holdings.ids(), limit
        )
        timers = [Timer(*row) for row in rows]
        self._counters.foreign += sum(
            self._timers.roles.role(timer.kind, bucket_of(timer.id)) is None for timer in timers
        )
        for timer in timers:
            self._timers.forget(timer.id)
        self._dispatcher.offer(timers)
        self._overdue_left = len(timers) == limit
        self._overdue_from_us = timers[-1].at_us if timers else BEGINNING_US
        self._dispatcher.hungry = self._overdue_left or self._backlog_left
