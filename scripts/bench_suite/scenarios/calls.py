"""Ways of calling, raw beside: one after another, by many callers at once, in bulk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..cluster import warm
from ..numbers import mean_of
from ..processes import BenchError
from ..scenario import Figure, Sample, Scenario

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


def scenario_of_changes(verb: str, refused: str, what: str, raw: str) -> Scenario:
    """The scenario of a verb that changes pending tasks; `refused` names what it did not do."""

    async def run(ground: Ground, sizes: Sizes) -> Sample:
        """One run, the raw figures before and after it."""
        before = await _raw_changes(ground, sizes, verb)
        async with warm(ground) as cluster:
            ours, not_done = await _changes(cluster, sizes, verb)
            ran = sum(number >= 0 for number, _ in await cluster.stop())
        after = await _raw_changes(ground, sizes, verb)
        return Sample(ours, mean_of(before, after), {refused: not_done, "ran": ran})

    def figures(sizes: Sizes) -> tuple[Figure, ...]:
        return (
            Figure("single", f"{verb}, one after another", "/s"),
            Figure("many", f"{verb}, {sizes.callers} callers", "/s"),
            Figure("bulk", f"{verb}, {sizes.bulk_tasks:,} in one call", "/s"),
        )

    return Scenario(verb, what, raw, figures, run)


async def _raw_changes(ground: Ground, sizes: Sizes, verb: str) -> dict[str, float]:
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


async def _changes(cluster: Cluster, sizes: Sizes, verb: str) -> tuple[dict[str, float], int]:
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
