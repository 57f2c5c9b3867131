"""No-op tasks that are due already: how many a second one node runs and settles."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from .. import raw
from ..numbers import mean_of
from ..processes import BenchError
from ..scenario import Figure, Measure, Sample, Scenario, Target

if TYPE_CHECKING:
    from delayq.database import Connection

    from ..options import Sizes
    from ..processes import Worker
    from ..server import Ground

_LIMIT_S = 300.0
_LOOK_S = 0.02
# From the end: the first rows are long gone, and dead ones need not be stepped over.
_LEFT = "select id from delayq.tasks order by id desc limit 1"


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the raw figure before and after it."""
    before = await _raw(ground, sizes.throughput_tasks)
    ours, faults = await _ours(ground, sizes.throughput_tasks)
    after = await _raw(ground, sizes.throughput_tasks)
    return Sample(ours, mean_of(before, after), faults)


async def _raw(ground: Ground, rows: int) -> dict[str, float]:
    async with ground.raw() as (process, dsn):
        found = {}
        for key, pipelined in (("per_s", True), ("per_s_in_turn", False)):
            answer = await process.ask("drain", dsn=dsn, rows=rows, pipelined=pipelined)
            if answer["done"] != rows:
                raise BenchError(f"the raw loop settled {answer['done']} of {rows} rows")
            found[key] = answer["per_s"]
    return found


async def _ours(ground: Ground, count: int) -> tuple[dict[str, float], dict[str, int]]:
    async with ground.database(migrated=True) as place, place.connection() as conn:
        async with place.child("producer") as producer:
            first_us = time.time_ns() // 1000 - 1_000_000 - count
            await producer.ask("schedule", count=count, first_us=first_us, step_us=1)
        await conn.execute("vacuum analyze delayq.tasks")
        await conn.execute("checkpoint")
        async with place.worker() as worker:
            over_ns = await _until_settled(conn, worker)
            await worker.stop()
            starts = worker.starts()
        settled = await conn.fetchval("select count(*) from delayq.task_history")
    seconds = (over_ns - min(at_ns for _, at_ns in starts)) / 1e9
    faults = {
        "lost": count - settled,
        "twice": len(starts) - len({number for number, _ in starts}),
    }
    return dict.fromkeys(("per_s", "per_s_in_turn"), count / seconds), faults


async def _until_settled(conn: Connection, worker: Worker) -> int:
    """When the last task was settled; looks every 20 ms, and never a tenth of the time."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        began = time.monotonic()
        if await conn.fetchval(_LEFT) is None:
            return time.time_ns()
        worker.check()
        await asyncio.sleep(max(_LOOK_S, 10 * (time.monotonic() - began)))
    raise BenchError(f"not done within {_LIMIT_S:g} s: {worker.log_tail()}")


SCENARIO = Scenario(
    "throughput",
    "tasks due before the worker starts; from the first start until the table is empty",
    f"asyncpg alone: leases {raw.BATCH} rows at a time (UPDATE … FOR UPDATE SKIP LOCKED … "
    "RETURNING, by keyset, HOT, asynchronous commit) and settles them (DELETE moved into a history "
    "table, synchronous commit); on two connections at the same time, or in turn on one; before "
    "and after",
    (
        Figure(
            "per_s_in_turn",
            "no-op throughput, one node (raw: in turn)",
            "/s",
            Target(Measure.RATIO, least=0.8),
        ),
        # the ceiling of both cores: nothing is run between the two, and no handler waits its turn
        Figure("per_s", "no-op throughput, one node (raw: two connections)", "/s"),
    ),
    run,
)
