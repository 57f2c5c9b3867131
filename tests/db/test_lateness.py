"""On time: a node's tasks beside bare timers of the same loop, armed for the same instants."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import TYPE_CHECKING

from delayq import Context, DelayQ, Settings
from delayq.clock import Clock

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
