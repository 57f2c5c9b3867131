"""One task alone: from its instant until it is settled, as somebody else sees it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from .. import raw
from ..numbers import lateness, percentile
from ..processes import BenchError
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .timed import warm

if TYPE_CHECKING:
    from delayq.database import Connection

    from ..options import Sizes
    from ..server import Ground

_EARLY_S = 0.002
_LIMIT_S = 5.0
_THERE = "select 1 from delayq.tasks where id = $1"


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run; a raw lease and settle half way between each two lone tasks."""
    count, step_us = sizes.lone_tasks, round(sizes.lone_spacing_seconds * 1e6)
    async with (
        ground.database(migrated=False) as other,
        raw.connections(other.dsn, 1) as (bare,),
        warm(ground) as node,
        node.place.connection() as observer,
    ):
        await raw.prepare(bare, count)
        first_us = time.time_ns() // 1000 + round(sizes.lead_seconds * 1e6)
        ids = await node.schedule(count, first_us, step_us)
        done_ms, raw_ms = [], []
        for number, task_id in enumerate(ids):
            due_us = first_us + number * step_us
            done_ms.append(await _until_gone(observer, task_id, due_us))
            await _sleep_until(due_us + step_us / 2)
            raw_ms.append(await _round_trips(bare))
        await node.worker.stop()
        starts = node.worker.starts()
    late_ms, faults = lateness(starts, count, lambda number: first_us + number * step_us)
    ours = {"done": percentile(done_ms, 50), "start": percentile(late_ms, 50)}
    both = [lease + settle for lease, settle in raw_ms]
    leases = [lease for lease, _ in raw_ms]
    return Sample(ours, {"done": percentile(both, 50), "start": percentile(leases, 50)}, faults)


async def _sleep_until(at_us: float) -> None:
    await asyncio.sleep(max(0.0, at_us / 1e6 - time.time()))


async def _until_gone(observer: Connection, task_id: int, due_us: float) -> float:
    """Milliseconds from due until an observer who asks all the time no longer sees the row."""
    await _sleep_until(due_us - _EARLY_S * 1e6)
    while await observer.fetchval(_THERE, task_id) is not None:
        if time.time() > due_us / 1e6 + _LIMIT_S:
            raise BenchError(f"a lone task was not settled within {_LIMIT_S:g} s")
    return (time.time_ns() / 1000 - due_us) / 1000


async def _round_trips(bare: Connection) -> tuple[float, float]:
    """Milliseconds of a lease of one due row, and of its settle."""
    began = time.perf_counter()
    rows = await bare.fetch(raw.LEASE, datetime(2000, 1, 1, tzinfo=UTC), 0, 1, 7, 7)
    leased = time.perf_counter()
    await bare.execute(raw.SETTLE, [rows[0][0]], [rows[0][1]])
    settled = time.perf_counter()
    return (leased - began) * 1000, (settled - leased) * 1000


SCENARIO = Scenario(
    "lone",
    "single tasks, scheduled ahead, well apart; from due until an observer sees that it is settled",
    "one due row leased and settled by asyncpg (the statements of throughput), its two round trips "
    "added up, half way between each two tasks; beside the start: the lease alone",
    (
        Figure("done", "lone task, due to settled, p50", "ms", Target(Measure.RATIO, most=1.0)),
        Figure("start", "lone task, due to started, p50", "ms"),
    ),
    run,
)
