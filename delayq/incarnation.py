"""One life of a node: assembles the actors, joins, runs them until it is over, and leaves.

How it joins, what it makes of the news and how it leaves is told in rooms of their own. A node that
was buried comes back as another incarnation, with a number, sessions and leases of its own; nothing
of the old one is carried over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from delayq.clock import Clock, DatabaseClock
from delayq.commons import Commons
from delayq.dispatcher import Dispatcher
from delayq.effects import Effects
from delayq.executor import Executor
from delayq.holdings import Holdings
from delayq.joining import Joining
from delayq.lease import Interruption, Lease, Outcome, Settlement
from delayq.leaving import Leaving
from delayq.listener import Hearers, Listener
from delayq.log import log
from delayq.lookout import Lookout
from delayq.loop_lag import LoopLag
from delayq.maintenance import Maintenance
from delayq.membership import Membership, News, Witnesses
from delayq.metrics import Counters
from delayq.news import Newsroom
from delayq.orphans import Orphanage
from delayq.patience import Patience
from delayq.settler import Settler
from delayq.store import Settled, Store
from delayq.threads import Threads
from delayq.timer_manager import TimerManager
from delayq.timers import Timers
from delayq.upkeep import Upkeep
from delayq.worker_pool import WorkerPool

if TYPE_CHECKING:
    from delayq.database import Database
    from delayq.handlers import AnyHandler, Registry
    from delayq.settings import Settings

_ORPHANS_S: Final = 60.0
_UPKEEP_S: Final = 600.0
_STUCK_CHECK_S: Final = 0.05


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
        self._drain = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._store = Store(database, self.id)
        commons = Commons(self._store, clock, DatabaseClock(clock), self.counters, settings)
        served = sorted(kinds)
        self._assemble_membership(commons, database)
        self._assemble_firing(commons, database, {kind: registry[kind] for kind in served})
        self._assemble_duties(commons, database)
        self._assemble_life(commons, served)

    # --- assembly ----------------------------------------------------------------------------
    #
    # Things go round: work from the dispatcher through pool, executor and settler back to the
    # dispatcher, news from the beat to ranks and to another beat. Whoever does not exist yet when
    # those that speak to him are made is reached by name, at the end of this section.

    def _assemble_membership(self, commons: Commons, database: Database) -> None:
        self._membership = Membership(
            commons,
            database,
            Witnesses(
                news=self._hear_news,
                buried=self._hear_burial,
                fenced=self._fence,
                burials=self._hear_burials,
                whose=self._whose,
            ),
        )

    def _assemble_firing(
        self, commons: Commons, database: Database, handlers: dict[str, AnyHandler]
    ) -> None:
        settings = commons.settings
        self._effects = Effects(database, self.id, settings.effect_connections)
        self._threads = Threads(settings.threads)
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
        self._holdings = holdings = Holdings()
        self._dispatcher = Dispatcher(
            commons, holdings, handlers, self._executor, self._settler, self._pool,
            self._membership.may_fire,
        )  # fmt: skip
        self._timers = Timers(commons, holdings, self._dispatcher)
        self._lookout = Lookout(commons, holdings, self._dispatcher, self._timers, self._executor)
        self._manager = TimerManager(
            commons, holdings, self._timers, self._dispatcher, self._executor, handlers.keys()
        )
        self._dispatcher.connect(self._timers, self._lookout)
        self._timers.connect(self._manager.read_on)

    def _assemble_duties(self, commons: Commons, database: Database) -> None:
        self._orphans = Orphanage(
            commons, self._holdings.holds, lambda _adopted: self._news.scan_soon(0)
        )
        self._maintenance = Maintenance(commons.clock)
        self._lag = LoopLag(commons.clock, self.counters)
        self._upkeep = Upkeep(commons)
        self._news = Newsroom(
            commons, self._manager, self._orphans, self._membership, self._maintenance,
            self._drain.set, self.active,
        )  # fmt: skip
        self._listener = Listener(
            database,
            self.id,
            Hearers(
                due=self._timers.hear,
                scan=self._news.scan_soon,
                garbled=self._news.hear_garbled,
                cancel=self._lookout.hear_cancel,
                membership=self._news.hear_membership,
                kind=self._membership.beat_soon,
                listening=self._news.hear_listening,
            ),
        )

    def _assemble_life(self, commons: Commons, kinds: Sequence[str]) -> None:
        self._joining = Joining(
            commons, kinds, self._membership, self._pool, self._upkeep, self._news,
            self._drain.is_set,
        )  # fmt: skip
        self._leaving = Leaving(
            commons=commons,
            patience=Patience(self.id, self._stop_now),
            timers=self._timers,
            dispatcher=self._dispatcher,
            executor=self._executor,
            settler=self._settler,
            pool=self._pool,
            effects=self._effects,
            threads=self._threads,
            maintenance=self._maintenance,
            membership=self._membership,
        )

    def _settled(self, ends: Sequence[tuple[Lease, Settled | None]]) -> None:
        self._dispatcher.settled(ends)

    def _over(self, lease: Lease) -> None:
        self._dispatcher.over(lease)

    def _free(self) -> None:
        self._dispatcher.wake()

    def _hear_news(self, news: News) -> None:
        self._news.hear(news)

    def _hear_burials(self, buried: list[int]) -> None:
        self._news.hear_burials(buried)

    def _whose(self, task: asyncio.Task[Any]) -> dict[str, object]:
        return self._executor.told_of(task)

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
            await self._joining.join()
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop()) for loop in self._loops()]
                await self._drain.wait()
                if self.buried:
                    self._leaving.abandon()
                else:
                    await self._leaving.hand_over()
                for task in loops:
                    task.cancel()
        finally:
            await self._leaving.leave()

    def _loops(self) -> list[Callable[[], Coroutine[None, None, None]]]:
        return [
            self._dispatcher.run,
            self._lookout.run,
            self._settler.run,
            self._executor.watch,
            self._manager.keep_loaded,
            self._listener.run,
            self._news.follow,
            self._watch_stuck,
            self._become_active,
        ]

    async def _become_active(self) -> None:
        await self._joining.take_share()
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

    # --- duties ------------------------------------------------------------------------------

    def _hear_burial(self) -> None:
        self.buried = True
        self._drain.set()

    def _fence(self) -> None:
        """Peers may take this node for dead: end what runs. It is released if it is still ours."""
        self._executor.interrupt_running(Interruption.FENCED)
        for lease in self._dispatcher.withdraw():
            self._settler.settle(Settlement(lease, Outcome.UNSTARTED))

    async def _watch_stuck(self) -> None:
        while True:
            await self._lag.sleep(_STUCK_CHECK_S if self._pool.queued else 4 * _STUCK_CHECK_S)
            self._dispatcher.release_stuck()

    def _crashed(self, lease: Lease, error: BaseException) -> None:
        """A bug of ours between lease and settlement: the row is found owned and not held."""
        log.bind(task_id=lease.id, kind=lease.kind, error=type(error).__name__).error(
            "worker.crashed"
        )
        self._executor.running.pop(lease.id, None)
        self._dispatcher.over(lease)
