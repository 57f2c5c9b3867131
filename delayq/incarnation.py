"""One life of a node: assembles the actors, takes a share of the tasks, hands it over, leaves.

A node that was buried comes back as another incarnation, with a number, sessions and leases of
its own; nothing of the old one is carried over.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeVar

from delayq.clock import Clock, DatabaseClock
from delayq.commons import Commons
from delayq.database import is_transient
from delayq.dispatcher import Dispatcher
from delayq.effects import Effects
from delayq.errors import DatabaseError, DelayQError, InvalidSettings
from delayq.executor import Executor
from delayq.lease import Interruption, Lease, Outcome, Settlement
from delayq.listener import Hearers, Listener
from delayq.log import log
from delayq.maintenance import Maintenance
from delayq.membership import Membership, News, Witnesses
from delayq.metrics import Counters
from delayq.model import NodeState
from delayq.orphans import Orphanage
from delayq.ranks import ranks
from delayq.settler import Settler
from delayq.store import Settled, Store
from delayq.threads import Threads
from delayq.timer_manager import TimerManager
from delayq.timers import Timers
from delayq.upkeep import Upkeep
from delayq.version import VERSION
from delayq.worker_pool import WorkerPool

if TYPE_CHECKING:
    from delayq.database import Database
    from delayq.handlers import AnyHandler, Registry
    from delayq.settings import Settings

T = TypeVar("T")

_ORPHANS_S: Final = 60.0
_UPKEEP_S: Final = 600.0
_STUCK_CHECK_S: Final = 0.05
_BOUND_S: Final = 10.0
"""Each step of leaving that needs the database gets so long."""
_CANCEL_GRACE_S: Final = 5.0
_STOP_GRACE_S: Final = 0.5
"""Told to stop at once, each step of leaving gets so long."""
_PARTING_S: Final = 2.0
"""So long a node that leaves something behind tries to say so."""
_JOIN_S: Final = 5.0
"""Steps of joining that fail in passing are tried again for so long."""
_HINT_SHARE: Final = 3


class Incarnation:
    """One life: `run` returns when it is over; `buried` tells whether by its peers."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        settings: Settings,
        clock: Clock,
        kinds: Iterable[str],
    ) -> None:
        self.id = random.SystemRandom().randrange(1, 1 << 62)
        self.counters = Counters()
        self.buried = False
        self.active = asyncio.Event()
        self._settings = settings
        self._kinds = sorted(kinds)
        self._clock = clock
        self._drain = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._handed_over = False
        self._news: News | None = None
        self._news_came = asyncio.Event()
        self._first_news = asyncio.Event()
        self._listening = asyncio.Event()
        self._listens_late = False
        self._doubted_us: int | None = None
        self._scan_from_us: int | None = None
        self._assemble(database, {kind: registry[kind] for kind in self._kinds})

    def _assemble(self, database: Database, handlers: dict[str, AnyHandler]) -> None:
        settings = self._settings
        self._store = Store(database, self.id)
        self._database_clock = DatabaseClock(self._clock)
        commons = Commons(self._store, self._clock, self._database_clock, self.counters, settings)
        self._effects = Effects(database, self.id, settings.effect_connections)
        self._threads = Threads(settings.threads)
        self._membership = Membership(
            commons,
            database,
            Witnesses(self._hear_news, self._hear_burial, self._fence, self._hear_burials),
        )
        # Work goes round: dispatcher -> pool -> executor -> settler -> dispatcher. The first two
        # are reached by name, since they do not exist yet when those behind them are made.
        self._settler = Settler(commons, self._settled)
        self._executor = Executor(commons, self._settler, self._effects, self._threads, self._over)
        self._pool: WorkerPool[Lease] = WorkerPool(
            self._executor.run,
            min_workers=settings.min_workers,
            max_workers=settings.max_workers,
            idle_s=settings.worker_idle_s,
            on_free=self._free,
            on_crash=self._crashed,
        )
        self._dispatcher = Dispatcher(
            commons, handlers, self._executor, self._settler, self._pool, self._membership.may_fire
        )
        self._timers = Timers(commons, self._dispatcher)
        self._manager = TimerManager(
            commons, self._timers, self._dispatcher, self._executor, self._kinds
        )
        self._dispatcher.refill = self._timers.refill
        self._dispatcher.rearm = self._timers.arm
        self._orphans = Orphanage(
            commons, self._dispatcher.held.__contains__, lambda _adopted: self._scan_soon(0)
        )
        self._listener = Listener(
            database,
            self.id,
            Hearers(
                due=self._timers.hear,
                scan=self._scan_soon,
                garbled=self._hear_garbled,
                cancel=lambda task_id: self._executor.request_cancel([task_id]),
                membership=self._hear_membership,
                kind=self._membership.beat_soon,
                listening=self._hear_listening,
            ),
        )
        self._maintenance = Maintenance(self._clock)
        self._upkeep = Upkeep(commons)

    def _settled(self, ends: Sequence[tuple[Lease, Settled | None]]) -> None:
        self._dispatcher.settled(ends)

    def _over(self, lease: Lease) -> None:
        self._dispatcher.over(lease)

    def _free(self) -> None:
        self._dispatcher.wake()

    # --- life --------------------------------------------------------------------------------

    def request_drain(self) -> None:
        """Stop firing, finish what runs, hand over, leave."""
        self._drain.set()

    def request_stop(self) -> None:
        """Leave at once: cancel what runs, and release it."""
        self._drain.set()
        self._stop_now.set()

    async def run(self) -> None:
        """Join, fire until asked to drain or buried, leave.

        Raises `DelayQError` if the node cannot start.
        """
        try:
            await self._join()
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop()) for loop in self._loops()]
                await self._drain.wait()
                if self.buried:
                    self._abandon()
                else:
                    await self._hand_over()
                for task in loops:
                    task.cancel()
        finally:
            await self._leave()

    def _loops(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        return [
            self._dispatcher.run,
            self._dispatcher.lookout.run,
            self._settler.run,
            self._executor.watch,
            self._manager.keep_loaded,
            self._listener.run,
            self._follow_news,
            self._watch_stuck,
            self._become_active,
        ]

    async def _join(self) -> None:
        settings = self._settings
        await self._retried("connect", self._store.open)
        horizon_us = await self._retried("horizon", self._store.hint_horizon_us)
        if settings.sweep_interval_s * 1e6 * _HINT_SHARE > horizon_us:
            raise InvalidSettings(
                f"DELAYQ_SWEEP_INTERVAL_S must be at most {horizon_us / 1e6 / _HINT_SHARE:g}: a "
                "third of the database's hint horizon (delayq.hint_horizon()), or tasks would "
                "be found too late"
            )
        # many nodes may start at once: they get in each other's way here, and only here
        await self._retried("partitions", self._upkeep.make_partitions)
        await self._retried("clock", self._see_time)
        sent_boot_us = self._clock.boottime_us()
        await self._retried("register", self._register)
        self._membership.registered(sent_boot_us)
        self._membership.start()
        self._pool.open()

    async def _see_time(self) -> None:
        sent_us = self._clock.monotonic_us()
        database_us = await self._store.clock_us()
        self._database_clock.observe(database_us, sent_us, self._clock.monotonic_us())

    async def _register(self) -> None:
        settings = self._settings
        await self._store.register(
            settings.node_name, socket.gethostname(), os.getpid(), VERSION, self._kinds,
            round(settings.lease_ttl_s * 1000),
        )  # fmt: skip

    async def _become_active(self) -> None:
        """Listen first, load the window, then take a share."""
        await self._first_news.wait()
        try:
            async with asyncio.timeout(_BOUND_S):
                await self._listening.wait()
        except TimeoutError:
            self._listens_late = True
            log.warning("listen.late")  # hints only: the sweeps find everything
        await self._insist("rank", self._take_up)
        if await self._insist("activate", self._store.activate):
            log.bind(node=self.id, kinds=len(self._kinds)).info("node.active")
        self._membership.beat_soon()
        self._start_jobs()
        self.active.set()

    def _start_jobs(self) -> None:
        settings = self._settings
        self._maintenance.add("sweep", self._manager.sweep, settings.sweep_interval_s)
        minute = min(_ORPHANS_S, 4 * settings.lease_ttl_s)
        self._maintenance.add("orphans", self._orphans.check, minute)
        self._maintenance.add("full_scan", self._manager.full_scan, minute)
        self._maintenance.add("upkeep", self._upkeep.run, _UPKEEP_S)
        self._maintenance.start()
        self._maintenance.run_now("orphans")  # whoever buried a node may have died before adopting

    async def _hand_over(self) -> None:
        """Peers take over at once; what runs may finish; nothing new starts."""
        settings = self._settings
        log.bind(node=self.id, running=len(self._executor.running)).info("node.draining")
        self._timers.stop()
        for lease in self._dispatcher.stop():
            self._settler.settle(Settlement(lease, Outcome.UNSTARTED))
        await self._bounded("drain", self._store.drain())
        # a lease in flight comes back to a dispatcher that has stopped, and is given back
        await self._patiently(self._dispatcher.at_rest, _BOUND_S)
        await self._stopped_or(self._executor.idle(), settings.drain_timeout_s)
        self._executor.stop(Interruption.SHUTDOWN)
        await self._patiently(self._executor.idle, _CANCEL_GRACE_S)
        for lease in self._executor.abandon():  # they ignore their cancellation
            self._settler.settle(Settlement(lease, Outcome.RELEASE))
        # a lease of which nothing is known is not handed over, whatever else is
        rested = await self._within(self._dispatcher.at_rest(), _STOP_GRACE_S)
        self._handed_over = await self._patiently(self._settler.flushed, _BOUND_S) and rested

    def _abandon(self) -> None:
        """Buried: nothing is ours any more."""
        log.bind(node=self.id).error("node.was_buried")
        self._timers.stop()
        self._dispatcher.stop()
        self._executor.stop(Interruption.LOST)

    async def _leave(self) -> None:
        """Whatever fails on the way, and however often this is cancelled, each step is taken."""
        self._timers.stop()
        async with AsyncExitStack() as steps:  # from the last to the first
            steps.callback(self._tell_left)
            steps.push_async_callback(self._store.aclose)
            steps.push_async_callback(self._effects.aclose)
            steps.callback(self._threads.close)
            steps.push_async_callback(self._take_leave)
            steps.push_async_callback(self._membership.stop)
            steps.push_async_callback(self._executor.aclose)
            steps.push_async_callback(self._pool.aclose)
            steps.push_async_callback(self._maintenance.stop)

    def _tell_left(self) -> None:
        log.bind(node=self.id).info("node.left")

    async def _take_leave(self) -> None:
        if not self._membership.started:
            return
        if not self._handed_over:
            # a lease that is still on its way must not commit after everybody has looked
            await self._bounded("end_sessions", self._store.end_sessions(), _PARTING_S)
        seconds = _BOUND_S if self._handed_over else _PARTING_S
        await self._bounded("leave", self._store.leave(self._handed_over), seconds)

    async def _stopped_or(self, wait: Awaitable[None], seconds: float) -> None:
        """Wait for it, for so long at the most, or until told to stop at once."""
        waiting = [asyncio.ensure_future(wait), asyncio.ensure_future(self._stop_now.wait())]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _patiently(self, wait: Callable[[], Awaitable[None]], seconds: float) -> bool:
        """Wait so long, or from when told to stop at once half a second. False: in vain."""
        await self._stopped_or(wait(), seconds)
        return await self._within(wait(), _STOP_GRACE_S)

    async def _within(self, wait: Awaitable[None], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await wait
        except TimeoutError:
            log.bind(node=self.id, waited_s=seconds).warning("node.left_behind")
            return False
        return True

    async def _bounded(self, step: str, call: Awaitable[None], seconds: float = _BOUND_S) -> None:
        try:
            async with asyncio.timeout(_STOP_GRACE_S if self._stop_now.is_set() else seconds):
                await call
        except (DelayQError, TimeoutError) as error:
            # peers will find out by themselves, one TTL later
            log.bind(step=step, error=str(error)).warning("node.step_failed")

    async def _retried(self, step: str, call: Callable[[], Awaitable[T]]) -> T:
        """Again for a few seconds, as long as what is in the way may pass."""
        until_us = self._clock.monotonic_us() + round(_JOIN_S * 1e6)
        wait_s = 0.1
        while True:
            try:
                return await call()
            except DelayQError as error:
                late = self._clock.monotonic_us() >= until_us
                if late or self._drain.is_set() or not is_transient(error):
                    raise
                log.bind(step=step, error=str(error)).warning("node.step_retry")
            await asyncio.sleep(wait_s * (0.5 + random.random()))
            wait_s = min(1.0, 2 * wait_s)

    async def _insist(self, step: str, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except DelayQError as error:
                if not (isinstance(error, DatabaseError) or is_transient(error)):
                    raise
                log.bind(step=step, error=str(error)).warning("node.step_retry")
                await asyncio.sleep(0.5)

    # --- news --------------------------------------------------------------------------------

    def _hear_news(self, news: News) -> None:
        if self._news is None:
            # the clock may have been set back before this node came
            self._orphans.reach(news.latest_us)
        self._news = news
        self._news_came.set()
        self._first_news.set()
        gone = self._orphans.alive - news.nodes or set(news.dead) - set(self._orphans.dead)
        self._orphans.alive = news.nodes
        self._orphans.dead = news.dead
        if gone:
            self._maintenance.run_now("orphans")  # it may have left something
        self._maintenance.check_wall_clock()
        if news.state is NodeState.DRAINING:
            self._drain.set()

    def _hear_burial(self) -> None:
        self.buried = True
        self._drain.set()

    def _fence(self) -> None:
        """Peers may take this node for dead: end what runs. It is released if it is still ours."""
        self._executor.interrupt_running(Interruption.FENCED)
        for lease in self._dispatcher.withdraw():
            self._settler.settle(Settlement(lease, Outcome.UNSTARTED))

    def _hear_burials(self, buried: list[int]) -> None:
        # the news of that very beat still counted them among the living
        self._orphans.alive -= frozenset(buried)
        self._orphans.dead += tuple(buried)
        self._membership.beat_soon()
        self._maintenance.run_now("orphans")

    def _hear_membership(self, verb: str, node: int) -> None:
        if node != self.id:
            self._membership.beat_soon()
        elif verb == "drain":
            self._drain.set()

    def _hear_listening(self) -> None:
        if self._listening.is_set() or self._listens_late:
            self._scan_soon(0)  # after a gap: read everything again
        self._listening.set()

    def _hear_garbled(self) -> None:
        """Look at what is due about now; once a sweep at the most, which finds it all the same."""
        sweep_us = round(self._settings.sweep_interval_s * 1e6)
        now_us = self._clock.monotonic_us()
        if self._doubted_us is None or now_us - self._doubted_us >= sweep_us:
            self._doubted_us = now_us
            self._scan_soon(self._database_clock.now_us() - 2 * sweep_us)

    def _scan_soon(self, from_us: int) -> None:
        known_us = self._scan_from_us
        self._scan_from_us = from_us if known_us is None else min(from_us, known_us)
        self._news_came.set()

    async def _follow_news(self) -> None:
        """Turn what was heard into ranks and scans, one at a time."""
        await self.active.wait()
        while True:
            await self._news_came.wait()
            self._news_came.clear()
            try:
                await self._take_up()
                from_us, self._scan_from_us = self._scan_from_us, None
                if from_us is not None:
                    await self._manager.rescan_from(from_us)
            except DelayQError as error:
                log.bind(error=str(error)).warning("news.retry")
                self._scan_from_us = 0
                await asyncio.sleep(0.5)
                self._news_came.set()

    async def _take_up(self) -> None:
        """Act on the last news: what is paused before any load, or it would fire once more."""
        if self._news is not None:
            await self._manager.serve(self._news.paused)
            await self._rank(self._news)

    async def _rank(self, news: News) -> None:
        """Ranks among the active nodes, this one among them: it loads before it is active."""
        nodes = dict(news.active)
        nodes[self.id] = frozenset(self._kinds)
        roles = ranks(nodes, self._kinds, self.id)
        if roles != self._manager.roles:
            await self._manager.adjust(roles)

    # --- duties ------------------------------------------------------------------------------

    async def _watch_stuck(self) -> None:
        while True:
            await asyncio.sleep(_STUCK_CHECK_S if self._pool.queued else 4 * _STUCK_CHECK_S)
            self._dispatcher.release_stuck()

    def _crashed(self, lease: Lease, error: BaseException) -> None:
        """A bug of ours between lease and settlement: the row is found owned and not held."""
        log.bind(task_id=lease.id, kind=lease.kind, error=type(error).__name__).error(
            "worker.crashed"
        )
        self._executor.running.pop(lease.id, None)
        self._dispatcher.over(lease)
