"""Very many tasks that are overdue when a node starts: how it works them off, and what else.

Meanwhile new tasks of a higher priority become due; memory must not grow with the backlog, and
the event loop must turn.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import usage
from ..cluster import active, counters, until_empty, warm
from ..fill import OVERDUE_FROM, fill_overdue, vacuum
from ..lag import lag_ms
from ..numbers import late_by_number, spread
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .nodes import burst_rate
from .throughput import raw_drain

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_SOON_US = 700_000
_PRIORITY = 10
_FAST_PER_S = 60_000
"""new tasks become due for as long as a backlog would last that is worked off so fast"""
_LAST_END = """
    select (extract(epoch from max(finished_at)) * 1e6)::bigint
      from delayq.task_history where priority < $1
"""


@dataclass(frozen=True, slots=True)
class _New:
    """The tasks that become due meanwhile."""

    first_us: int
    step_us: int
    count: int

    def due_us(self, number: int) -> float:
        """The instant of one."""
        return self.first_us + number * self.step_us


@dataclass(frozen=True, slots=True)
class _Drained:
    """One backlog, worked off."""

    new: _New
    scheduled_us: float
    """when all of them were"""
    bare: dict[str, float]
    starts: list[tuple[int, int]]
    over_ns: int
    """when the last of the backlog was settled: new tasks may become due for longer"""
    settled: int
    peak_mb: float
    lag_ms: dict[str, float]


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run: raw, then a burst on a warm node, then the backlog on one that starts."""
    async with ground.raw() as raw_process:
        raw_per_s = await raw_drain(raw_process, sizes.backlog_tasks)
    async with warm(ground) as cluster:
        idle_mb = usage.rss_mb(cluster.workers[0].pid)
        burst_per_s, burst_faults = await burst_rate(cluster, sizes.nodes_tasks, sizes)
    drained = await _drain(ground, sizes)
    backlog = [(n, at_ns) for n, at_ns in drained.starts if n >= OVERDUE_FROM]
    seconds = (drained.over_ns - min(at_ns for _, at_ns in backlog)) / 1e9
    late = _late_meanwhile(drained)
    ours = {
        "burst": burst_per_s,
        "per_s": sizes.backlog_tasks / seconds,
        "rss": drained.peak_mb - idle_mb,
        **{f"new_{key}": value for key, value in spread(late).items()},
        **drained.lag_ms,
    }
    raw = {"burst": raw_per_s, "per_s": raw_per_s}
    faults = {
        "lost": sizes.backlog_tasks + drained.new.count - drained.settled,
        "twice": len(drained.starts) - len({number for number, _ in drained.starts}),
        "early": sum(late_ms < 0 for late_ms in late),
        "burst lost": burst_faults["lost"],
    }
    return Sample(
        ours,
        raw | {f"new_{key}": value for key, value in drained.bare.items()},
        faults,
        {"new tasks that were due while the backlog lasted:": str(len(late))},
    )


def _late_meanwhile(drained: _Drained) -> list[float]:
    """Of the new tasks that were due when all were scheduled, before the backlog was over."""
    new = drained.new
    last_ns = max(at_ns for n, at_ns in drained.starts if n >= OVERDUE_FROM)
    late = late_by_number(drained.starts, new.count, new.due_us)
    return [
        late_ms
        for number, late_ms in late.items()
        if drained.scheduled_us < new.due_us(number) < last_ns / 1000
    ]


async def _drain(ground: Ground, sizes: Sizes) -> _Drained:
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(ground.database(migrated=True))
        conn = await stack.enter_async_context(place.connection())
        producer = await stack.enter_async_context(place.child("producer"))
        timers = await stack.enter_async_context(place.child("raw_process"))
        await timers.ready()
        await producer.ready()
        await fill_overdue(conn, sizes.backlog_tasks)
        await vacuum(conn)
        worker = await stack.enter_async_context(place.worker())
        await active(place, [worker])
        async with usage.watched(worker.pid) as peak:
            new = _new(sizes)
            bare = asyncio.create_task(
                timers.ask(
                    "timers", count=new.count, first_us=new.first_us + new.step_us // 2,
                    step_us=new.step_us,
                )
            )  # fmt: skip
            await producer.ask(
                "schedule", count=new.count, first_us=new.first_us, step_us=new.step_us,
                priority=_PRIORITY,
            )  # fmt: skip
            scheduled_us = time.time_ns() / 1000
            await until_empty(conn, [worker])
            bare_spread = await bare
        (counted,) = await counters(conn)
        await worker.stop()
        settled = await conn.fetchval("select count(*) from delayq.task_history")
        over_us = await conn.fetchval(_LAST_END, _PRIORITY)
        return _Drained(
            new=new,
            scheduled_us=scheduled_us,
            bare=bare_spread,
            starts=worker.starts(),
            over_ns=over_us * 1000,
            settled=settled,
            peak_mb=peak.mb,
            lag_ms=lag_ms(counted),
        )


def _new(sizes: Sizes) -> _New:
    seconds = max(0.5, sizes.backlog_tasks / _FAST_PER_S)
    return _New(
        first_us=time.time_ns() // 1000 + _SOON_US,
        step_us=1_000_000 // sizes.lateness_rate,
        count=max(1, round(sizes.lateness_rate * seconds)),
    )


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    about = f"of {sizes.backlog_tasks:,} overdue"
    new = f"lateness of new tasks at {sizes.lateness_rate}/s meanwhile"
    return (
        Figure("burst", f"burst of {sizes.nodes_tasks:,}, one node", "/s"),
        Figure(
            "per_s", f"backlog {about}", "/s", Target(Measure.RATIO, least=0.8, of="burst")
        ),
        Figure(
            "rss", f"memory of the node beyond idle, backlog {about}", "MB",
            Target(Measure.VALUE, most=100.0), alone=True,
        ),
        Figure("new_p50", f"{new}, p50", "ms"),
        Figure("new_p99", f"{new}, p99", "ms"),
        Figure("new_max", f"{new}, max", "ms"),
        Figure(
            "lag_p99", "event loop stalls meanwhile, p99", "ms",
            Target(Measure.VALUE, most=20.0), alone=True,
        ),
        Figure("lag_max", "event loop stalls meanwhile, max", "ms", alone=True),
    )  # fmt: skip


SCENARIO = Scenario(
    "backlog",
    "tasks overdue for two days when a node starts, from the first start until the last of them is"
    " settled, beside a burst of one instant on a warm node; the node's resident memory at its"
    " peak, less that of an idle node; stalls of its event loop by its own probe, in the last"
    " minute; meanwhile tasks of a higher priority become due evenly",
    "asyncpg alone leases and settles as many rows, in turn, as in throughput; bare"
    " loop.call_at timers in the same seconds",
    _figures,
    run,
)
