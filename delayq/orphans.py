"""Adoption: running tasks whose node is dead, and leases that nobody remembers.

Only tasks of nodes that are marked dead, or have no row, are taken over; a live owner's only
long past the task's own deadline. A row that this node owns and does not hold (a lease whose
answer was lost) is released when it is seen a second time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from delayq.errors import DelayQError
from delayq.failures import is_worth_splitting
from delayq.lease import Outcome
from delayq.log import log
from delayq.ranks import BUCKETS
from delayq.store import RunningRow, Settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from delayq.commons import Commons

_PAGE: Final = 1_000
_LOWEST_ID: Final = -(1 << 63)
_NARROW: Final = 16
_SLOW_US: Final = 100_000
_QUICK_US: Final = 25_000
"""A page that takes longer, or less long, makes the next one read fewer or more buckets."""
_AHEAD_US: Final = 1_000_000
"""What may have been leased already, by a clock that is known a little late."""
_COME_BACK_S: Final = (0.1, 0.3, 1.0, 2.0)
"""A session that was just ended lets go of its locks in a moment; a minute would be too late."""


class Orphanage:
    """The look at all running rows: once a minute, and whenever a node was buried."""

    def __init__(
        self,
        commons: Commons,
        holds: Callable[[int], bool],
        adopted: Callable[[list[Settled]], None],
    ) -> None:
        self._store = commons.store
        self._monotonic_us = commons.clock.monotonic_us
        self._clock = commons.database_clock
        self._counters = commons.counters
        self._overdue_us = round(2 * commons.settings.beat_interval_s * 1e6)
        self._holds = holds
        self._adopted = adopted
        self._suspects: dict[int, int] = {}  # id -> token, of ours and not held
        self._width = _NARROW
        self._latest_us = 0
        self._heard: deque[int] = deque()
        self._clock.on_step.append(self._hear_step)
        self.alive: frozenset[int] = frozenset()
        self.dead: tuple[int, ...] = ()

    def reach(self, until_us: int) -> None:
        """Tasks that were due up to then may be running, whatever the time is now."""
        self._heard.append(until_us)

    def _hear_step(self, change_us: int) -> None:
        """After a step back what runs is due in the future. Told in the beat's thread."""
        self.reach(self._clock.now_us() - change_us + _AHEAD_US)

    async def check(self) -> None:
        """One pass over every running row."""
        orphans: list[int] = []
        suspects: dict[int, int] = {}
        owners: set[int] = set()
        dead = self.dead
        latest_us = 0
        async for rows in self._running(self._until_us()):
            now_us = self._clock.now_us()
            for row in rows:
                self._sort_out(row, now_us, orphans, suspects)
                owners.add(row.owner)
                latest_us = max(latest_us, row.execute_at_us)
        self._latest_us = latest_us  # what is leased from now on is due by now
        left = await self._adopt(orphans)
        await self._release(suspects)
        gone = [node for node in dead if node not in owners]
        if gone:
            await self._store.forget(gone)
        for wait_s in _COME_BACK_S:
            if not left:
                break
            await asyncio.sleep(wait_s)
            left = await self._adopt(left)

    def _until_us(self) -> int:
        while self._heard:
            self._latest_us = max(self._latest_us, self._heard.popleft())
        return max(self._clock.now_us() + _AHEAD_US, self._latest_us)

    async def _running(self, until_us: int) -> AsyncIterator[list[RunningRow]]:
        """All running rows, page by page; with a backlog each reads but a few buckets."""
        after = (0, _LOWEST_ID)
        while after[0] < BUCKETS:
            until = min(BUCKETS, after[0] + self._width) - 1
            sent_us = self._monotonic_us()
            rows = await self._store.running(after, until, until_us, _PAGE)
            took_us = self._monotonic_us() - sent_us
            if took_us > _SLOW_US:
                self._width = max(1, self._width * _SLOW_US // took_us)
            elif took_us < _QUICK_US:
                self._width = min(BUCKETS, self._width * 2)
            yield rows
            full = len(rows) == _PAGE
            after = (rows[-1].bucket, rows[-1].id) if full else (until + 1, _LOWEST_ID)

    def _sort_out(
        self, row: RunningRow, now_us: int, orphans: list[int], suspects: dict[int, int]
    ) -> None:
        if row.owner == self._store.incarnation:
            if not self._holds(row.id):
                suspects[row.id] = row.token
        elif row.owner not in self.alive or row.deadline_us < now_us - self._overdue_us:
            orphans.append(row.id)

    async def _adopt(self, orphans: list[int]) -> list[int]:
        """The statement judges again. Those that it left: locked, or not orphans after all."""
        adopted: list[Settled] = []
        for start in range(0, len(orphans), _PAGE):
            adopted += await self._adopt_batch(orphans[start : start + _PAGE])
        if adopted:
            self._counters.adopted += len(adopted)
            log.bind(count=len(adopted), node=self._store.incarnation).warning("tasks.adopted")
            self._adopted(adopted)
        done = {row.id for row in adopted}
        return [task_id for task_id in orphans if task_id not in done]

    async def _adopt_batch(self, batch: list[int]) -> list[Settled]:
        """Adopt; a batch that is refused for a row in it is halved until that row stands alone."""
        try:
            return await self._store.adopt(batch, self._overdue_us)
        except DelayQError as error:
            if not is_worth_splitting(error):
                raise
            if len(batch) == 1:
                log.bind(task_id=batch[0], error=str(error)).error("adopt.refused")
                return []
        middle = len(batch) // 2
        return await self._adopt_batch(batch[:middle]) + await self._adopt_batch(batch[middle:])

    async def _release(self, suspects: dict[int, int]) -> None:
        twice = [
            (task_id, token)
            for task_id, token in suspects.items()
            if self._suspects.get(task_id) == token and not self._holds(task_id)
        ]
        self._suspects = suspects
        if not twice:
            return
        log.bind(count=len(twice), node=self._store.incarnation).warning("leases.forgotten")
        nothing: list[None] = [None] * len(twice)
        released = await self._store.settle(
            [task_id for task_id, _ in twice],
            [token for _, token in twice],
            list(nothing),
            [Outcome.UNSTARTED.value] * len(twice),
            list(nothing),
            list(nothing),
            5,
        )
        self._adopted(released)
