"""A transaction of a stranger that touches one task delays that task alone."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from delayq.context import Context
from tests.helpers import connected, wait_for
from tests.nodes import Application, all_ended, ended, eventually, life, row_of, schedule

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings

DUE = """
    insert into delayq.tasks (kind, execute_at)
    select 'quick', delayq.clock() + interval '0.7 s' from generate_series(1, $1)
    returning id
"""


@pytest.fixture
def app(settings: Settings) -> Application:
    app = Application(settings)

    @app.task
    async def quick() -> None:
        pass

    return app


async def _now_us(conn: Connection) -> int:
    return int(await conn.fetchval("select delayq.micros(delayq.clock())"))


@pytest.mark.parametrize("nodes", [1, 2])
async def test_one_locked_task_of_a_thousand_delays_itself_alone(
    app: Application, conn: Connection, dsn: str, nodes: int
) -> None:
    async with connected(dsn) as locker, connected(dsn) as mover:
        started = [app.node() for _ in range(nodes)]
        for node in started:
            await node.start()
        try:
            ids = [row["id"] for row in await conn.fetch(DUE, 1000)]
            locked, moved, others = ids[400], ids[700], [*ids[:400], *ids[401:700], *ids[701:]]
            holding, moving = locker.transaction(), mover.transaction()
            await holding.start()
            await locker.execute("select from delayq.tasks where id = $1 for update", locked)
            await moving.start()
            await mover.fetchval("select delayq.reschedule($1, delay => interval '1.2 s')", moved)
            ends = await all_ended(conn, others)
            latest_us = max(end.lateness_us or 0 for end in ends.values())
            assert latest_us < 2_000_000  # a thousand at once on a busy machine
            # they were all settled while the locks were held
            assert {row["state"] for task_id in (locked, moved)
                    if (row := await row_of(conn, task_id))} == {"pending"}  # fmt: skip
            # long enough for the first tries to have failed, and for the back-off to have grown
            tries = [life(node)._dispatcher.lookout._tries for node in started]
            await wait_for(lambda: max(t.get(locked, 0) for t in tries) >= 5, "it was tried often")
            await moving.commit()
            moved_end = await ended(conn, moved)
            assert (moved_end.state, moved_end.attempt) == ("succeeded", 1)
            await holding.rollback()
            released_us = await _now_us(conn)
            end = await ended(conn, locked)
            assert (end.state, end.attempt) == ("succeeded", 1)
            # the longest back-off is one sweep (0.5 s here)
            assert end.finished_us - released_us < 1_500_000
        finally:
            for node in started:
                node.request_drain()
            for node in started:
                await node.wait()


async def test_a_move_that_commits_late_is_obeyed(
    app: Application, conn: Connection, dsn: str
) -> None:
    async with app.node(), connected(dsn) as stranger:
        task_id = await schedule(conn, "quick", delay=timedelta(seconds=0.3))
        async with stranger.transaction():
            await stranger.fetchval(
                "select delayq.reschedule($1, delay => interval '1 s')", task_id
            )
            # due by its old instant, and found locked
            await eventually(
                lambda: conn.fetchval(
                    "select execute_at < delayq.clock() - interval '0.1 s' from delayq.tasks"
                ),
                "its old instant has passed",
            )
        end = await ended(conn, task_id)
        assert end.started_us is not None
        assert end.started_us >= end.execute_us
        assert end.attempt == 1


async def test_a_task_that_commits_late_runs_at_once(
    app: Application, conn: Connection, dsn: str
) -> None:
    """Its row appears behind the watermark; the hint, or the re-check by xmin, finds it."""
    async with app.node(), connected(dsn) as stranger:
        for hints in ("on", "off"):
            await stranger.execute(f"set delayq.hints = {hints}")
            async with stranger.transaction():
                task_id = await schedule(stranger, "quick", delay=timedelta(seconds=0.2))
                other = await schedule(conn, "quick", delay=timedelta(seconds=0.4))
                await ended(conn, other)
            committed_us = await _now_us(conn)
            end = await ended(conn, task_id)
            assert end.state == "succeeded"
            assert end.finished_us - committed_us < 1_500_000, hints


async def test_a_settlement_of_a_locked_task_waits_without_holding_up_others(
    app: Application, conn: Connection, dsn: str
) -> None:
    go_on = asyncio.Event()
    running = asyncio.Event()

    @app.task
    async def waits(ctx: Context, raises: bool) -> None:
        running.set()
        await go_on.wait()
        if raises and ctx.attempt == 1:
            raise ValueError("once")

    async with app.node() as node, connected(dsn) as stranger:
        ids = [await schedule(conn, "waits", {"raises": n % 2 == 0}) for n in range(4)]
        executor = life(node)._executor
        await wait_for(lambda: len(executor.running) == 4, "they run")
        async with stranger.transaction():
            await stranger.execute(
                "select from delayq.tasks where id = any($1::bigint[]) for update", ids
            )
            go_on.set()
            await wait_for(lambda: not executor.running, "they are over")
            quick = [await schedule(conn, "quick") for _ in range(200)]
            ends = await all_ended(conn, quick)
            assert max(end.finished_us - end.execute_us for end in ends.values()) < 2_000_000
            rows = [await row_of(conn, task_id) for task_id in ids]
            assert [row and row["state"] for row in rows] == ["running"] * 4
        settled = await all_ended(conn, ids)
        assert [settled[task_id].attempt for task_id in ids] == [2, 1, 2, 1]
        assert {end.state for end in settled.values()} == {"succeeded"}
        assert node.counters is not None
        assert node.counters.leases_lost == 0


async def test_a_drain_waits_for_a_settlement_that_a_stranger_holds_up(
    app: Application, conn: Connection, dsn: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def waits() -> None:
        running.set()
        await go_on.wait()

    node = app.node()
    await node.start()
    async with connected(dsn) as stranger:
        task_id = await schedule(conn, "waits")
        await running.wait()
        async with stranger.transaction():
            await stranger.execute("select from delayq.tasks where id = $1 for update", task_id)
            go_on.set()
            await wait_for(lambda: not life(node)._executor.running, "it is over")
            node.request_drain()
            await eventually(
                lambda: conn.fetchval("select true from delayq.nodes where state = 'draining'"),
                "the node drains",
            )
            assert await conn.fetchval("select count(*) from delayq.task_history") == 0
        await node.wait()
    assert (await ended(conn, task_id)).attempt == 1
    assert await conn.fetchval("select count(*) from delayq.nodes") == 0


async def test_a_locked_node_table_row_stops_nobody_elses_beat(
    app: Application, conn: Connection, dsn: str
) -> None:
    """A stranger who locks the row of one node delays its beat until its lock limit, no more."""
    async with app.node(lock_timeout_s=0.5) as first, app.node() as second:
        async with connected(dsn) as stranger, stranger.transaction():
            await stranger.execute("select from delayq.nodes where id = $1 for update", first.id)
            seen = await conn.fetchval(
                "select expires_at from delayq.nodes where id = $1", second.id
            )
            await eventually(
                lambda: conn.fetchval(
                    "select expires_at > $2 from delayq.nodes where id = $1", second.id, seen
                ),
                "the other one beats",
            )
            assert (await ended(conn, await schedule(conn, "quick"))).state == "succeeded"
        states = await conn.fetch("select state from delayq.nodes")
        assert [row["state"] for row in states] == ["active", "active"]


async def test_adoption_leaves_a_locked_task_and_comes_back_for_it_soon(
    app: Application, conn: Connection, dsn: str
) -> None:
    ids = [await schedule(conn, "quick") for _ in range(20)]
    await conn.execute(
        "update delayq.tasks set state = 'running', lease_owner = 7, lease_token = id, attempt = 1,"
        " attempt_limit = 3"
    )
    async with connected(dsn) as stranger:
        async with stranger.transaction():
            await stranger.execute("select from delayq.tasks where id = $1 for update", ids[7])
            # the look at all running rows comes every 12 s here; once at the start
            node = app.node()
            await node.start()
            ends = await all_ended(conn, [*ids[:7], *ids[8:]])
            assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 2)}
        released_us = await _now_us(conn)
        end = await ended(conn, ids[7])
        assert end.attempt == 2
        assert end.finished_us - released_us < 4_000_000
    node.request_drain()
    await node.wait()
