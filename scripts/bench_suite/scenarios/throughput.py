"""No-op tasks that are due already: how many a second one node runs and settles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .. import raw
from ..cluster import until_empty
from ..fill import vacuum
from ..numbers import mean_of
from ..processes import BenchError
from ..scenario import Figure, Measure, Sample, Scenario, Target

if TYPE_CHECKING:
    from ..processes import Child
    from ..server import Ground
    from ..sizes import Sizes


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the raw figure before and after it."""
    before = await _raw(ground, sizes.throughput_tasks)
    ours, faults = await _ours(ground, sizes.throughput_tasks)
    after = await _raw(ground, sizes.throughput_tasks)
    return Sample(ours, mean_of(before, after), faults)


async def _raw(ground: Ground, rows: int) -> dict[str, float]:
    async with ground.raw() as raw_process:
        return {
            key: await raw_drain(raw_process, rows, pipelined=pipelined)
            for key, pipelined in (("per_s", True), ("per_s_in_turn", False))
        }


async def raw_drain(
    raw_process: tuple[Child, str], rows: int, *, pipelined: bool = False, held: bool = False
) -> float:
    """Rows a second that asyncpg alone leases and settles; `held`: beside an open snapshot."""
    process, dsn = raw_process
    answer = await process.ask("drain", dsn=dsn, rows=rows, pipelined=pipelined, held=held)
    if answer["done"] != rows:
        raise BenchError(f"the raw loop settled {answer['done']} of {rows} rows")
    return float(answer["per_s"])


async def _ours(ground: Ground, count: int) -> tuple[dict[str, float], dict[str, int]]:
    async with ground.database(migrated=True) as place, place.connection() as conn:
        async with place.child("producer") as producer:
            first_us = time.time_ns() // 1000 - 1_000_000 - count
            await producer.ask("schedule", count=count, first_us=first_us, step_us=1)
        await vacuum(conn)
        async with place.worker() as worker:
            over_ns = await until_empty(conn, [worker])
            await worker.stop()
            starts = worker.starts()
        settled = await conn.fetchval("select count(*) from delayq.task_history")
    seconds = (over_ns - min(at_ns for _, at_ns in starts)) / 1e9
    faults = {
        "lost": count - settled,
        "twice": len(starts) - len({number for number, _ in starts}),
    }
    return dict.fromkeys(("per_s", "per_s_in_turn"), count / seconds), faults


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
            Target(Measure.RATIO, least=1.0),
        ),
        # the ceiling of both cores: nothing is run between the two, and no handler waits its turn
        Figure("per_s", "no-op throughput, one node (raw: two connections)", "/s"),
    ),
    run,
)
