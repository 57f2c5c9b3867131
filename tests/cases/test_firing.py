"""When tasks start: not a microsecond early, once, and none because of what else is armed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayq import DelayQ
from delayq.context import Context
from delayq.database import Database, parse_dsn
from delayq.store import LeaseTerms, Store
from tests.helpers import connected
from tests.nodes import Application, all_ended, ended, life, no_live_tasks, schedule
from tests.process.crew import spread
from tests.rooms import add_node, swap

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

NOISE_S = 2.0
LEVELS = ["read committed", "repeatable read", "serializable"]


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


async def test_no_task_starts_before_its_odd_microsecond_and_few_leases_are_asked_for(
    settings: Settings, conn: Connection
) -> None:
    """C001."""
    started: dict[int, tuple[int, Any]] = {}
    dq = DelayQ(settings=settings)

    @dq.task
    async def reads_the_clock(ctx: Context) -> None:
        started[ctx.id] = (time.time_ns() // 1000, ctx.execute_at)

    asked: dict[int, datetime] = {}
    async with dq.node() as node:
        leases: list[int] = []
        real: Any = swap(life(node)._store, "lease", None)

        async def counted(ids: list[int], *args: Any) -> Any:
            leases.append(len(ids))
            return await real(ids, *args)

        swap(life(node)._store, "lease", counted)
        begin = datetime.now(UTC).replace(microsecond=509_664) + timedelta(seconds=1)
        async with asyncio.TaskGroup() as group:
            for n in range(200):
                at = begin + timedelta(microseconds=7_013 * n)
                group.create_task(_scheduled(reads_the_clock.at(at), asked, at))
        await all_ended(conn, asked)
    rows = await conn.fetch(
        "select id, delayq.micros(started_at) as started_us, delayq.micros(execute_at) as due_us"
        "  from delayq.task_history"
    )
    assert len(rows) == len(asked) == len(started) == 200
    for row in rows:
        seen_us, told = started[row["id"]]
        assert told == asked[row["id"]]  # to the microsecond
        assert seen_us >= row["due_us"]  # by this machine's clock, which is the database's
        assert row["started_us"] >= row["due_us"]  # and as the database was told
    assert len(leases) <= 3 * 200


async def _scheduled(call: Any, asked: dict[int, datetime], at: datetime) -> None:
    asked[(await call).id] = at


@pytest.mark.parametrize("level", LEVELS)
async def test_however_many_nodes_reach_for_a_task_it_is_leased_once(
    conn: Connection, dsn: str, settings: Settings, level: str
) -> None:
    """C007. Eight nodes ask for the same 2,000 tasks at the same time."""
    name = await conn.fetchval("select current_database()")
    await conn.execute(f'alter database "{name}" set default_transaction_isolation = "{level}"')
    rows = await conn.fetch(
        "insert into delayq.tasks (kind) select 'mail' from generate_series(1, 2000) returning id"
    )
    ids = [row["id"] for row in rows]
    stores = [Store(Database(parse_dsn(dsn), settings), 100 + n) for n in range(8)]
    terms = LeaseTerms(["mail"], [3], [None], [True], [])
    leased: Counter[int] = Counter()

    async def reach(nr: int, store: Store) -> None:
        for start in range(0, len(ids), 250):
            batch = ids[start : start + 250]
            leased.update(row[0] for row in await store.lease(batch, nr + 1, terms, 0, 100))

    try:
        for store in stores:
            await add_node(conn, store.incarnation)
            await store.open()
        await asyncio.gather(*(reach(nr, store) for nr, store in enumerate(stores)))
    finally:
        for store in stores:
            await store.aclose()
    # SKIP LOCKED passes over what another is just taking: that one has it
    assert leased == Counter(dict.fromkeys(ids, 1))


@pytest.mark.parametrize(
    "level", [pytest.param("read committed", marks=pytest.mark.slow), "serializable"]
)
async def test_nodes_that_race_for_one_instant_run_each_task_once(
    app: Application, conn: Connection, level: str, logged: list[Logged]
) -> None:
    """C007. The understudies come ten milliseconds after the owners, so they race all the time."""
    name = await conn.fetchval("select current_database()")
    await conn.execute(f'alter database "{name}" set default_transaction_isolation = "{level}"')
    await conn.execute("create table effects (task_id bigint)")
    runs: Counter[int] = Counter()

    @app.task
    async def writes(ctx: Context) -> None:
        runs[ctx.id] += 1
        if ctx.id % 8 == 0:
            async with ctx.effect() as effect:
                await effect.execute("insert into effects values ($1)", ctx.id)

    ids = await spread(conn, "writes", 800, first_s=1.5, every_ms=0, payload="{}")
    async with AsyncExitStack() as nodes:
        for _ in range(3):
            await nodes.enter_async_context(app.node(max_workers=20, understudy_delay_ms=10))
        ends = await all_ended(conn, ids, 20)
    assert runs == Counter(dict.fromkeys(ids, 1))
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    effects = await conn.fetch("select task_id from effects")
    assert sorted(row["task_id"] for row in effects) == [i for i in ids if i % 8 == 0]
    assert not [event for event in logged if event.level in ("ERROR", "CRITICAL")]


async def test_a_task_that_waits_longer_than_a_lease_lasts_runs_once_and_holds_no_lease(
    app: Application, conn: Connection
) -> None:
    """C003. The timers of three nodes are armed for longer than the TTL; one of them restarts."""
    runs: Counter[int] = Counter()

    @app.task
    async def tick(ctx: Context) -> None:
        runs[ctx.id] += 1

    ttl_s = app.settings.lease_ttl_s
    async with app.node(), app.node():
        async with app.node():
            ids = await spread(conn, "tick", 60, first_s=ttl_s + 1.0, every_ms=5, payload="{}")
            before = await _versions(conn)
        async with app.node():
            due = conn.fetchval("select min(execute_at) from delayq.tasks")
            until = (await due).timestamp() - 0.4
            await asyncio.sleep(max(0.0, until - time.time()))  # the wait is what this is about
            assert await _versions(conn) == before  # nobody wrote them: no lease, no owner
            ends = await all_ended(conn, ids)
    assert runs == Counter(dict.fromkeys(ids, 1))
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}


async def _versions(conn: Connection) -> list[tuple[int, str, int]]:
    rows = await conn.fetch(
        "select id, xmin::text as version, lease_owner from delayq.tasks order by id"
    )
    assert {row["lease_owner"] for row in rows} == {0}
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("hinted", [True, False], ids=["heard", "unheard"])
async def test_whatever_is_armed_already_an_earlier_task_fires_first(
    app: Application, conn: Connection, dsn: str, hinted: bool
) -> None:
    """C008. Heard of at once, or, without a hint, found by the next sweep."""

    @app.task
    async def tick() -> None:
        pass

    # an hour ahead and, as a timer in memory, ten seconds ahead
    for ahead_s in (3_600, 10):
        await schedule(conn, "tick", delay=timedelta(seconds=ahead_s))
    async with app.node(sweep_interval_s=1.5), connected(dsn) as elsewhere:
        await elsewhere.execute(f"set delayq.hints = {'on' if hinted else 'off'}")
        row = await elsewhere.fetchrow(
            "insert into delayq.tasks (kind, execute_at)"
            " values ('tick', delayq.clock() + interval '0.5 s') returning id"
        )
        assert row is not None
        end = await ended(conn, row["id"])
    late_s = (end.lateness_us or 0) / 1e6
    # a tenth of jitter, and what the machine adds
    assert late_s < (0.2 if hinted else 1.5 * 1.1 - 0.5) + NOISE_S


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_thousands_that_are_due_in_one_second_all_run_once_and_the_oldest_first(
    app: Application, conn: Connection, logged: list[Logged], count: int
) -> None:
    """C104. Two nodes of fifty workers, and the beats go on."""
    order: list[int] = []
    inside = most = 0

    @app.task(misfire_grace=600)
    async def works(ctx: Context) -> None:
        nonlocal inside, most
        order.append(ctx.id)
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.05)
        inside -= 1

    ids = await spread(conn, "works", count, first_s=1.0, every_ms=1000 / count, payload="{}")
    async with app.node(max_workers=50) as first, app.node(max_workers=50) as second:
        nodes = {first.id, second.id}
        await no_live_tasks(conn, 80)
        states = await conn.fetch("select id, state from delayq.nodes")
        assert {tuple(row) for row in states} == {(node, "active") for node in nodes}
        counters = [first.counters, second.counters]
    assert sorted(order) == ids
    assert most <= 100
    rows = await conn.fetch("select distinct state, attempt from delayq.task_history")
    assert [tuple(row) for row in rows] == [("succeeded", 1)]
    # what has just come due may go ahead of what is late already; on the whole the oldest go first
    place = {task_id: nr for nr, task_id in enumerate(order)}
    half = count // 2
    assert sum(place[i] for i in ids[:half]) < sum(place[i] for i in ids[half:])
    assert not [e for e in logged if e.event in ("node.fenced", "node.buried", "beat.failed")]
    assert sum(c.fired for c in counters if c is not None) == count
