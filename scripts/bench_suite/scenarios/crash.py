"""One of several nodes is killed: how late the tasks are that it would have fired."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from ..cluster import Cluster, warm
from ..numbers import late_by_number, lateness, spread
from ..scenario import NAN, Figure, Measure, Sample, Scenario, Target
from .timed import beside_timers, early_by_the_database, evenly

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_AT = 1 / 3
"""of the time in which tasks become due"""
_GRACE_S = 2.0
# What the killed node had leased was running, not pending: it runs again once the node is buried.
_TAKEN = """
    select (payload ->> 'n')::bigint from delayq.tasks where state = 'running'
    union all
    select (payload ->> 'n')::bigint from delayq.task_history where attempt > 1
"""
_LIVE = "select count(*) from delayq.tasks"


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the bare timers in the same seconds."""
    plan = evenly(sizes, sizes.leave_rate, sizes.leave_seconds, "wait", sizes.leave_work_ms)
    killed_us = 0.0
    async with warm(ground, sizes.leave_nodes, at_once=True) as cluster:

        async def strike(first_us: int) -> None:
            nonlocal killed_us
            await asyncio.sleep(first_us / 1e6 + sizes.leave_seconds * _AT - time.time())
            cluster.workers[0].signal(signal.SIGKILL)
            killed_us = time.time_ns() / 1000

        first_us, bare = await beside_timers(cluster, plan, strike)
        await cluster.all_started(plan.count, _GRACE_S)
        await _run_again(cluster, sizes.crash_wait_seconds)
        taken = await _taken(cluster)
        early = await early_by_the_database(cluster, first_us)
        starts = await cluster.stop()
    due_us = plan.due_us(first_us)
    others = [(number, at_ns) for number, at_ns in starts if number not in taken]
    late = late_by_number(others, plan.count, due_us)
    _, faults = lateness(others, plan.count, due_us)
    faults["lost"] -= len(taken)
    faults["early by the database"] = early
    pending = spread([ms for number, ms in late.items() if due_us(number) > killed_us])
    again_ns = [at_ns for number, at_ns in starts if number in taken and at_ns > killed_us * 1000]
    again_s = max(again_ns, default=NAN) / 1e9 - killed_us / 1e6
    notes: dict[str, float | str] = {"tasks that the killed node had leased:": str(len(taken))}
    return Sample(pending | {"again": again_s}, bare, faults, notes)


async def _run_again(cluster: Cluster, limit_s: float) -> None:
    """Wait until nothing is left, or for so long."""
    deadline = time.monotonic() + limit_s
    async with cluster.place.connection() as conn:
        while time.monotonic() < deadline:
            if not await conn.fetchval(_LIVE):
                return
            await asyncio.sleep(0.2)


async def _taken(cluster: Cluster) -> set[int]:
    """The numbers of the tasks that the killed node had leased."""
    async with cluster.place.connection() as conn:
        return {row[0] for row in await conn.fetch(_TAKEN)}


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    about = "lateness of pending tasks, SIGKILL of one node"
    again = Figure("again", "what ran on it runs again after", "s", alone=True)
    return (
        Figure("p50", f"{about}, p50", "ms"),
        Figure("p99", f"{about}, p99", "ms", Target(Measure.VALUE, most=600.0)),
        Figure("max", f"{about}, max", "ms"),
        *([again] if sizes.crash_wait_seconds else []),
    )


SCENARIO = Scenario(
    "crash",
    "tasks due evenly over time on several nodes, handlers that wait; one of the nodes is killed"
    " after a third of the time; of the tasks due since then, all but those that it had leased",
    "bare loop.call_at timers in a process of their own, in the same seconds, that do the same",
    _figures,
    run,
)
