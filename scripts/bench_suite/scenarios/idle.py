"""Nodes that have nothing to do: how many statements a second each of them sends."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from ..processes import BenchError
from ..scenario import Figure, Sample, Scenario
from .timed import active

if TYPE_CHECKING:
    from ..options import Sizes
    from ..server import Ground, Place

_SETTLE_S = 6.0
"""joining, and the first sweep after it, are no idling"""
_FLUSH_S = 15.0
"""a session that idles tells how many transactions it had only after ten seconds"""
_POLL_S = 2.0
# As any client in any language would write them.
_FILL = """
    insert into delayq.tasks (kind, payload, execute_at)
    select 'noop', jsonb_build_object('n', n), now() + interval '1 hour' + n * interval '1 ms'
      from generate_series(1, $1::integer) n
"""


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the pollers in the same seconds in a database of their own."""
    async with (
        ground.database(migrated=True, counted=True) as place,
        ground.database(migrated=False, counted=True) as other,
        other.child("raw") as pollers,
        AsyncExitStack() as stack,
    ):
        await _fill(place, sizes.idle_pending)
        workers = [
            await stack.enter_async_context(place.worker(f"worker-{i}"))
            for i in range(sizes.idle_nodes)
        ]
        await active(place, workers)
        await asyncio.sleep(_SETTLE_S if ground.counts_statements else _FLUSH_S)
        seconds = sizes.idle_seconds + 2 * _POLL_S
        polling = asyncio.create_task(
            pollers.ask("poll", dsn=other.dsn, seconds=seconds, pollers=sizes.idle_nodes)
        )
        await asyncio.sleep(_POLL_S)
        ours, raw = await _count(ground, (place.name, other.name), sizes.idle_seconds)
        await polling
        for worker in workers:
            await worker.stop()
        ran = sum(len(worker.starts()) for worker in workers)
    nodes = sizes.idle_nodes
    counted = "pg_stat_statements" if ground.counts_statements else "transactions only"
    return Sample(
        {"per_s": ours / nodes}, {"per_s": raw / nodes}, {"ran": ran}, {"counted": counted}
    )


async def _fill(place: Place, count: int) -> None:
    async with place.connection() as conn:
        await conn.execute(_FILL, count)
        await conn.execute("vacuum analyze delayq.tasks")
        await conn.execute("checkpoint")


async def _count(ground: Ground, databases: tuple[str, str], seconds: float) -> tuple[float, float]:
    """Statements a second in each of two databases."""
    before, began = [await ground.statements(name) for name in databases], time.monotonic()
    await asyncio.sleep(seconds)
    after, took = [await ground.statements(name) for name in databases], time.monotonic() - began
    if min(after) == 0:
        raise BenchError("no statements were counted")
    ours, raw = ((b - a) / took for a, b in zip(before, after, strict=True))
    return ours, raw


SCENARIO = Scenario(
    "idle",
    "statements of all sorts, BEGIN and COMMIT too, sent by nodes without work, per node",
    "as many connections that LISTEN and look for a due row once a second, in the same seconds",
    (Figure("per_s", "idle statements per node", "/s"),),
    run,
)
