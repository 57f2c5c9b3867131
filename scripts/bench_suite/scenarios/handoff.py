"""One of several nodes gets SIGTERM: how late tasks are that it would have fired."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from ..cluster import warm
from ..numbers import late_by_number, percentile
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .timed import evenly, run_timed

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_AT = 1 / 3
"""of the time in which tasks become due"""
_AFTER_US = 1_000_000


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the bare timers in the same seconds."""
    plan = evenly(sizes, sizes.leave_rate, sizes.leave_seconds, "wait", sizes.leave_work_ms)
    sent_us = 0.0
    async with warm(ground, sizes.leave_nodes) as cluster:

        async def leave(first_us: int) -> None:
            nonlocal sent_us
            await asyncio.sleep(first_us / 1e6 + sizes.leave_seconds * _AT - time.time())
            cluster.workers[0].signal(signal.SIGTERM)
            sent_us = time.time_ns() / 1000

        timed = await run_timed(cluster, plan, leave)
    due_us = plan.due_us(timed.first_us)
    late = late_by_number(timed.starts, plan.count, due_us)
    after = [ms for number, ms in late.items() if 0 <= due_us(number) - sent_us < _AFTER_US]
    ours = timed.spread | {"after": percentile(after, 100)}
    return Sample(ours, timed.bare | {"after": timed.bare["max"]}, timed.faults)


SCENARIO = Scenario(
    "handoff",
    "tasks due evenly over time on several nodes, handlers that wait; one of the nodes gets"
    " SIGTERM after a third of the time",
    "bare loop.call_at timers in a process of their own, in the same seconds, that do the same",
    (
        Figure("p50", "lateness, SIGTERM to one node, p50", "ms"),
        Figure("p99", "lateness, SIGTERM to one node, p99", "ms", Target(Measure.VALUE, most=10.0)),
        Figure("max", "lateness, SIGTERM to one node, max", "ms"),
        Figure("after", "lateness in the second after SIGTERM, max (raw: of all)", "ms"),
    ),
    run,
)
