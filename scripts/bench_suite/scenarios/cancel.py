"""How many pending tasks a second an application cancels: by single calls, and in bulk."""

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
    before = await raw_changes(ground, sizes, "cancel")
    async with warm(ground) as cluster:
        ours, refused = await changes(cluster, sizes, "cancel")
        ran = sum(number >= 0 for number, _ in await cluster.stop())
    after = await raw_changes(ground, sizes, "cancel")
    return Sample(ours, mean_of(before, after), {"not cancelled": refused, "ran": ran})


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    return (
        Figure("single", "cancel, one after another", "/s"),
        Figure("many", f"cancel, {sizes.callers} callers", "/s"),
        Figure("bulk", f"cancel, {sizes.bulk_tasks:,} in one call", "/s"),
    )


SCENARIO = Scenario(
    "cancel",
    "dq.cancel by id of tasks an hour ahead, a node up: one call after another, then many callers,"
    " then cancel_many in one call",
    f"one DELETE by id a call (no history, no answer), the same callers on a pool of {POOL}; in"
    f" bulk, DELETE of {BULK:,} ids a statement; before and after",
    _figures,
    run,
)
