"""How many tasks a second an application schedules: by single calls, and in bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cluster import warm
from ..numbers import mean_of
from ..raw_calls import BULK
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .calls import POOL, raw_inserts, ways

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_FROM_SINGLE = 1.4


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the raw figures before and after it."""
    before = await raw_inserts(ground, sizes)
    async with warm(ground) as cluster:
        ask = cluster.producer.ask
        ours = {
            key: (await ask("rate", seconds=sizes.schedule_seconds, callers=callers))["per_s"]
            for key, callers in ways(sizes)
        }
        bulk = await ask("bulk", count=sizes.bulk_tasks)
        await cluster.stop()
    after = await raw_inserts(ground, sizes)
    faults = {"lost": 2 * sizes.bulk_tasks - len(set(bulk["ids"]))}
    raw = mean_of(before, after)
    return Sample(
        ours | {"bulk": bulk["per_s"], "bulk_call": bulk["call_per_s"]},
        raw | {"bulk_call": raw["bulk"]},
        faults,
    )


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    bulk = f"schedule, {sizes.bulk_tasks:,} in one call"
    return (
        # a call takes at most so many times as long as a bare INSERT
        Figure(
            "single",
            "schedule, one after another",
            "/s",
            Target(Measure.RATIO, least=round(1 / _FROM_SINGLE, 3)),
        ),
        Figure(
            "many",
            f"schedule, {sizes.callers} callers",
            "/s",
            Target(Measure.RATIO, least=3.0),
        ),
        Figure("bulk", bulk, "/s", Target(Measure.RATIO, least=0.5)),
        Figure("bulk_call", f"{bulk}, requests made before", "/s"),
    )


SCENARIO = Scenario(
    "schedule",
    "handler.after an hour ahead, a node up: one call after another, then many callers at once,"
    " then schedule_many in one call, with the making and validating of its requests (from a"
    " generator) or without",
    f"one INSERT … RETURNING a call, the same callers on a pool of {POOL}; in bulk, INSERT …"
    f" SELECT FROM unnest … RETURNING of {BULK:,} rows a statement; before and after",
    _figures,
    run,
)
