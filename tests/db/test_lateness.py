"""On time: a node's tasks beside bare timers of the same loop, armed for the same instants."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import TYPE_CHECKING

import pytest

from delayq import Context, DelayQ, Settings
from delayq.clock import Clock
from delayq.pace import Pace
from tests.helpers import wait_for
from tests.nodes import Application, all_ended, life
from tests.rooms import add_tasks

if TYPE_CHECKING:
    from delayq.database import Connection

TASKS = 150
MARGIN_US = 25_000
"""Wide: the machine is shared. `scripts/bench` measures how near they really are."""


async def test_tasks_start_within_milliseconds_of_a_bare_timer(
    settings: Settings, conn: Connection
) -> None:
    dq = DelayQ(settings=settings)
    done = asyncio.Event()
    started: list[int] = []

    @dq.task
    async def note(ctx: Context) -> None:
        started.append(ctx.id)
        if len(started) == TASKS:
            done.set()

    async with dq.node():
        timers = _bare_timers(TASKS)
        await conn.execute(
            "insert into delayq.tasks (kind, execute_at)"
            "  select 'note', delayq.clock() + n * interval '10 milliseconds'"
            "    from generate_series(50, 50 + $1 - 1) n",
            TASKS,
        )
        async with asyncio.timeout(30):
            await done.wait()
            bare = await timers
    rows = await conn.fetch("select lateness_us, started_at >= execute_at as not_early"
                            "  from delayq.task_history")  # fmt: skip
    lateness = [row["lateness_us"] for row in rows]
    assert len(lateness) == TASKS
    assert all(row["not_early"] for row in rows)
    assert median(lateness) < median(bare) + MARGIN_US


async def test_what_has_just_come_due_starts_before_backlog_that_was_leased_before_it(
    settings: Settings, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = Application(settings)
    started: list[int] = []
    free = asyncio.Event()

    @application.task
    async def mail(ctx: Context) -> None:
        started.append(ctx.id)
        await free.wait()

    backlog, fresh = range(1, 21), range(21, 24)
    monkeypatch.setattr(Pace, "allowance", lambda *_: 100)  # as if handlers took no time
    monkeypatch.setattr(Pace, "stands_still", lambda *_: False)
    await add_tasks(conn, backlog, after_s=-60)
    async with application.node(min_workers=1, max_workers=1) as node:
        pool = life(node)._pool
        await wait_for(lambda: pool.queued == len(backlog) - 1, "the backlog waits for the worker")
        await add_tasks(conn, fresh, after_s=0)
        await wait_for(lambda: pool.queued == len(backlog) - 1 + len(fresh), "all of it waits")
        free.set()
        await all_ended(conn, [*backlog, *fresh])
    assert set(started[1:4]) == set(fresh)


def _bare_timers(count: int) -> asyncio.Future[list[int]]:
    """How late so many timers of the loop are, ten milliseconds apart, in microseconds."""
    loop, clock = asyncio.get_running_loop(), Clock()
    result: asyncio.Future[list[int]] = loop.create_future()
    late: list[int] = []

    def fire(at_us: int) -> None:
        late.append(clock.monotonic_us() - at_us)
        if len(late) == count:
            result.set_result(late)

    for n in range(count):
        wait_s = 0.5 + n / 100
        loop.call_later(wait_s, fire, clock.monotonic_us() + round(wait_s * 1e6))
    return result
