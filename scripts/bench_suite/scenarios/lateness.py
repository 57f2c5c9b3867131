"""Tasks spread over time: how late their handlers start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..numbers import spread
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .timed import beside_timers

if TYPE_CHECKING:
    from ..options import Sizes
    from ..server import Ground


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the bare timers in the same seconds."""
    count = max(1, round(sizes.lateness_rate * sizes.lateness_seconds))
    step_us = 1_000_000 // sizes.lateness_rate
    late_ms, faults, bare = await beside_timers(
        ground, count, step_us, sizes.lead_seconds, step_us // 2
    )
    return Sample(spread(late_ms), bare, faults)


SCENARIO = Scenario(
    "lateness",
    "tasks due evenly over time, scheduled ahead; the handler's first act against the due instant",
    "bare loop.call_at timers in a process of their own, in the same seconds, half a step apart",
    (
        Figure("p50", "lateness, spread, p50", "ms", Target(Measure.DIFFERENCE, most=1.0)),
        Figure("p90", "lateness, spread, p90", "ms"),
        Figure("p99", "lateness, spread, p99", "ms", Target(Measure.DIFFERENCE, most=5.0)),
        Figure("max", "lateness, spread, max", "ms"),
    ),
    run,
)
