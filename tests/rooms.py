"""Single rooms of a node, put up inside a test with real statements and a clock that is observed.

No loop of theirs runs by itself here: tests call one step, then look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from delayq.clock import Clock, DatabaseClock
from delayq.commons import Commons
from delayq.dispatcher import Dispatcher
from delayq.executor import Executor
from delayq.handler_policy import PolicyDefaults
from delayq.handlers import Registry, Scheduler, make_task_decorator
from delayq.holdings import Holdings
from delayq.lease import Lease
from delayq.metrics import Counters
from delayq.ranks import ranks
from delayq.ready_queue import Admission, ReadyQueue
from delayq.store import LeaseTerms, Store
from delayq.timer_heap import Timer
from delayq.timer_manager import TimerManager
from delayq.timers import Timers

if TYPE_CHECKING:
    from delayq.bridge import AnyConnection
    from delayq.database import Connection, Database
    from delayq.handlers import AnyHandler
    from delayq.settings import Settings

US = 1_000_000
ME, PEER, THIRD = 1_111, 2_222, 3_333
Limits = dict[str, tuple[tuple[str, int], ...]]


async def make_commons(database: Database, settings: Settings, node: int = ME) -> Commons:
    """What the rooms of one incarnation share; the caller closes the store."""
    clock = Clock()
    commons = Commons(Store(database, node), clock, DatabaseClock(clock), Counters(), settings)
    await observe(commons)
    return commons


def swap(owner: object, name: str, replacement: object) -> Any:
    """Put something in the place of a method of this one object; what was there."""
    real = getattr(owner, name)
    setattr(owner, name, replacement)
    return real


async def observe(commons: Commons) -> None:
    """Let the rooms see what time it is in the database."""
    sent_us = commons.clock.monotonic_us()
    database_us = await commons.store.clock_us()
    commons.database_clock.observe(database_us, sent_us, commons.clock.monotonic_us())


async def add_node(conn: Connection, node: int, state: str = "active", **columns: Any) -> None:
    """The row of another node."""
    given = {"kinds": ["mail"], "expires_s": 15.0, **columns}
    await conn.execute(
        "insert into delayq.nodes (id, name, host, pid, version, kinds, state, expires_at, ttl_ms)"
        " values ($1, 'test', 'test', 1, '1', $2, $3, delayq.clock() + $4 * interval '1 s', 15000)",
        node,
        given["kinds"],
        state,
        given["expires_s"],
    )


def id_in(bucket: int, number: int) -> int:
    """The `number`th of the ids (from 1) that fall into a bucket and into no other."""
    return (number << 16) | bucket


async def add_tasks(
    conn: Connection,
    ids: Iterable[int],
    *,
    after_s: float = 0.0,
    step_s: float = 0.0,
    **columns: Any,
) -> list[int]:
    """Pending tasks with these ids, the first due in `after_s`, each next one `step_s` later."""
    ids = list(ids)
    await conn.execute(
        "insert into delayq.tasks (id, kind, priority, execute_at) overriding system value"
        " select i, $2, $3, delayq.clock() + ($4::float8 + (nr - 1) * $5::float8) * interval '1 s'"
        "   from unnest($1::bigint[]) with ordinality as t(i, nr)",
        ids,
        columns.get("kind", "mail"),
        columns.get("priority", 0),
        after_s,
        step_s,
    )
    return ids


async def run_by(conn: Connection, node: int, ids: Iterable[int], **columns: Any) -> dict[int, int]:
    """Tasks that run on a node, due a moment ago; their tokens by id."""
    given = {"attempt": 1, "limit": 5, "deadline": "infinity", "kind": "mail", **columns}
    rows = await conn.fetch(
        "insert into delayq.tasks (id, kind, execute_at, state, lease_owner, lease_token,"
        "  leased_at, attempt, attempt_limit, deadline_at, cancel_requested)"
        " overriding system value"
        " select i, $7, delayq.clock() - interval '1 s', 'running', $2, 1000000 + i,"
        "  delayq.clock(), $3, $4, $5::text::timestamptz, $6"
        "  from unnest($1::bigint[]) as t(i) returning id, lease_token",
        list(ids),
        node,
        given["attempt"],
        given["limit"],
        given["deadline"],
        given.get("cancel_requested", False),
        given["kind"],
    )
    return {row["id"]: row["lease_token"] for row in rows}


# --- the timer manager ------------------------------------------------------------------------


class FakeLookout:
    """Remembers for whom the understudy stood in."""

    def __init__(self) -> None:
        self.stood_in: list[int] = []

    def stand_in(self, timers: Iterable[Timer]) -> None:
        self.stood_in += [timer.id for timer in timers]


@dataclass
class FakeDispatcher:
    """Takes what is due and remembers it."""

    clock: DatabaseClock
    holdings: Holdings
    limits: Limits = field(default_factory=dict)
    offered: list[int] = field(default_factory=list)
    offered_us: dict[int, int] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()
    lookout: FakeLookout = field(default_factory=FakeLookout)
    ahead_us: int = 0
    free: int = 100
    hungry: bool = False

    def __post_init__(self) -> None:
        self.ready = ReadyQueue(Admission(self.limits))

    @property
    def idle(self) -> bool:
        return not self.ready.takeable and self.free > 0

    def offer(self, timers: Iterable[Timer]) -> None:
        now_us = self.clock.now_us()
        fresh = self.holdings.take(timers)
        self.offered += [timer.id for timer in fresh]
        self.offered_us.update((timer.id, now_us) for timer in fresh)
        self.ready.push(fresh, now_us)

    def take(self) -> list[Timer]:
        """Take whatever may be taken, as if workers were free; they never finish."""
        taken = self.ready.take(10_000)
        dropped, self.ready.dropped = self.ready.dropped, []
        self.holdings.let_go(timer.id for timer in dropped)
        return taken

    def finish(self, kind: str) -> None:
        """One task of a limited kind is over, and the next one takes its place."""
        self.ready.release(kind, self.clock.now_us())
        self.take()


class Running:
    """The executor, as far as sweeps know it."""

    def __init__(self) -> None:
        self.running: dict[int, None] = {}
        self.cancelled: list[int] = []

    def request_cancel(self, task_ids: Iterable[int]) -> None:
        self.cancelled += task_ids


@dataclass
class Desk:
    """A timer manager, the clock that it goes by, and what it fired into."""

    commons: Commons
    holdings: Holdings
    firing: FakeDispatcher
    running: Running
    timers: Timers
    manager: TimerManager

    async def rank(self, *peers: int, kinds: Iterable[str] = ("mail",)) -> None:
        """Take the ranks that follow from these nodes being active besides this one."""
        serving = frozenset(kinds)
        nodes = dict.fromkeys((self.commons.node, *peers), serving)
        await self.manager.adjust(ranks(nodes, serving, self.commons.node))

    async def observe(self) -> None:
        """See the database's time, and let what waits for a step of it happen."""
        await observe(self.commons)
        for _ in range(3):
            await asyncio.sleep(0)

    def now_us(self) -> int:
        """The database's clock as seen from here."""
        return self.commons.database_clock.now_us()


@asynccontextmanager
async def desk(
    database: Database,
    settings: Settings,
    *,
    node: int = ME,
    kinds: Iterable[str] = ("mail",),
    limits: Limits | None = None,
    **changes: Any,
) -> AsyncIterator[Desk]:
    """A timer manager without a rank yet. `changes` are other settings."""
    commons = await make_commons(database, settings.model_copy(update=changes), node)
    holdings, running = Holdings(), Running()
    firing = FakeDispatcher(commons.database_clock, holdings, limits or {})
    timers = Timers(commons, holdings, cast(Dispatcher, firing))
    manager = TimerManager(
        commons, holdings, timers, cast(Dispatcher, firing), cast(Executor, running), kinds
    )
    timers.connect(manager.read_on)
    yield Desk(commons, holdings, firing, running, timers, manager)
    timers.stop()
    await commons.store.aclose()


# --- leases -----------------------------------------------------------------------------------


class Quiet:
    """A home for leases that never run."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.loop = asyncio.get_running_loop()

    def effect(self, lease: Lease) -> AbstractAsyncContextManager[AnyConnection]:
        raise AssertionError(f"no effect here, and not for {lease.id}")


TERMS = LeaseTerms(
    kinds=["mail"], max_attempts=[3], timeouts_ms=[None], deadlines=[True], with_grace=[]
)


async def lease(commons: Commons, ids: Iterable[int], nonce: int = 7, **terms: Any) -> list[Lease]:
    """Lease these tasks of kind mail, in one statement."""
    terms_of_all = replace(TERMS, **terms)
    rows = await commons.store.lease(list(ids), nonce, terms_of_all, 0, 16_384)
    home = Quiet(commons.node)
    return [Lease(row, _handler(), home) for row in rows]


def _handler() -> AnyHandler:
    registry = Registry()
    task = make_task_decorator(registry, cast(Scheduler, None), PolicyDefaults())

    @task
    async def mail() -> None:
        return None

    return registry["mail"]
