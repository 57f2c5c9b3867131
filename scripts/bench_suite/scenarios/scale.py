"""Many nodes on one database, handlers that wait: how the work is shared, and what it costs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ..cluster import warm
from ..scenario import NAN, Figure, Measure, Sample, Scenario, Target
from ..usage import cpu_s
from .timed import evenly, run_timed

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..server import Ground
    from ..sizes import Sizes

_MARGIN_S = 0.2
"""statements are counted from so long after the first task is due to so long before the last"""


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the bare timers in the same seconds."""
    plan = evenly(sizes, sizes.scale_rate, sizes.scale_seconds, "wait", sizes.leave_work_ms)
    ours: dict[str, float] = {}
    async with (
        ground.database(migrated=True) as place,
        ground.counted(place),
        warm(ground, sizes.scale_nodes, place) as cluster,
    ):

        async def count(first_us: int) -> None:
            await asyncio.sleep(first_us / 1e6 + _MARGIN_S - time.time())
            seconds = sizes.scale_seconds - 2 * _MARGIN_S
            ours.update(await _counted(ground, cluster, seconds, sizes))

        timed = await run_timed(cluster, plan, count)
        shares = [sum(number >= 0 for number, _ in each.starts()) for each in cluster.workers]
    mean = sum(shares) / len(shares)
    ours |= timed.spread | {
        "busiest": max(shares) / mean,
        "quietest": min(shares) / mean,
    }
    counted = "pg_stat_statements" if ground.counts_statements else "transactions only"
    return Sample(ours, timed.bare, timed.faults, {"counted": counted})


async def _counted(
    ground: Ground, cluster: Cluster, seconds: float, sizes: Sizes
) -> dict[str, float]:
    """Per node: statements a second and connections; statements a task; processor of all."""
    place, nodes = cluster.place, len(cluster.workers)
    pids = [worker.pid for worker in cluster.workers]
    backends = await ground.backends(place) if ground.own else []
    before, used, served = await ground.statements(place.name), cpu_s(pids), cpu_s(backends)
    began = time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    sent = await ground.statements(place.name) - before
    async with place.connection() as conn:
        sessions = await conn.fetchval(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name like 'delayq/%'"
        )
    return {
        "statements": sent / took,
        "per_task": sent / took / sizes.scale_rate,
        "connections": sessions / nodes,
        "cpu": 100 * (cpu_s(pids) - used) / took,
        "server_cpu": 100 * (cpu_s(backends) - served) / took if backends else NAN,
    }


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    nodes = sizes.scale_nodes
    about = f"{nodes} nodes, {sizes.scale_rate:,} tasks a second"
    return (
        Figure("p50", f"lateness, {about}, p50", "ms"),
        Figure("p99", f"lateness, {about}, p99", "ms", Target(Measure.VALUE, most=10.0)),
        Figure("busiest", "tasks of the busiest node, of the mean", "x", alone=True),
        Figure("quietest", "tasks of the quietest node, of the mean", "x", alone=True),
        Figure("statements", "statements, all nodes", "/s", alone=True),
        Figure("per_task", "statements for each task", "", alone=True),
        Figure("connections", "connections of a node", "", alone=True),
        Figure("cpu", f"processor, {nodes} nodes together", "%", alone=True),
        Figure("server_cpu", "processor of the server's sessions", "%", alone=True),
    )


SCENARIO = Scenario(
    "scale",
    "tasks due evenly over time on many nodes, handlers that wait: how evenly they are shared, and"
    " the statements, connections and processor (percent of one core) that it takes",
    "bare loop.call_at timers in a process of their own, in the same seconds, that do the same",
    _figures,
    run,
    brief=False,
)
