"""Tasks of one instant: how long until the last of them has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..numbers import spread
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .timed import beside_timers

if TYPE_CHECKING:
    from ..options import Sizes
    from ..server import Ground

_APART_US = 1_000_000


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the bare timers a second before."""
    late_ms, faults, bare = await beside_timers(
        ground, sizes.burst_tasks, 0, sizes.lead_seconds, -_APART_US
    )
    return Sample(spread(late_ms), bare, faults)


SCENARIO = Scenario(
    "burst",
    "tasks due at one instant, scheduled ahead; the handler's first act against that instant",
    "as many bare loop.call_at timers of one instant in a process of their own, a second before",
    (
        Figure("p50", "lateness, one instant, p50", "ms"),
        Figure("p99", "lateness, one instant, p99", "ms"),
        Figure("max", "all of one instant started", "ms", Target(Measure.VALUE, most=200.0)),
    ),
    run,
)
