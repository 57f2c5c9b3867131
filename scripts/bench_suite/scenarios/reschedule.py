"""How many pending tasks a second an application moves: by single calls, and in bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cluster import warm
from ..numbers import mean_of
from ..raw_calls import BULK
from ..scenario import Figure, Sample, Scenario
from .calls import POOL, changes, raw_changes

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the raw figures before and after it."""
    before = await raw_changes(ground, sizes, "reschedule")
    async with warm(ground) as cluster:
        ours, refused = await changes(cluster, sizes, "reschedule")
        ran = sum(number >= 0 for number, _ in await cluster.stop())
    after = await raw_changes(ground, sizes, "reschedule")
    return Sample(ours, mean_of(before, after), {"not moved": refused, "ran": ran})


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    return (
        Figure("single", "reschedule, one after another", "/s"),
        Figure("many", f"reschedule, {sizes.callers} callers", "/s"),
        Figure("bulk", f"reschedule, {sizes.bulk_tasks:,} in one call", "/s"),
    )


SCENARIO = Scenario(
    "reschedule",
    "dq.reschedule by id of tasks an hour ahead to two hours ahead, a node up: one call after"
    " another, then many callers, then reschedule_many in one call",
    f"one UPDATE by id a call, the same callers on a pool of {POOL}; in bulk, UPDATE of {BULK:,}"
    " ids a statement; before and after",
    _figures,
    run,
)
