"""The timers of a node: loads the window, keeps it true, and says when a task is due.

The table is the truth, the heaps are a cache of it. The owner's timers fire at T; the
understudy holds the same ones and looks `understudy_delay` later whether the owner did. One
armed `loop.call_at` serves each heap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from delayq.alarm import Alarm
from delayq.errors import DelayQError, InvalidArgument
from delayq.log import log
from delayq.ranks import BUCKETS, Role, Roles, bucket_of
from delayq.store import Cursors, Page
from delayq.timer_heap import Timer, TimerHeap
from delayq.window import BEGINNING_US, Watermarks, rest

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.dispatcher import Dispatcher
    from delayq.executor import Executor

_PAGE_ROWS: Final = 2_000
_TURN_ROWS: Final = 400
"""Rows put into the heap between two turns of the loop: well under 5 ms."""
_POP: Final = 1_000
_STANDBY_GRID_US: Final = 50_000
"""The understudy looks on this grid, so that many timers share one look."""
_OVERDUE_BACK_US: Final = 60_000_000
_OVERDUE_ROWS: Final = 500


class TimerManager:
    """Timers of one incarnation. `load` and `fire` are its steps; loops belong to the node."""

    def __init__(
        self, commons: Commons, dispatcher: Dispatcher, executor: Executor, kinds: Iterable[str]
    ) -> None:
        settings = commons.settings
        self._store = commons.store
        self._clock = commons.database_clock
        self._counters = commons.counters
        self._dispatcher = dispatcher
        self._executor = executor
        self._sweep_us = commons.sweep_us
        self._horizon_us = max(round(settings.horizon_s * 1e6), 3 * self._sweep_us)
        self._understudy_us = settings.understudy_delay_ms * 1000
        self._max_timers = settings.max_timers
        self._ready_limit = max(2_000, self._max_timers // 20)
        self.served = frozenset(kinds)
        self._kinds = sorted(self.served)
        self.owned = TimerHeap(self._max_timers)
        self.standby = TimerHeap(self._max_timers)
        self.roles = Roles()
        self._marks = Watermarks()
        self._sweeping = asyncio.Lock()
        self._more = asyncio.Event()
        self._page_rows = min(_PAGE_ROWS, self._max_timers // 4)
        self._owned_alarm = Alarm(self._clock, self.fire)
        self._standby_alarm = Alarm(self._clock, self._fire_standby)
        self._snapshot: int | None = None  # xmin from before the first page of the last re-check
        self._server_started_us: int | None = None
        self._server_changed = False
        self._overdue_left = False
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._clock.on_step.append(self._hear_step)

    # --- arming ------------------------------------------------------------------------------

    def arm(self, timer: Timer, here: bool = False) -> None:
        """Hold a timer according to this node's rank for it; `here`: whatever the rank."""
        if timer.id in self._dispatcher.held:
            return
        role = Role.OWNER if here else self.roles.role(timer.kind, bucket_of(timer.id))
        if role is Role.OWNER:
            self.standby.discard(timer.id)
            self.owned.push(timer.id, timer.at_us, timer.kind, timer.priority, make_room=True)
            self._arm_owned()
        elif role is Role.UNDERSTUDY:
            self.owned.discard(timer.id)
            at_us = max(timer.at_us, self._clock.now_us())
            self.standby.push(timer.id, at_us, timer.kind, timer.priority, make_room=True)
            self._arm_standby()
        else:
            self.forget(timer.id)

    def hear(self, timers: Iterable[Timer]) -> None:
        """A hint names these. One beyond what is loaded is left to the load of its slice."""
        edge_us = self._clock.now_us() + self._horizon_us
        for timer in timers:
            if timer.at_us > edge_us:
                self.forget(timer.id)  # moved away
            else:
                try:
                    self.arm(timer)
                except InvalidArgument:
                    continue  # a stranger's nonsense on the channel

    def forget(self, task_id: int) -> None:
        """Hold no timer for this task."""
        self.owned.discard(task_id)
        self.standby.discard(task_id)

    # --- firing ------------------------------------------------------------------------------

    def _arm_owned(self) -> None:
        at_us = self.owned.next_at_us()
        if at_us is not None and not self._stopped:
            self._owned_alarm.set(at_us - self._dispatcher.ahead_us)

    def fire(self) -> None:
        """Offer what is due to the dispatcher; the rest of it follows as the ready queue empties.

        Compares with the clock itself, not with the loop's idea of it, which may be coarse.
        """
        if self._stopped:
            return
        # what waits aside for the limit of its kind does not count: it must not hold up others
        room = min(_POP, self._ready_limit - self._dispatcher.ready.takeable)
        if room > 0:
            due_us = self._clock.now_us() + self._dispatcher.ahead_us
            timers = self.owned.pop_due(due_us, room)
            if timers:
                self._dispatcher.offer(timers)
            # a full page: on with the rest after a turn of the loop
            self._arm_owned()
        self._want_more()

    def refill(self) -> None:
        """The ready queue has room again."""
        at_us = self.owned.next_at_us()
        if at_us is not None and at_us <= self._clock.now_us():
            self.fire()
        else:
            self._arm_owned()  # a full queue left it unarmed, and what it waited for may be gone
            self._want_more()

    def _arm_standby(self) -> None:
        at_us = self.standby.next_at_us()
        if at_us is not None and not self._stopped:
            look_us = at_us + self._understudy_us
            self._standby_alarm.set(look_us + -look_us % _STANDBY_GRID_US)

    def _fire_standby(self) -> None:
        if self._stopped:
            return
        timers = self.standby.pop_due(self._clock.now_us() - self._understudy_us, _POP)
        if timers:
            self._dispatcher.lookout.stand_in(timers)
        self._arm_standby()

    def _hear_step(self, _change_us: int) -> None:
        """Told in the thread of whoever observed, the beat's most likely."""
        self._loop.call_soon_threadsafe(self._clock_stepped)

    def _clock_stepped(self) -> None:
        """The database's clock was set: every wait was computed from the old one."""
        self._owned_alarm.clear()
        self._standby_alarm.clear()
        self._arm_owned()
        self._arm_standby()

    def stop(self) -> None:
        """Fire nothing any more."""
        self._stopped = True
        self._owned_alarm.clear()
        self._standby_alarm.clear()

    # --- ranks and kinds -----------------------------------------------------------------------

    async def adjust(self, roles: Roles) -> None:
        """The ranks changed: read gained buckets, hand timers from one heap to the other."""
        async with self._sweeping:
            gained = roles.gained(self.roles)
            self.roles = roles
            self._marks.watch(roles.owned | roles.understudied, gained)
            await self._reassign(self.standby)
            await self._reassign(self.owned)
            await self._load_window()

    async def _reassign(self, heap: TimerHeap) -> None:
        """Arm every timer of a heap by its new role, in short turns."""
        for done, task_id in enumerate(list(heap.ids())):
            timer = heap.get(task_id)
            if timer is not None:
                self._reassign_one(heap, timer)
            if done % _TURN_ROWS == _TURN_ROWS - 1:
                await asyncio.sleep(0)

    def _reassign_one(self, heap: TimerHeap, timer: Timer) -> None:
        role = self.roles.role(timer.kind, bucket_of(timer.id))
        if role is None:
            heap.discard(timer.id)
        elif (role is Role.OWNER) != (heap is self.owned):
            self.arm(timer)

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

    # --- loading -------------------------------------------------------------------------------

    async def rescan(self) -> None:
        """Read everything again: at a start, after a lost LISTEN, after a failover."""
        async with self._sweeping:
            self._marks.rewind()
            await self._load_window()

    async def rescan_from(self, from_us: int) -> None:
        """A hint says that there is too much to list from this instant on."""
        async with self._sweeping:
            self._marks.rewind(max(BEGINNING_US, from_us))
            await self._load_window()

    async def sweep(self) -> None:
        """The periodic pass: new slice, re-check of the loaded one, cancel flags, overdue."""
        async with self._sweeping:
            await self._load_window()
            await self._recheck()
            await self._load_window()  # what the re-check had no room for
            if self._server_changed:
                # transaction ids may have gone back, and who knows what was missed: all again
                self._server_changed = False
                self._snapshot = None
                self._marks.rewind()
                await self._load_window()
        if self._executor.running:
            flagged = await self._store.cancel_flags(list(self._executor.running))
            self._executor.request_cancel(flagged)
        await self._take_overdue(self._clock.now_us() - _OVERDUE_BACK_US)

    async def full_scan(self) -> None:
        """Once a minute: everything due, however old, whoever should have fired it."""
        async with self._sweeping:
            cursors = self._marks.cursors_behind(BEGINNING_US)
            now_us = self._clock.now_us()
            cursors.until_us = [min(until_us, now_us) for until_us in cursors.until_us]
            await self._read(cursors, None)
        await self._take_overdue(BEGINNING_US)

    async def keep_loaded(self) -> None:
        """Load more when what is loaded runs out before the next sweep; loops until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                async with self._sweeping:
                    await self._load_window()
                if self._overdue_left:
                    await self._take_overdue(self._clock.now_us() - _OVERDUE_BACK_US)
            except DelayQError as error:
                log.bind(error=str(error)).warning("window.retry")
                await asyncio.sleep(0.5)
                self._more.set()

    def _want_more(self) -> None:
        if (self._overdue_left and self._dispatcher.idle) or (
            self._room() > self._max_timers // 2 and self._runs_out()
        ):
            self._more.set()

    def _runs_out(self) -> bool:
        cuts_us = [heap.cut_us for heap in (self.owned, self.standby) if heap.cut_us is not None]
        edge_us = min(self._marks.edge_us(), *cuts_us) if cuts_us else self._marks.edge_us()
        return edge_us - self._clock.now_us() < self._sweep_us

    def _room(self) -> int:
        held = max(len(self.owned) + len(self._dispatcher.ready), len(self.standby))
        return self._max_timers - held

    async def _load_window(self) -> None:
        """Read on from the watermarks; full heaps keep the earliest."""
        self._note_cuts()
        now_us = self._clock.now_us()
        if self._marks.edge_us() - now_us > self._sweep_us + self._sweep_us // 2:
            return
        cursors = self._marks.cursors(self._reach_us(now_us))
        while cursors.buckets:
            limit = max(8, self._page_rows // len(cursors.buckets))
            page = await self._page(cursors, limit, None)
            await self._hold(page.rows)
            self._marks.note(cursors, page, limit)
            cursors = self._marks.cursors(self._reach_us(now_us))

    def _reach_us(self, now_us: int) -> int:
        """Up to where to load: the horizon, or if the heaps are full the latest timer held."""
        if self._room() > self._page_rows:
            return now_us + self._horizon_us
        fuller = max(self.owned, self.standby, key=len)
        latest_us = fuller.latest_at_us()
        return BEGINNING_US if latest_us is None else min(latest_us, now_us + self._horizon_us)

    def _note_cuts(self) -> None:
        """What a full heap refused or dropped is read again later."""
        for heap in (self.owned, self.standby):
            cut_us = heap.take_cut_us()
            if cut_us is not None:
                self._marks.rewind(cut_us)

    async def _recheck(self) -> None:
        """Rows that appeared in the loaded slice since the last sweep, or were moved into it."""
        newer_than = self._snapshot
        cursors = self._marks.cursors_behind(self._clock.now_us() - 2 * self._sweep_us)
        if not cursors.buckets:
            return
        # the xmin that is remembered is the one from before the first page: a row that commits
        # between two pages is younger than it and is found the next time
        self._snapshot = await self._read(cursors, newer_than)

    async def _read(self, cursors: Cursors, newer_than: int | None) -> int | None:
        """Hold what the cursors cover, page by page; the xmin before the first page."""
        first_xmin: int | None = None
        while cursors.buckets and (first_xmin is None or self._room() > self._page_rows):
            limit = max(8, self._page_rows // len(cursors.buckets))
            page = await self._page(cursors, limit, newer_than)
            first_xmin = page.xmin if first_xmin is None else first_xmin
            await self._hold(page.rows)
            cursors = rest(cursors, page, limit)
        if cursors.buckets:  # no room for the rest: the load comes back to it
            self._marks.rewind(min(cursors.at_us))
        return first_xmin

    async def _page(self, cursors: Cursors, limit: int, newer_than: int | None) -> Page:
        # what ends while the page is read is still pending in its snapshot: not to be held again
        self._dispatcher.gone.clear()
        page = await self._store.window(cursors, self._kinds, limit, newer_than)
        self._compare_server(page)
        return page

    def _compare_server(self, page: Page) -> None:
        """Notice a restart, a recovery or a failover."""
        known_us, self._server_started_us = self._server_started_us, page.server_started_us
        if (known_us is not None and known_us != page.server_started_us) or (
            self._snapshot is not None and page.xmin < self._snapshot
        ):
            self._server_changed = True

    async def _hold(self, rows: Sequence[tuple[int, int, int, str, int]]) -> None:
        for start in range(0, len(rows), _TURN_ROWS):
            self._hold_some(rows[start : start + _TURN_ROWS])
            if len(rows) > _TURN_ROWS:
                await asyncio.sleep(0)
        self._arm_owned()
        self._arm_standby()

    def _hold_some(self, rows: Sequence[tuple[int, int, int, str, int]]) -> None:
        held, gone, role_of = self._dispatcher.held, self._dispatcher.gone, self.roles.role
        owned, standby = self.owned.push, self.standby.push
        now_us = self._clock.now_us()
        # what is due already goes straight on, as far as there is room
        room = 0 if self._stopped else self._ready_limit - self._dispatcher.ready.takeable
        due: list[Timer] = []
        for task_id, bucket, at_us, kind, priority in rows:
            if task_id in held or task_id in gone:
                continue
            role = role_of(kind, bucket)
            if role is Role.OWNER:
                if at_us <= now_us and len(due) < room and task_id not in self.owned:
                    due.append(Timer(task_id, at_us, kind, priority))
                else:
                    owned(task_id, at_us, kind, priority, make_room=True)
            elif role is Role.UNDERSTUDY:
                standby(task_id, max(now_us, at_us), kind, priority, make_room=True)

        if due:
            self._dispatcher.offer(due)

    async def _take_overdue(self, from_us: int) -> None:
        """Liveness and work stealing: overdue tasks that nobody fires, while workers are free."""
        self._overdue_left = False
        if self._dispatcher.idle and not self._stopped:
            until_us = self._clock.now_us() - 2 * self._understudy_us
            at_us = self.owned.next_at_us()
            if at_us is not None and at_us < until_us:
                return  # a backlog of our own
            limit = min(_OVERDUE_ROWS, max(1, self._dispatcher.free))
            rows = await self._store.overdue(
                list(range(BUCKETS)), from_us, until_us, self._kinds,
                list(self._dispatcher.held), limit,
            )  # fmt: skip
            timers = [Timer(*row) for row in rows]
            self._counters.foreign += sum(
                self.roles.role(timer.kind, bucket_of(timer.id)) is None for timer in timers
            )
            for timer in timers:
                self.forget(timer.id)
            self._dispatcher.offer(timers)
            self._overdue_left = len(timers) == limit
