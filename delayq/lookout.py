"""Looks at tasks that nobody leased: those that a lease missed, and those an owner left lying.
Also at running ones of which a hint says that they were asked to end.

One look at a time, for all that have gathered meanwhile. Still pending and due means locked by a
stranger (tried again, 10 ms, doubling up to a sweep) or, for the understudy, that the owner does
not fire it: then this node does, if it has a free worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from delayq.errors import DelayQError
from delayq.log import log
from delayq.timer_heap import Timer

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.holdings import Holdings
    from delayq.lease import Lease
    from delayq.store import Found

_BATCH: Final = 500
_AGAIN_FIRST_US: Final = 10_000
_RETRY_S: Final = 0.2
_MOST_TRIES: Final = 10_000


class _Firing(Protocol):
    """What the lookout needs from the dispatcher, which stands above it."""

    @property
    def free(self) -> int: ...
    def offer(self, timers: Iterable[Timer]) -> None: ...
    def forget(self, task_id: int, kind: str) -> None: ...


class _Arming(Protocol):
    """What it needs from the timers, which stand above it too."""

    def arm(self, timer: Timer, here: bool = False) -> None: ...


class _Running(Protocol):
    """What it needs from the executor."""

    running: dict[int, Lease]

    def request_cancel(self, task_ids: Iterable[int]) -> None: ...


class Lookout:
    """The looks of one incarnation. `run` is its loop."""

    def __init__(
        self,
        commons: Commons,
        holdings: Holdings,
        dispatcher: _Firing,
        timers: _Arming,
        executor: _Running,
    ) -> None:
        self._store = commons.store
        self._monotonic = commons.clock
        self._clock = commons.database_clock
        self._counters = commons.counters
        self._longest_us = commons.sweep_us
        self._holds = holdings.holds
        self._dispatcher = dispatcher
        self._timers = timers
        self._executor = executor
        self._cancels: set[int] = set()
        self._looks: deque[tuple[Timer, bool]] = deque()  # (timer, for the understudy)
        self._wake = asyncio.Event()
        self._tries: dict[int, int] = {}

    def missed(self, timers: Iterable[Timer]) -> None:
        """A lease did not return these."""
        self._looks.extend((timer, False) for timer in timers)
        self._wake.set()

    def stand_in(self, timers: Iterable[Timer]) -> None:
        """The understudy's turn: fire those that are still pending."""
        holds = self._holds
        self._looks.extend((timer, True) for timer in timers if not holds(timer.id))
        self._wake.set()

    def hear_cancel(self, task_id: int) -> None:
        """Somebody says that a running task was asked to end."""
        if task_id in self._executor.running:
            self._cancels.add(task_id)
            self._wake.set()

    def leased(self, leases: Iterable[Lease]) -> None:
        """These were leased in the end."""
        if self._tries:
            for lease in leases:
                self._tries.pop(lease.id, None)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._cancels:
                await self._look_at_cancels()
            while self._looks:
                await self._look(
                    [self._looks.popleft() for _ in range(min(_BATCH, len(self._looks)))]
                )

    async def _look_at_cancels(self) -> None:
        """A hint is never the truth: the row says whether it is so."""
        asked, self._cancels = list(self._cancels), set()
        try:
            self._executor.request_cancel(await self._store.cancel_flags(asked))
        except DelayQError as error:  # the next sweep reads the flags of all
            log.bind(error=str(error)).warning("look.retry")

    async def _look(self, batch: list[tuple[Timer, bool]]) -> None:
        sent_us = self._monotonic.monotonic_us()
        rows = await self._insist([timer.id for timer, _ in batch])
        if rows:
            self._clock.observe(rows[-1].now_us, sent_us, self._monotonic.monotonic_us())
        found = {row.id: row for row in rows}
        now_us = self._clock.now_us()
        for timer, standing_in in batch:
            row = found.get(timer.id)
            if standing_in:
                self._decide_standing_in(timer, row, now_us)
            else:
                self._decide_missed(timer, row, now_us)

    async def _insist(self, ids: list[int]) -> list[Found]:
        while True:
            try:
                return await self._store.look(ids)
            except DelayQError as error:
                log.bind(error=str(error)).warning("look.retry")
            await asyncio.sleep(_RETRY_S)

    def _decide_standing_in(self, timer: Timer, row: Found | None, now_us: int) -> None:
        dispatcher = self._dispatcher
        if row is None or row.state != "pending" or self._holds(timer.id):
            return
        if row.execute_at_us > now_us or dispatcher.free <= 0:
            # moved, or we are busy ourselves: it stays with the understudy
            at_us = max(now_us, row.execute_at_us)
            self._timers.arm(Timer(timer.id, at_us, timer.kind, timer.priority))
            return
        self._counters.understudied += 1
        dispatcher.offer((Timer(timer.id, row.execute_at_us, timer.kind, timer.priority),))

    def _decide_missed(self, timer: Timer, row: Found | None, now_us: int) -> None:
        if row is None or row.state != "pending":
            self._tries.pop(timer.id, None)
            self._dispatcher.forget(timer.id, timer.kind)
        elif row.execute_at_us > now_us:
            self._tries.pop(timer.id, None)
            self._dispatcher.forget(timer.id, timer.kind)
            self._timers.arm(Timer(timer.id, row.execute_at_us, timer.kind, timer.priority))
        else:
            self.try_again(timer)

    def try_again(self, timer: Timer) -> None:
        """Fire it again in a while, here, whatever this node's rank: nobody else may be looking."""
        tries = self._tries.get(timer.id, 0)
        if len(self._tries) > _MOST_TRIES:  # of tasks that others fired in the end
            self._tries.clear()
        self._tries[timer.id] = tries + 1
        wait_us = min(self._longest_us, _AGAIN_FIRST_US << min(tries, 20))
        self._dispatcher.forget(timer.id, timer.kind)
        again = Timer(timer.id, self._clock.now_us() + wait_us, timer.kind, timer.priority)
        self._timers.arm(again, here=True)
