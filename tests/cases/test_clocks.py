"""Clocks that are set, of nodes and of the database: nobody fires, waits or dies for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayq.context import Context
from tests.helpers import advance_clock, wait_for
from tests.nodes import Application, all_ended, ended, eventually, schedule
from tests.process.crew import spread

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged
    from tests.wall_clock import WallClock

HOUR_S = 3_600.0
CENTURIES_S = 174 * 365.25 * 86_400
NOISE_S = 2.0
BEATS = """
    create table beats (node bigint, at timestamptz default clock_timestamp());
    create function note_beat() returns trigger language plpgsql as $$
    begin insert into public.beats (node) values (new.id); return null; end $$;
    create trigger note after update on delayq.nodes for each row
        when (new.expires_at is distinct from old.expires_at) execute function note_beat()
"""
LONGEST_GAP = """
    select max(gap) from (
        select extract(epoch from at - lag(at) over (partition by node order by at)) as gap
          from beats) as gaps
"""


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


async def test_a_wall_clock_that_goes_back_an_hour_delays_no_task_and_no_beat(
    app: Application, conn: Connection, wall: WallClock, logged: list[Logged]
) -> None:
    """C019. While the nodes are idle, and while a handler runs."""
    runs: Counter[int] = Counter()
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def tick(ctx: Context) -> None:
        runs[ctx.id] += 1

    @app.task
    async def long(ctx: Context) -> None:
        runs[ctx.id] += 1
        started.set()
        await go_on.wait()

    await conn.execute(BEATS)
    async with app.node() as first, app.node() as second:
        nodes = (first.id, second.id)
        ids = await spread(conn, "tick", 40, first_s=0.3, every_ms=75, payload="{}")
        wall.ahead_s = -HOUR_S
        running = await schedule(conn, "long")
        await started.wait()
        wall.ahead_s = -2 * HOUR_S
        # unheard of: found by sweeps, which are timed by the wall clock
        await conn.execute("set delayq.hints = off")
        quiet = await spread(conn, "tick", 20, first_s=2.5, every_ms=20, payload="{}")
        ends = await all_ended(conn, [*ids, *quiet])
        go_on.set()
        ends[running] = await ended(conn, running)
        assert (first.id, second.id) == nodes
    assert runs == Counter(dict.fromkeys([*ids, *quiet, running], 1))
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert all(0 <= (end.lateness_us or 0) / 1e6 < NOISE_S for end in ends.values())
    assert await conn.fetchval(LONGEST_GAP) < 2 * app.settings.beat_interval_s + NOISE_S
    assert not [e for e in logged if e.event in ("node.buried", "node.fenced", "tasks.adopted")]


async def test_a_wall_clock_that_leaps_centuries_ahead_fires_nothing_and_is_told_once(
    app: Application, conn: Connection, wall: WallClock, logged: list[Logged]
) -> None:
    """C020. The database is the judge of what is due."""
    runs: list[int] = []

    @app.task
    async def tick(ctx: Context) -> None:
        runs.append(ctx.id)

    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        " select 'tick', delayq.clock() + n * interval '43 minutes' + interval '1 day'"
        "   from generate_series(1, 1000) as n"
    )

    def told() -> int:
        return len([event for event in logged if event.event == "wall_clock.jumped"])

    async with app.node() as node:
        wall.ahead_s = CENTURIES_S
        await wait_for(lambda: told() == 1, "it is told")
        control = await schedule(conn, "tick", delay=timedelta(seconds=1.6))
        await ended(conn, control)  # two beats and three sweeps later
        assert told() == 1
        wall.ahead_s = 0.0
        await wait_for(lambda: told() == 2, "and so is the way back")
        await ended(conn, await schedule(conn, "tick"))
        assert node.counters is not None
        assert node.counters.fired == 2
    assert len(runs) == 2
    assert await conn.fetchval("select count(*) from delayq.tasks where attempt = 0") == 1_000


async def test_a_database_whose_clock_goes_back_runs_nothing_again_and_loses_nothing(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    """C023. As after a failover to a server whose clock is a minute behind."""
    runs: Counter[int] = Counter()
    go_on = asyncio.Event()

    @app.task
    async def tick(ctx: Context) -> None:
        runs[ctx.id] += 1

    @app.task
    async def long(ctx: Context) -> None:
        runs[ctx.id] += 1
        await go_on.wait()

    async with app.node() as first, app.node() as second:
        nodes = (first.id, second.id)
        done = await spread(conn, "tick", 20, first_s=0, every_ms=0, payload="{}")
        await all_ended(conn, done)
        running = await spread(conn, "long", 5, first_s=0, every_ms=0, payload="{}")
        await wait_for(lambda: all(runs[task_id] for task_id in running), "five run")
        pending = await spread(conn, "tick", 10, first_s=1.5, every_ms=10, payload="{}")
        await advance_clock(conn, -60)
        await _beats(conn, 3)
        fresh = await schedule(conn, "tick", delay=timedelta(seconds=0.2))
        assert (await ended(conn, fresh)).attempt == 1
        go_on.set()
        await all_ended(conn, running)
        assert not any(runs[task_id] for task_id in pending)  # a minute to go, by that clock
        await advance_clock(conn, 62)
        ends = await all_ended(conn, [*running, *pending])
        assert (first.id, second.id) == nodes
    assert runs == Counter(dict.fromkeys([*done, *running, *pending, fresh], 1))
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert all((end.lateness_us or 0) >= 0 for end in ends.values())
    assert not [e for e in logged if e.event in ("node.buried", "node.fenced", "tasks.adopted")]


async def _beats(conn: Connection, count: int) -> None:
    """Wait until every node has beaten so often, whatever the clock says."""
    for _ in range(count):
        before = await _expiries(conn)

        async def all_moved(before: dict[int, datetime] = before) -> bool:
            now = await _expiries(conn)
            return all(now[node] != expires_at for node, expires_at in before.items())

        await eventually(all_moved, "all beat")


async def _expiries(conn: Connection) -> dict[int, datetime]:
    rows = await conn.fetch("select id, expires_at from delayq.nodes")
    return {row["id"]: row["expires_at"] for row in rows}
