"""Settles leases in batches: while one statement is in flight the next batch gathers.

A settlement is kept until it is durable. What a statement did not answer for is told apart by
looking: settled already (a resent statement after a lost answer), locked by a stranger (tried
again later, without holding up the rest), or lost (somebody else owns the task: nothing is
written). A statement that the server refuses is split until the odd one stands alone. Only if its
own data are refused, twice, does the task end as dead; else it waits like a locked one.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, TypeVar

from delayq.errors import DelayQError
from delayq.failures import blames_the_row, is_worth_splitting
from delayq.lease import Lease, Outcome, Settlement
from delayq.log import hears_debug, log
from delayq.store import Settled

if TYPE_CHECKING:
    from delayq.commons import Commons

T = TypeVar("T")

_BATCH: Final = 500
_SUCCEEDED_BATCH: Final = 2_000
"""Successes carry no errors, and a statement waits five milliseconds for the disk and for the loop
to turn, however many it is about: at 500 they bounded what a node can do."""
_QUEUE_LIMIT: Final = 10_000
"""What has ended and is not durable yet. A burst starts sooner if it may be long, but all of it
runs again after a crash."""
_REOPEN_AT: Final = 19 / 20
"""Callers go on when a little is gone. To let half of it go first held up what became due by
200 ms, and 20,000 leases that come and go were each seen by the garbage collector."""
_LOCKED_FIRST_US: Final = 10_000
_LOCKED_LONGEST_US: Final = 1_000_000
_RETRY_FIRST_S: Final = 0.05
_RETRY_LONGEST_S: Final = 2.0

OnSettled = Callable[[Sequence[tuple[Lease, Settled | None]]], None]
"""Told of leases that are over: with the verdict, or None if the lease was lost."""


class Settler:
    """The settle batches of one incarnation. `run` is its loop; `on_settled` hears of the ends."""

    def __init__(self, commons: Commons, on_settled: OnSettled) -> None:
        self._store = commons.store
        self._clock = commons.clock
        self._counters = commons.counters
        self._errors_kept = commons.settings.errors_kept
        self._on_settled = on_settled
        self._succeeded: deque[Lease] = deque()
        self._others: deque[Settlement] = deque()
        self._locked: list[tuple[int, int, Settlement]] = []  # heap: (when again, token, what)
        self._waits: dict[int, int] = {}  # how long a locked row was waited for last, by id
        self._refused: set[int] = set()  # refused once for its own data
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._in_flight = 0
        self._noted = False  # the loop knows that there is work; spares the hot path the events
        self._resent = False  # the last statement had to be sent more than once

    def __len__(self) -> int:
        return len(self._succeeded) + len(self._others) + len(self._locked) + self._in_flight

    def succeeded(self, lease: Lease) -> None:
        """The hot path: the handler returned."""
        lease.drop_payload()
        self._succeeded.append(lease)
        if not self._noted or len(self._succeeded) > _QUEUE_LIMIT:
            self._note()

    def settle(self, settlement: Settlement) -> None:
        """Any other end of an attempt."""
        settlement.lease.drop_payload()
        self._others.append(settlement)
        self._note()

    async def room(self) -> None:
        """Back-pressure: return once the queue is below its bound."""
        await self._room.wait()

    @property
    def full(self) -> bool:
        """True while callers should wait for `room`."""
        return not self._room.is_set()

    async def flushed(self) -> None:
        """Return when everything is durable (or lost)."""
        await self._empty.wait()

    async def run(self) -> None:
        """Settle until cancelled."""
        while True:
            await self._wait_for_work()
            if self._succeeded:
                await self._settle_succeeded(self._take(self._succeeded, _SUCCEEDED_BATCH))
            self._unlock()
            if self._others:
                await self._settle_others(self._take(self._others, _BATCH))
            self._note_done()

    # --- the queue -------------------------------------------------------------------------

    def _note(self) -> None:
        self._noted = True
        self._work.set()
        self._empty.clear()
        if len(self._succeeded) + len(self._others) > _QUEUE_LIMIT:
            self._room.clear()

    def _note_done(self) -> None:
        if len(self._succeeded) + len(self._others) <= _QUEUE_LIMIT * _REOPEN_AT:
            self._room.set()
        if not len(self):
            self._empty.set()

    async def _wait_for_work(self) -> None:
        if self._succeeded or self._others:
            return
        self._noted = False
        self._work.clear()
        if not self._locked:
            await self._work.wait()
            return
        # locked rows are few and wait for strangers: a coarse timer is good enough
        wait_s = max(0.0, (self._locked[0][0] - self._clock.monotonic_us()) / 1e6)
        try:
            async with asyncio.timeout(wait_s):
                await self._work.wait()
        except TimeoutError:
            pass

    def _take(self, queue: deque[T], limit: int) -> list[T]:
        batch = [queue.popleft() for _ in range(min(limit, len(queue)))]
        self._in_flight += len(batch)
        return batch

    def _unlock(self) -> None:
        """Put locked settlements whose wait is over back into the queue."""
        now_us = self._clock.monotonic_us()
        while self._locked and self._locked[0][0] <= now_us:
            self._others.append(heappop(self._locked)[2])

    # --- statements ------------------------------------------------------------------------

    async def _settle_succeeded(self, leases: list[Lease]) -> None:
        ids = [lease.id for lease in leases]
        tokens = [lease.token for lease in leases]
        lateness = [lease.lateness_us or 0 for lease in leases]
        try:
            settled = await self._insist(
                lambda: self._store.settle_succeeded(ids, tokens, lateness)
            )
        except DelayQError:
            settled = 0
        if settled < len(leases):
            # the general path tells apart what was settled, and splits what is refused
            others = [Settlement(lease, Outcome.SUCCEEDED) for lease in leases]
            for start in range(0, len(others), _BATCH):
                await self._settle_others(others[start : start + _BATCH])
            return
        self._counters.succeeded += settled
        self._in_flight -= settled
        if hears_debug():
            for lease in leases:
                self._tell(lease, "succeeded")
        self._on_settled([(lease, _SUCCEEDED) for lease in leases])

    async def _settle_others(self, batch: list[Settlement]) -> None:
        try:
            rows = await self._insist(lambda: self._send(batch))
        except DelayQError as error:
            await self._split(batch, error)
            return
        await self._account(batch, {row.id: row for row in rows})

    async def _send(self, batch: list[Settlement]) -> list[Settled]:
        return await self._store.settle(
            [s.lease.id for s in batch],
            [s.lease.token for s in batch],
            [s.lease.lateness_us for s in batch],
            [s.outcome.value for s in batch],
            [s.delay_us for s in batch],
            [s.error for s in batch],
            self._errors_kept,
        )

    async def _split(self, batch: list[Settlement], error: DelayQError) -> None:
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._settle_others(batch[:middle])
            await self._settle_others(batch[middle:])
        else:
            await self._refuse(batch[0], error)

    async def _refuse(self, settlement: Settlement, error: DelayQError) -> None:
        lease = settlement.lease
        log.bind(task_id=lease.id, kind=lease.kind, error=str(error)).error("settle.refused")
        if self._may_pass_later(lease, error):
            self._in_flight -= 1
            self._wait_for_lock(settlement)
        elif settlement.outcome is Outcome.DEAD:
            # even the plainest end is refused: let go; the row is found owned and not held
            self._in_flight -= 1
            self._over([(lease, None)])
        else:
            message = f"the outcome could not be stored: {error}"
            reason = json.dumps(
                {"attempt": lease.attempt, "error": type(error).__name__, "message": message}
            )
            await self._settle_others([Settlement(lease, Outcome.DEAD, error=reason)])

    def _may_pass_later(self, lease: Lease, error: DelayQError) -> bool:
        """It is not its own data that are refused, or it is the first time that they are."""
        if not blames_the_row(error):
            return True
        first = lease.id not in self._refused
        self._refused.add(lease.id)
        return first

    async def _account(self, batch: list[Settlement], answers: dict[int, Settled]) -> None:
        over: list[tuple[Lease, Settled | None]] = []
        unanswered = []
        for settlement in batch:
            answer = answers.get(settlement.lease.id)
            if answer is None:
                unanswered.append(settlement)
            else:
                self._count(answer.verdict)
                self._tell(settlement.lease, answer.verdict)
                over.append((settlement.lease, answer))
        if unanswered:
            over += await self._tell_apart(unanswered)
        self._in_flight -= len(batch)
        self._over(over)

    def _over(self, ends: list[tuple[Lease, Settled | None]]) -> None:
        for lease, _ in ends:
            self._waits.pop(lease.id, None)
            self._refused.discard(lease.id)
        self._on_settled(ends)

    async def _tell_apart(self, batch: list[Settlement]) -> list[tuple[Lease, Settled | None]]:
        resent = self._resent
        found = await self._look(batch)
        over: list[tuple[Lease, Settled | None]] = []
        for settlement in batch:
            lease = settlement.lease
            match found.get(lease.id, "lost"):
                case "running":
                    self._wait_for_lock(settlement)
                case "lost" if resent and settlement.outcome in _GO_BACK:
                    # it finds its own first try: pending again, token gone; the hint has armed it
                    over.append((lease, None))
                case "lost":
                    self._counters.leases_lost += 1
                    log.bind(task_id=lease.id, kind=lease.kind, attempt=lease.attempt,
                             node=self._store.incarnation).warning("lease.lost")  # fmt: skip
                    over.append((lease, None))
                case verdict:  # settled already, perhaps otherwise than was asked
                    self._count(verdict)
                    self._tell(lease, verdict)
                    over.append((lease, Settled(lease.id, verdict, None)))
        return over

    async def _look(self, batch: list[Settlement]) -> dict[int, str]:
        """What became of these, by id. One that cannot be looked at is sent again, as if locked."""
        ids = [s.lease.id for s in batch]
        tokens = [s.lease.token for s in batch]
        try:
            return await self._insist(lambda: self._store.tell_apart(ids, tokens))
        except DelayQError as error:
            log.bind(error=str(error), count=len(batch)).error("settle.look_refused")
        if len(batch) == 1:
            return {ids[0]: "running"}
        middle = len(batch) // 2
        return await self._look(batch[:middle]) | await self._look(batch[middle:])

    def _wait_for_lock(self, settlement: Settlement) -> None:
        waited_us = self._waits.get(settlement.lease.id, 0)
        wait_us = min(_LOCKED_LONGEST_US, max(_LOCKED_FIRST_US, 2 * waited_us))
        self._waits[settlement.lease.id] = wait_us
        again_us = self._clock.monotonic_us() + wait_us
        heappush(self._locked, (again_us, settlement.lease.token, settlement))

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer, however often the database has to be asked.

        Raised is what may be about one row. All else is the database, the role, the password or
        the schema: an outcome is kept until that is mended, and nobody's task ends for it.
        """
        self._resent = False
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                return await call()
            except DelayQError as error:
                if is_worth_splitting(error):
                    raise
                self._resent = True
                log.bind(error=str(error)).warning("settle.retry")
            await asyncio.sleep(wait_s)
            wait_s = min(_RETRY_LONGEST_S, 2 * wait_s)

    def _tell(self, lease: Lease, verdict: str) -> None:
        log.log(
            _LEVEL.get(verdict, "DEBUG"),
            _EVENT.get(verdict, "task.pending_again"),
            task_id=lease.id,
            kind=lease.kind,
            attempt=lease.attempt,
            node=self._store.incarnation,
            lateness_ms=(lease.lateness_us or 0) / 1000,
        )

    def _count(self, verdict: str) -> None:
        name = _COUNTER.get(verdict)
        if name is not None:
            setattr(self._counters, name, getattr(self._counters, name) + 1)


_SUCCEEDED: Final = Settled(0, "succeeded", None)
_LEVEL: Final = {"dead": "WARNING", "missed": "WARNING", "cancelled": "INFO"}
_EVENT: Final = {
    "succeeded": "task.succeeded",
    "cancelled": "task.cancelled",
    "missed": "task.missed",
    "dead": "task.dead",
}
_GO_BACK: Final = (Outcome.RETRY, Outcome.SNOOZE, Outcome.RELEASE, Outcome.UNSTARTED)
_COUNTER: Final = {
    "succeeded": "succeeded",
    "cancelled": "cancelled",
    "missed": "missed",
    "dead": "dead",
    "retry": "retried",
    "snooze": "snoozed",
    "release": "released",
    "unstarted": "released",
}
