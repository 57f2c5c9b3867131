"""From due timers to running handlers: the ready queue, lease batches, and the start at T.

While one lease statement is in flight the next batch gathers; there are no timers in between, so
one task alone is not delayed and ten thousand are cheap. Ids that a lease did not return are
looked at once: not quite due or locked means another try, moved means a new instant, else they
are forgotten.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

from delayq.alarm import Alarm
from delayq.errors import DelayQError
from delayq.failures import blames_the_row, is_transient, is_worth_splitting
from delayq.lease import Lease, Outcome, Settlement
from delayq.log import Recurring, log
from delayq.pace import Pace
from delayq.ready_queue import FRESH_US, Admission, ReadyQueue
from delayq.store import LeaseTerms, Settled
from delayq.timer_heap import Timer

if TYPE_CHECKING:
    import asyncpg

    from delayq.commons import Commons
    from delayq.executor import Executor
    from delayq.handlers import AnyHandler
    from delayq.holdings import Holdings
    from delayq.lookout import Lookout
    from delayq.settler import Settler
    from delayq.worker_pool import WorkerPool

_BATCH: Final = 500
_INLINE_BYTES: Final = 16 * 1024
_ANSWER_BYTES: Final = 1024 * 1024
"""What one lease may return in payloads; a frozen client must not block the server's sender."""
_RETRY_S: Final = 0.2
_READY_LOW: Final = 1_000


class _Timers(Protocol):
    """What the dispatcher needs from the timers, which stand above it."""

    def arm(self, timer: Timer) -> None: ...
    def refill(self) -> None: ...


class Dispatcher:
    """The lease loop of one incarnation. It is connected before it runs."""

    hungry = False
    """more can be read when a worker is free; the timer manager says so"""

    def __init__(
        self,
        commons: Commons,
        holdings: Holdings,
        handlers: Mapping[str, AnyHandler],
        executor: Executor,
        settler: Settler,
        pool: WorkerPool[Lease],
        may_fire: Callable[[], bool],
    ) -> None:
        self._store = commons.store
        self._clock = commons.clock
        self._database_clock = commons.database_clock
        self._counters = commons.counters
        self._holdings = holdings
        self._handlers = handlers
        self._executor = executor
        self._settler = settler
        self._pool = pool
        self._may_fire = may_fire
        self._terms = _terms(handlers)
        self._admission = Admission(_limits(handlers, commons.settings.threads))
        self.ready = ReadyQueue(self._admission)
        self.paused: frozenset[str] = frozenset()
        self.lookout: Lookout  # see `connect`
        self._timers: _Timers
        self._stopped = False
        self._wake = asyncio.Event()
        self._starving = False
        self._leasing = asyncio.Lock()
        self._gate: list[tuple[int, int, Lease]] = []
        self._gate_alarm = Alarm(commons.database_clock, self._open_gate)
        self._pace = Pace(commons.clock)
        self._refusals = Recurring("lease.refused")

    def connect(self, timers: _Timers, lookout: Lookout) -> None:
        """Close the circle, once: both of them offer to this dispatcher, and are made after it."""
        self._timers = timers
        self.lookout = lookout

    # --- what others say to it ---------------------------------------------------------------

    def offer(self, timers: Iterable[Timer]) -> None:
        """These have come due (or will within the lease-ahead)."""
        fresh = self._holdings.take(timers)
        if fresh:
            self.ready.push(fresh, self._database_clock.now_us())
            self._wake.set()

    def over(self, lease: Lease) -> None:
        """A lease has ended without a settlement of ours."""
        self._holdings.end((lease.id,))
        self._make_way(lease.kind)

    def settled(self, ends: Sequence[tuple[Lease, Settled | None]]) -> None:
        """Settlements are durable; those that are pending again are armed anew."""
        self._holdings.end([lease.id for lease, _ in ends])
        for lease, answer in ends:
            if answer is not None and answer.execute_at_us is not None:
                timer = Timer(lease.id, answer.execute_at_us, lease.kind, lease.priority)
                self._timers.arm(timer)
        if self._admission.limited:
            now_us = self._database_clock.now_us()
            for lease, _ in ends:
                self.ready.release(lease.kind, now_us)
            self._wake.set()

    def wake(self) -> None:
        """A worker is free; called after every task, so it does next to nothing."""
        if self._starving:
            self._starving = False
            self._wake.set()

    @property
    def idle(self) -> bool:
        """Nothing is due here and a worker is free."""
        return not self.ready.takeable and self.free > 0

    @property
    def free(self) -> int:
        """How many workers neither run nor are spoken for; may be negative."""
        return self._pool.free - self.ready.takeable

    @property
    def ahead_us(self) -> int:
        """How long before T a lease is sent: the median round trip of a small one, bounded."""
        return self._pace.trip_us

    def stop(self) -> list[Lease]:
        """Fire nothing from now on; returns what was leased and not started."""
        self._stopped = True
        return self.withdraw()

    def withdraw(self) -> list[Lease]:
        """Take back what was leased and not started."""
        self._gate_alarm.clear()
        waiting = [lease for _, _, lease in self._gate] + self._pool.withdraw()
        self._gate.clear()
        return waiting

    async def at_rest(self) -> None:
        """Return when no lease statement is in flight."""
        async with self._leasing:
            pass

    # --- the lease loop ----------------------------------------------------------------------

    async def run(self) -> None:
        """Lease batches until cancelled."""
        while True:
            count = self._capacity()
            timers = self._take(count) if count > 0 and self._may_fire() else []
            if self.ready.takeable < _READY_LOW:
                self._timers.refill()
            if timers:
                async with self._leasing:
                    await self._lease(timers)
                continue
            self._wake.clear()
            # looked at again after the clear: what came in between must not be slept over
            if not (self.ready.takeable and self._capacity() > 0 and self._may_fire()):
                await self._wait()

    def _take(self, count: int) -> list[Timer]:
        timers = self.ready.take(count)
        if self.ready.dropped:
            dropped, self.ready.dropped = self.ready.dropped, []
            self._holdings.let_go([timer.id for timer in dropped])
        if self.paused and any(timer.kind in self.paused for timer in timers):
            # forgotten: the window is read again when the kind is resumed
            for timer in timers:
                if timer.kind in self.paused:
                    self.forget(timer.id, timer.kind)
            timers = [timer for timer in timers if timer.kind not in self.paused]
        return timers

    async def _wait(self) -> None:
        if self.ready.takeable and not self._may_fire():
            await asyncio.sleep(_RETRY_S)
            return
        self._starving = self.ready.takeable > 0 or self.hungry
        await self._wake.wait()
        self._starving = False

    def _capacity(self) -> int:
        if self._stopped:
            return 0
        free = self._pool.free - len(self._gate)
        return min(_BATCH, free + self._pace.allowance(self._pool.finished))

    async def _lease(self, timers: list[Timer], *, again: bool = False) -> None:
        # not `random`: an application may have seeded it, and so all its nodes alike
        nonce = secrets.randbits(63) - (1 << 62)
        ids = [timer.id for timer in timers]
        inline = min(_INLINE_BYTES, _ANSWER_BYTES // len(ids))
        sent_us = self._clock.monotonic_us()
        try:
            rows = await self._store.lease(ids, nonce, self._terms, self.ahead_us, inline)
        except DelayQError as error:
            if is_transient(error):
                await self._find_out(timers, nonce, error)
            elif is_worth_splitting(error):
                await self._split(timers, error, again)
            else:
                self._put_off(timers, error)
            return
        received_us = self._clock.monotonic_us()
        self._pace.leased(len(ids), received_us - sent_us)
        if rows and (leased_us := rows[0]["leased_at"]) is not None:
            # the lease's own instant: what it returns is started by it, not by an old idea of now
            self._database_clock.observe(leased_us, sent_us, received_us)
        self._counters.leased += len(ids)
        self._start(rows, timers)
        if len(rows) < len(timers):
            self._missed(timers, {row[0] for row in rows})

    def _start(self, rows: Sequence[asyncpg.Record], timers: Sequence[Timer]) -> None:
        handlers, executor = self._handlers, self._executor
        leases = [Lease(row, handlers[row[2]], executor) for row in rows]
        if self._admission.limited or self.paused:
            leases = self._admitted(leases, timers)
        if self._stopped or not self._may_fire():  # it drains, or was fenced, meanwhile
            self._give_back(leases)
            return
        self.lookout.leased(leases)
        if not self._pool.queued:
            self._pace.progress(self._pool.finished)
        now_us = self._database_clock.now_us()
        fresh_us = now_us - FRESH_US
        for lease in leases:
            execute_us = lease.execute_us
            if execute_us > now_us:
                heappush(self._gate, (execute_us, lease.id, lease))
            else:
                self._pool.submit(lease, ahead=execute_us >= fresh_us)
        if self._gate:
            self._gate_alarm.set(self._gate[0][0])

    def _admitted(self, leases: list[Lease], timers: Sequence[Timer]) -> list[Lease]:
        """Those that are of the kind that was let through; others go back, and through it again.

        A hint may lie, and a row may be changed by hand.
        """
        let_through = {timer.id: timer.kind for timer in timers}
        others = [lease for lease in leases if lease.kind != let_through[lease.id]]
        if not others:
            return leases
        for lease in others:
            self.ready.release(let_through[lease.id], self._database_clock.now_us())
            self._admission.count(lease.kind)  # until it is settled
        self._give_back(others)
        return [lease for lease in leases if lease.kind == let_through[lease.id]]

    def _give_back(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._settler.settle(Settlement(lease, Outcome.UNSTARTED))

    def release_stuck(self) -> None:
        """Give back leased tasks that wait while no handler ends."""
        if not self._pool.queued:
            return
        if self._pace.stands_still(self._pool.finished):
            self._give_back(self._pool.withdraw())

    # --- the start at T ------------------------------------------------------------------------

    def _open_gate(self) -> None:
        now_us = self._database_clock.now_us()
        while self._gate and self._gate[0][0] <= now_us:
            self._pool.submit(heappop(self._gate)[2])
        if self._gate:
            self._gate_alarm.set(self._gate[0][0])

    # --- leases that went wrong ----------------------------------------------------------------

    async def _find_out(self, timers: list[Timer], nonce: int, error: DelayQError) -> None:
        """The answer was lost: what the nonce holds is given back, the rest is looked at."""
        log.bind(error=str(error), count=len(timers)).warning("lease.unknown")
        ids = [timer.id for timer in timers]
        while True:
            await asyncio.sleep(_RETRY_S)
            try:
                held = await self._store.holds(ids, nonce)
                if held:
                    await self._store.settle(
                        [task_id for task_id, _ in held],
                        [token for _, token in held],
                        [None] * len(held),
                        [Outcome.UNSTARTED.value] * len(held),
                        [None] * len(held),
                        [None] * len(held),
                        5,
                    )
            except DelayQError as refused:
                if is_transient(refused):
                    continue
                # what it holds, if anything, is found owned and not held by the orphan check
                log.bind(error=str(refused)).error("lease.not_given_back")
            break
        self._missed(timers, set())

    def _put_off(self, timers: list[Timer], error: DelayQError) -> None:
        """No task is to blame for it: all are leased again later."""
        self._refusals.tell(self._clock.monotonic_us(), error=str(error), count=len(timers))
        for timer in timers:
            self.lookout.try_again(timer)

    async def _split(self, timers: list[Timer], error: DelayQError, again: bool) -> None:
        """One row may fail the whole batch: halve until it stands alone.

        It is set aside if its own data are refused, and a second time too; else put off.
        """
        if len(timers) > 1:
            middle = len(timers) // 2
            await self._lease(timers[:middle])
            await self._lease(timers[middle:])
        elif not blames_the_row(error):
            self._put_off(timers, error)
        elif not again:
            await self._lease(timers, again=True)
        else:
            await self._set_aside(timers[0], error)

    async def _set_aside(self, timer: Timer, error: DelayQError) -> None:
        reason = json.dumps(
            {"error": type(error).__name__, "message": f"the lease was refused: {error}"}
        )
        log.bind(task_id=timer.id, kind=timer.kind, error=str(error)).error("task.set_aside")
        try:
            if await self._store.set_aside(timer.id, reason):
                self._counters.dead += 1
        except DelayQError as refused:
            log.bind(task_id=timer.id, error=str(refused)).error("task.set_aside_failed")
            self.lookout.try_again(timer)
            return
        self.forget(timer.id, timer.kind)

    def _missed(self, timers: Iterable[Timer], leased: set[int]) -> None:
        missing = [timer for timer in timers if timer.id not in leased]
        self._counters.missed_leases += len(missing)
        self.lookout.missed(missing)

    # --- bookkeeping -----------------------------------------------------------------------------

    def forget(self, task_id: int, kind: str) -> None:
        """It is not ours to fire (any more)."""
        self._holdings.let_go((task_id,))
        self._make_way(kind)

    def _make_way(self, kind: str) -> None:
        """A task that was admitted is over: others of its kind may have waited for its place."""
        if self._admission.limited:
            self.ready.release(kind, self._database_clock.now_us())
        self._wake.set()


def _limits(
    handlers: Mapping[str, AnyHandler], threads: int
) -> dict[str, tuple[tuple[str, int], ...]]:
    limits: dict[str, tuple[tuple[str, int], ...]] = {}
    for kind, handler in handlers.items():
        groups: list[tuple[str, int]] = []
        if handler.policy.max_concurrency is not None:
            groups.append((f"kind {handler.kind}", handler.policy.max_concurrency))
        if not handler.is_async:
            groups.append(("threads", threads))
        if groups:
            limits[kind] = tuple(groups)
    return limits


def _terms(handlers: Mapping[str, AnyHandler]) -> LeaseTerms:
    kinds = sorted(handlers)
    policies = [handlers[kind].policy for kind in kinds]
    return LeaseTerms(
        kinds=kinds,
        max_attempts=[policy.max_attempts for policy in policies],
        timeouts_ms=[policy.timeout_ms for policy in policies],
        deadlines=[handlers[kind].is_async for kind in kinds],
        with_grace=[kind for kind in kinds if handlers[kind].policy.misfire_grace_ms is not None],
    )
