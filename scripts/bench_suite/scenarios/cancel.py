"""How many pending tasks a second an application cancels, one call each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..numbers import mean_of
from ..scenario import Figure, Sample, Scenario
from .schedule import POOL
from .timed import warm

if TYPE_CHECKING:
    from ..options import Sizes
    from ..server import Ground

_AHEAD_US = 3_600_000_000


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run, the raw figures before and after it."""
    before = await _raw(ground, sizes)
    ours: dict[str, float] = {}
    refused = 0
    async with warm(ground) as node:
        for key, callers in _callers(sizes):
            first_us = time.time_ns() // 1000 + _AHEAD_US
            ids = await node.schedule(sizes.cancel_tasks, first_us, 0)
            answer = await node.producer.ask("cancel", ids=ids, callers=callers)
            ours[key] = answer["per_s"]
            refused += len(ids) - answer["cancelled"]
        await node.worker.stop()
        ran = sum(number >= 0 for number, _ in node.worker.starts())
    after = await _raw(ground, sizes)
    return Sample(ours, mean_of(before, after), {"not cancelled": refused, "ran": ran})


def _callers(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return ("single", 1), ("many", sizes.callers)


async def _raw(ground: Ground, sizes: Sizes) -> dict[str, float]:
    async with ground.raw() as (process, dsn):
        found = {}
        for key, callers in _callers(sizes):
            answer = await process.ask(
                "delete", dsn=dsn, rows=sizes.cancel_tasks, callers=callers, pool=POOL
            )
            found[key] = answer["per_s"]
    return found


SCENARIO = Scenario(
    "cancel",
    "dq.cancel by id of tasks an hour ahead, a node up: one call after another, then many callers",
    f"one DELETE by id a call (no history, no answer), the same callers on a pool of {POOL}; "
    "before and after",
    (
        Figure("single", "cancel, one after another", "/s"),
        Figure("many", "cancel, many callers", "/s"),
    ),
    run,
)
