"""How many tasks a second an application schedules, one call each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..numbers import mean_of
from ..scenario import Figure, Sample, Scenario
from .timed import warm

if TYPE_CHECKING:
    from ..options import Sizes
    from ..server import Ground

POOL = 10
"""what `client_connections` is by default"""


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the raw figures before and after it."""
    before = await _raw(ground, sizes)
    async with warm(ground) as node:
        ours = {
            key: (await node.producer.ask("rate", seconds=sizes.schedule_seconds, callers=callers))[
                "per_s"
            ]
            for key, callers in _callers(sizes)
        }
        await node.worker.stop()
    return Sample(ours, mean_of(before, await _raw(ground, sizes)))


def _callers(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return ("single", 1), ("many", sizes.callers)


async def _raw(ground: Ground, sizes: Sizes) -> dict[str, float]:
    async with ground.raw() as (process, dsn):
        found = {}
        for key, callers in _callers(sizes):
            answer = await process.ask(
                "insert", dsn=dsn, seconds=sizes.schedule_seconds, callers=callers, pool=POOL
            )
            found[key] = answer["per_s"]
    return found


SCENARIO = Scenario(
    "schedule",
    "handler.after an hour ahead, a node up: one call after another, then many callers at once",
    f"one INSERT … RETURNING a call, the same callers on a pool of {POOL}; before and after",
    (
        Figure("single", "schedule, one after another", "/s"),
        Figure("many", "schedule, many callers", "/s"),
    ),
    run,
)
