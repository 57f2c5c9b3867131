"""Several nodes on one database: what they run together, and how often two want the same task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeAlias

from ..cluster import Cluster, counters, until_empty, warm
from ..numbers import lateness
from ..processes import BenchError
from ..scenario import Figure, Measure, Sample, Scenario, Target

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

Meanwhile: TypeAlias = Callable[[], Awaitable[None]]
Rate: TypeAlias = tuple[float, dict[str, int]]
"""tasks a second, and what went wrong"""
_COUNT_S = 5.0
"""so long it takes until every node has told what it counted: it does with each beat"""


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run: for each number of nodes, raw processes first, then the nodes."""
    ours: dict[str, float] = {}
    raw: dict[str, float] = {}
    faults: dict[str, int] = {}
    for count in sizes.nodes:
        raw[f"per_s_{count}"] = await _raw(ground, count, sizes.nodes_tasks)
        async with warm(ground, count) as cluster:
            if count == 1:
                found = await burst_rate(cluster, sizes.nodes_tasks, sizes)
            else:
                ours[f"misses_{count}"], found = await _together(cluster, sizes)
        ours[f"per_s_{count}"], wrong = found
        faults |= {f"{what}, {count} nodes": number for what, number in wrong.items()}
    return Sample(ours, raw, faults)


async def _together(cluster: Cluster, sizes: Sizes) -> tuple[float, Rate]:
    """Percent of the leases that found nothing while tasks become due evenly; then a burst."""
    counted: list[tuple[int, int]] = []

    async def count() -> None:
        async with cluster.place.connection() as conn:
            nodes = await counters(conn)
        leased = sum(node["leased"] for node in nodes)
        counted.append((leased, sum(node["missed_leases"] for node in nodes)))

    await _evenly(cluster, sizes, count)
    rate = await burst_rate(cluster, sizes.nodes_tasks, sizes, count)
    (asked_before, missed_before), (asked, missed) = counted
    if asked == asked_before:
        raise BenchError("no node has counted a lease")
    return 100 * (missed - missed_before) / (asked - asked_before), rate


async def _evenly(cluster: Cluster, sizes: Sizes, first: Meanwhile) -> None:
    """Tasks due evenly, run to the last; `first` is done before the first of them is due."""
    step_us = 1_000_000 // sizes.miss_rate
    tasks = max(1, round(sizes.miss_rate * sizes.miss_seconds))
    first_us = _soon_us(max(_COUNT_S, sizes.lead_s(tasks)))
    await cluster.schedule(tasks, first_us, step_us, number=-tasks - cluster.warmed)
    await first()
    await asyncio.sleep((first_us + tasks * step_us) / 1e6 - time.time())
    async with cluster.place.connection() as conn:
        await until_empty(conn, cluster.workers)


async def burst_rate(
    cluster: Cluster, tasks: int, sizes: Sizes, first: Meanwhile | None = None
) -> Rate:
    """Tasks of one instant a second, from that instant until the table is empty; ends the nodes.

    `first` is done before that instant.
    """
    lead_s = sizes.lead_s(tasks)
    due_us = _soon_us(lead_s if first is None else max(_COUNT_S, lead_s))
    await cluster.schedule(tasks, due_us, 0)
    if first is not None:
        await first()
    async with cluster.place.connection() as conn:
        await asyncio.sleep(due_us / 1e6 - time.time())
        over_ns = await until_empty(conn, cluster.workers)
    starts = await cluster.stop()
    _, faults = lateness(starts, tasks, lambda _: due_us)
    return tasks / (over_ns / 1e9 - due_us / 1e6), faults


def _soon_us(seconds: float) -> int:
    return time.time_ns() // 1000 + round(seconds * 1e6)


async def _raw(ground: Ground, processes: int, rows: int) -> float:
    async with ground.database(migrated=False) as place, AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(place.child("raw_process")) for _ in range(processes)
        ]
        for child in children:
            await child.ready()
        await children[0].ask("fill", dsn=place.dsn, rows=rows)
        shares = await asyncio.gather(*(child.ask("share", dsn=place.dsn) for child in children))
    began_ns = min(share["began_ns"] for share in shares)
    ended_ns = max(share["ended_ns"] for share in shares)
    return float(sum(share["done"] for share in shares) / (ended_ns - began_ns) * 1e9)


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    first = f"per_s_{sizes.nodes[0]}"
    rates = [
        Figure(
            f"per_s_{count}",
            f"burst throughput, nodes: {count}",
            "/s",
            Target(Measure.RATIO, least=0.8, of=first) if count > sizes.nodes[0] else None,
        )
        for count in sizes.nodes
    ]
    misses = [
        Figure(
            f"misses_{count}",
            f"leases that found nothing, nodes: {count}",
            "%",
            Target(Measure.VALUE, most=1.0),
            alone=True,
        )
        for count in sizes.nodes
        if count > 1
    ]
    return (*rates, *misses)


SCENARIO = Scenario(
    "nodes",
    "no-op tasks of one instant, scheduled ahead, on nodes that are up; from that instant until"
    " the table is empty. Before it tasks due evenly: the leases that found nothing, of all",
    "as many processes that lease and settle in turn as in throughput, each on one connection, on"
    " rows that are due already",
    _figures,
    run,
)
