"""The memory of timers that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..scenario import Figure, Measure, Sample, Scenario, Target

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_SORTS = ("heap", "handles")
_WAYS = ("traced", "resident")


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, each figure in a process of its own."""
    found: dict[str, dict[str, float]] = {}
    async with ground.database(migrated=False) as place:
        for sort in _SORTS:
            found[sort] = {}
            for way in _WAYS:
                async with place.child("heap") as process:
                    answer = await process.ask(way, sort=sort, count=sizes.memory_timers)
                found[sort][way] = answer["bytes"]
    return Sample(found["heap"], found["handles"])


SCENARIO = Scenario(
    "memory",
    "timers in the heap of a node, of the instants of one window in no order: what Python"
    " allocated, and what the process grew by",
    "as many bare loop.call_at timers",
    (
        Figure("traced", "an armed timer", "bytes", Target(Measure.VALUE, most=200.0)),
        Figure("resident", "an armed timer, resident", "bytes", Target(Measure.VALUE, most=200.0)),
    ),
    run,
)
