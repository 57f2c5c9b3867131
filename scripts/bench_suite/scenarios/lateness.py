"""Tasks spread over time: how late their handlers start, which do nothing, wait or compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..cluster import warm
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .timed import evenly, run_timed

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_RAW = (
    "bare loop.call_at timers in a process of their own, in the same seconds, half a step apart,"
    " that do the same"
)


def _scenario(
    name: str,
    about: str,
    rate_of: Callable[[Sizes], int],
    work: str,
    targets: tuple[float | None, float | None],
    *,
    brief: bool = True,
) -> Scenario:
    async def run(ground: Ground, sizes: Sizes) -> Sample:
        """One run, the bare timers in the same seconds."""
        plan = evenly(sizes, rate_of(sizes), sizes.lateness_seconds, work, sizes.work_ms)
        async with warm(ground) as cluster:
            timed = await run_timed(cluster, plan)
        return Sample(timed.spread, timed.bare, timed.faults)

    def figures(sizes: Sizes) -> tuple[Figure, ...]:
        title = f"lateness, {rate_of(sizes):,}/s{about}"
        p50, p99 = (
            None if most is None else Target(Measure.DIFFERENCE, most=most) for most in targets
        )
        return (
            Figure("p50", f"{title}, p50", "ms", p50),
            Figure("p90", f"{title}, p90", "ms"),
            Figure("p99", f"{title}, p99", "ms", p99),
            Figure("max", f"{title}, max", "ms"),
        )

    return Scenario(
        name,
        f"tasks due evenly over time, scheduled ahead{about}; the handler's first act against the"
        " due instant",
        _RAW,
        figures,
        run,
        brief,
    )


SCENARIOS = (
    _scenario("lateness", "", lambda sizes: sizes.lateness_rate, "noop", (0.3, 3.0)),
    _scenario("lateness-fast", "", lambda sizes: sizes.lateness_fast_rate, "noop", (None, 10.0)),
    _scenario(
        "lateness-wait",
        ", handlers that wait",
        lambda sizes: sizes.lateness_rate,
        "wait",
        (0.3, 3.0),
    ),
    _scenario(
        "lateness-wait-fast",
        ", handlers that wait",
        lambda sizes: sizes.lateness_fast_rate,
        "wait",
        (None, 10.0),
    ),
    # a core is full at 1,000 / work_ms a second: no promise is made of it
    _scenario(
        "lateness-compute",
        ", handlers that compute",
        lambda sizes: sizes.lateness_cpu_rate,
        "compute",
        (None, None),
        brief=False,
    ),
)
