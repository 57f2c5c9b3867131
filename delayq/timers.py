"""The timers of a node in memory: what is armed, by which rank, and what happens when it is due.

The owner's timers fire at T. The understudy holds the same ones and looks `understudy_delay`
later whether the owner did. One armed `loop.call_at` serves each heap. Losing an entry costs
lateness, never a task: the table is the truth, this is a cache of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from delayq.alarm import Alarm
from delayq.errors import InvalidArgument
from delayq.ranks import Role, Roles, bucket_of
from delayq.timer_heap import Timer, TimerHeap

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.dispatcher import Dispatcher
    from delayq.holdings import Holdings

Row = tuple[int, int, int, str, int]
"""(id, bucket, execute_at_us, kind, priority)"""

TURN_ROWS: Final = 400
"""Rows put into a heap between two turns of the loop: well under 5 ms."""
_POP: Final = 1_000
_STANDBY_GRID_US: Final = 50_000
"""The understudy looks on this grid, so that many timers share one look."""


class Timers:
    """The two heaps of one incarnation. For one event loop; connected before anything is armed."""

    def __init__(self, commons: Commons, holdings: Holdings, dispatcher: Dispatcher) -> None:
        settings = commons.settings
        self._clock = commons.database_clock
        self._holdings = holdings
        self._dispatcher = dispatcher
        self._horizon_us = round(settings.horizon_effective_s * 1e6)
        self._understudy_us = settings.understudy_delay_ms * 1000
        self.limit = settings.max_timers
        self._ready_limit = max(2_000, self.limit // 20)
        self.owned = TimerHeap(self.limit)
        self.standby = TimerHeap(self.limit)
        self.roles = Roles()
        self._low: Callable[[], None]  # see `connect`
        self._owned_alarm = Alarm(self._clock, self.fire)
        self._standby_alarm = Alarm(self._clock, self._fire_standby)
        self.stopped = False
        self._loop = asyncio.get_running_loop()
        self._clock.on_step.append(self._hear_step)

    def connect(self, low: Callable[[], None]) -> None:
        """Whom to tell that what is held may run out: the timer manager, which is made later."""
        self._low = low

    @property
    def room(self) -> int:
        """How many more timers fit; the fuller heap decides."""
        return self.limit - max(len(self.owned), len(self.standby))

    @property
    def ready_room(self) -> int:
        """How many more due tasks the ready queue should be given.

        What waits aside for the limit of its kind does not count: it must not hold up others.
        """
        return 0 if self.stopped else self._ready_limit - self._dispatcher.ready.takeable

    # --- arming ------------------------------------------------------------------------------

    def arm(self, timer: Timer, here: bool = False) -> None:
        """Hold a timer according to this node's rank for it; `here`: whatever the rank."""
        if self._holdings.holds(timer.id):
            return
        role = Role.OWNER if here else self.roles.role(timer.kind, bucket_of(timer.id))
        if role is Role.OWNER:
            self.standby.discard(timer.id)
            self.owned.push(timer.id, timer.at_us, timer.kind, timer.priority, make_room=True)
            self._arm_owned()
        elif role is Role.UNDERSTUDY:
            self.owned.discard(timer.id)
            self._stand_by(timer, self._clock.now_us())
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

    async def hold(self, rows: Sequence[Row]) -> None:
        """Arm what a page of the table brought, in short turns."""
        for start in range(0, len(rows), TURN_ROWS):
            self._hold_some(rows[start : start + TURN_ROWS])
            if len(rows) > TURN_ROWS:
                await asyncio.sleep(0)
        self._arm_owned()
        self._arm_standby()

    def _hold_some(self, rows: Sequence[Row]) -> None:
        holds, has_ended = self._holdings.holds, self._holdings.has_ended
        role_of, owned = self.roles.role, self.owned.push
        now_us = self._clock.now_us()
        for task_id, bucket, at_us, kind, priority in rows:
            if holds(task_id) or has_ended(task_id):
                continue
            role = role_of(kind, bucket)
            if role is Role.OWNER:
                owned(task_id, at_us, kind, priority, make_room=True)
            elif role is Role.UNDERSTUDY:
                self._stand_by(Timer(task_id, at_us, kind, priority), now_us)

    def _stand_by(self, timer: Timer, now_us: int) -> None:
        """Armed at T, or when it was first loaded. It keeps its turn when it is read again: else a
        pass over the table would put off what its owner has just failed to fire."""
        at_us = max(now_us, timer.at_us)
        armed_us = self.standby.at_of(timer.id)
        if armed_us is None or not timer.at_us <= armed_us <= at_us:
            self.standby.push(timer.id, at_us, timer.kind, timer.priority, make_room=True)

    # --- firing ------------------------------------------------------------------------------

    def _arm_owned(self) -> None:
        at_us = self.owned.next_at_us()
        if at_us is not None and not self.stopped:
            self._owned_alarm.set(at_us - self._dispatcher.ahead_us)

    def fire(self) -> None:
        """Offer what is due to the dispatcher; the rest of it follows as the ready queue empties.

        Compares with the clock itself, not with the loop's idea of it, which may be coarse.
        """
        room = min(_POP, self.ready_room)
        if room > 0:
            due_us = self._clock.now_us() + self._dispatcher.ahead_us
            timers = self.owned.pop_due(due_us, room)
            if timers:
                self._dispatcher.offer(timers)
            # a full page: on with the rest after a turn of the loop
            self._arm_owned()
        self._low()

    def refill(self) -> None:
        """The ready queue has room again."""
        at_us = self.owned.next_at_us()
        if at_us is not None and at_us <= self._clock.now_us():
            self.fire()
        else:
            self._arm_owned()  # a full queue left it unarmed, and what it waited for may be gone
            self._low()

    def _arm_standby(self) -> None:
        at_us = self.standby.next_at_us()
        if at_us is not None and not self.stopped:
            self._look_at(at_us + self._understudy_us)

    def _look_at(self, at_us: int) -> None:
        self._standby_alarm.set(at_us + -at_us % _STANDBY_GRID_US)

    def _fire_standby(self) -> None:
        if self.stopped:
            return
        now_us = self._clock.now_us()
        # a busy node can stand in for nobody: it does not even look, or it would look for ever
        free = self._dispatcher.free
        if free <= 0:
            self._look_at(now_us + self._understudy_us)
            return
        timers = self.standby.pop_due(now_us - self._understudy_us, min(_POP, 2 * free))
        if timers:
            self._dispatcher.lookout.stand_in(timers)
        if len(timers) == 2 * free:
            self._look_at(now_us + _STANDBY_GRID_US)
        else:
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
        self.stopped = True
        self._owned_alarm.clear()
        self._standby_alarm.clear()

    # --- ranks ---------------------------------------------------------------------------------

    async def assume(self, roles: Roles) -> None:
        """The ranks changed: hand timers from one heap to the other, in short turns.

        What this node stood by for and owns now comes first: its owner may be gone already.
        """
        self.roles = roles
        await self._reassign(self.standby)
        await self._reassign(self.owned)

    async def _reassign(self, heap: TimerHeap) -> None:
        for done, task_id in enumerate(list(heap.ids())):
            timer = heap.get(task_id)
            if timer is not None:
                self._reassign_one(heap, timer)
            if done % TURN_ROWS == TURN_ROWS - 1:
                await asyncio.sleep(0)

    def _reassign_one(self, heap: TimerHeap, timer: Timer) -> None:
        role = self.roles.role(timer.kind, bucket_of(timer.id))
        if role is None:
            heap.discard(timer.id)
        elif (role is Role.OWNER) != (heap is self.owned):
            self.arm(timer)
