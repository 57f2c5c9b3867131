"""Tasks that are due at stated instants, on warm nodes, beside bare timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ..numbers import lateness, spread
from ..usage import rss_mb

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..sizes import Sizes

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# by the database's own clock, which no handler sees
_EARLY = """
    select count(*) from delayq.task_history
     where execute_at >= $1 and attempt = 1 and started_at < execute_at
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks 0, 1, … due evenly, and what their handlers do."""

    count: int
    step_us: int
    lead_s: float
    raw_shift_us: int
    """The bare timers are due so much away from the tasks, so that the two do not fight for the
    processor at the same instant."""
    work: str = "noop"
    ms: float = 0.0

    def due_us(self, first_us: int) -> Callable[[int], float]:
        """The instant of each task."""
        return lambda number: first_us + number * self.step_us


@dataclass(frozen=True, slots=True)
class Timed:
    """What came out, in milliseconds."""

    first_us: int
    starts: list[tuple[int, int]]
    late: list[float]
    faults: dict[str, int]
    bare: dict[str, float]
    """the percentiles of the bare timers"""
    rss_mb: float
    """of the first node, when all was over"""

    @property
    def spread(self) -> dict[str, float]:
        """The percentiles of the tasks."""
        return spread(self.late)


def evenly(sizes: Sizes, rate: int, seconds: float, work: str = "noop", ms: float = 0.0) -> Plan:
    """So many a second, the bare timers half a step after them."""
    step_us = 1_000_000 // rate
    count = max(1, round(rate * seconds))
    return Plan(count, step_us, sizes.lead_s(count), step_us // 2, work, ms)


Meanwhile = Callable[[int], Awaitable[None]]
"""Gets the instant of the first task, in microseconds since 1970."""


async def nothing(_first_us: int) -> None:
    """Meanwhile."""


async def run_timed(cluster: Cluster, plan: Plan, meanwhile: Meanwhile = nothing) -> Timed:
    """Schedule, wait until all has started, stop the nodes."""
    first_us, bare = await beside_timers(cluster, plan, meanwhile)
    await cluster.all_started(plan.count)
    early = await early_by_the_database(cluster, first_us)
    memory_mb = rss_mb(cluster.workers[0].pid)
    starts = await cluster.stop()
    late_ms, faults = lateness(starts, plan.count, plan.due_us(first_us))
    faults["early by the database"] = early
    return Timed(first_us, starts, late_ms, faults, bare, memory_mb)


async def beside_timers(
    cluster: Cluster, plan: Plan, meanwhile: Meanwhile
) -> tuple[int, dict[str, float]]:
    """Schedule, and wait until the bare timers are over; the first instant, and their percentiles.

    `meanwhile` begins when everything is scheduled; the timers are in a process of their own.
    """
    async with cluster.place.child("raw_process") as timers:
        await timers.ready()
        first_us = _first_us(plan)
        bare = asyncio.create_task(
            timers.ask(
                "timers", count=plan.count, first_us=first_us + plan.raw_shift_us,
                step_us=plan.step_us, work=plan.work, ms=plan.ms,
            )
        )  # fmt: skip
        try:
            await cluster.schedule(plan.count, first_us, plan.step_us, kind=plan.work, ms=plan.ms)
            await meanwhile(first_us)
            return first_us, await bare
        finally:
            bare.cancel()


async def early_by_the_database(cluster: Cluster, since_us: int) -> int:
    """Tasks due since then that started before their instant, as history has it."""
    async with cluster.place.connection() as conn:
        since = _EPOCH + timedelta(microseconds=since_us)
        return int(await conn.fetchval(_EARLY, since))


def _first_us(plan: Plan) -> int:
    return (time.time_ns() // 1_000_000 + round(plan.lead_s * 1000)) * 1000
