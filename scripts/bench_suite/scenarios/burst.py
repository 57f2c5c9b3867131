"""Tasks of one instant: how long until the last of them has started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..cluster import warm
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .timed import Plan, run_timed

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_APART_US = 1_000_000


def _scenario(name: str, count_of: Callable[[Sizes], int], most_ms: float) -> Scenario:
    async def run(ground: Ground, sizes: Sizes) -> Sample:
        """One run, the bare timers a second before."""
        count = count_of(sizes)
        plan = Plan(count, 0, sizes.lead_s(count) + _APART_US / 1e6, -_APART_US)
        async with warm(ground) as cluster:
            timed = await run_timed(cluster, plan)
        return Sample(timed.spread, timed.bare, timed.faults)

    def figures(sizes: Sizes) -> tuple[Figure, ...]:
        of = f"{count_of(sizes):,} of one instant"
        return (
            Figure("p50", f"lateness, {of}, p50", "ms"),
            Figure("p99", f"lateness, {of}, p99", "ms"),
            Figure("max", f"{of}, all started", "ms", Target(Measure.VALUE, most=most_ms)),
        )

    return Scenario(
        name,
        "tasks due at one instant, scheduled ahead; the handler's first act against that instant",
        "as many bare loop.call_at timers of one instant in a process of their own, a second"
        " before",
        figures,
        run,
    )


SCENARIOS = (
    _scenario("burst", lambda sizes: sizes.burst_tasks, 100.0),
    _scenario("burst-large", lambda sizes: sizes.burst_large_tasks, 1_000.0),
)
