"""Ways of calling, raw beside: one after another, by many callers at once, in bulk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..processes import BenchError

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..server import Ground
    from ..sizes import Sizes

POOL = 10
"""what `client_connections` is by default"""
_AHEAD_US = 3_600_000_000


def ways(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    """The single calls: by their key, and how many callers."""
    return ("single", 1), ("many", sizes.callers)


async def raw_inserts(ground: Ground, sizes: Sizes) -> dict[str, float]:
    """Inserts a second without delayq."""
    async with ground.raw() as (process, dsn):
        found = {}
        for key, callers in ways(sizes):
            answer = await process.ask(
                "insert", dsn=dsn, seconds=sizes.schedule_seconds, callers=callers, pool=POOL
            )
            found[key] = answer["per_s"]
        bulk = await process.ask("insert_bulk", dsn=dsn, rows=sizes.bulk_tasks)
    return found | {"bulk": bulk["per_s"]}


async def raw_changes(ground: Ground, sizes: Sizes, verb: str) -> dict[str, float]:
    """Changes a second without delayq."""
    async with ground.raw() as (process, dsn):
        found = {}
        for key, callers in ways(sizes):
            answer = await process.ask(
                "change", dsn=dsn, verb=verb, rows=sizes.cancel_tasks, callers=callers, pool=POOL
            )
            found[key] = answer["per_s"]
        bulk = await process.ask("change_bulk", dsn=dsn, verb=verb, rows=sizes.bulk_tasks)
    return found | {"bulk": bulk["per_s"]}


async def changes(cluster: Cluster, sizes: Sizes, verb: str) -> tuple[dict[str, float], int]:
    """Changes a second of tasks that are pending, in each way; how many were refused."""
    rates, refused = {}, 0
    for key, callers in ways(sizes):
        ids = await _pending(cluster, sizes.cancel_tasks)
        answer = await cluster.producer.ask("change", verb=verb, ids=ids, callers=callers)
        rates[key] = answer["per_s"]
        refused += len(ids) - answer["done"]
    ids = await _pending(cluster, sizes.bulk_tasks)
    answer = await cluster.producer.ask("change_bulk", verb=verb, ids=ids)
    rates["bulk"] = answer["per_s"]
    return rates, refused + len(ids) - answer["done"]


async def _pending(cluster: Cluster, count: int) -> list[int]:
    ids = await cluster.schedule(count, time.time_ns() // 1000 + _AHEAD_US, 0)
    if len(set(ids)) != count:
        raise BenchError(f"{count} tasks were scheduled under {len(set(ids))} ids")
    return ids
