"""A transaction that stays open all the time: vacuum can remove nothing that was settled."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from .. import raw
from ..cluster import until_empty
from ..fill import fill_overdue, vacuum
from ..scenario import Figure, Measure, Sample, Scenario, Target
from .throughput import raw_drain

if TYPE_CHECKING:
    from ..server import Ground
    from ..sizes import Sizes

_SPAN = """
    select count(*) as settled, delayq.micros(max(finished_at)) as over_us
      from delayq.task_history
"""
_WAYS = (("without", False), ("held", True))


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run: with the transaction and without, in random order, and the same raw."""
    count = sizes.snapshot_tasks
    ours: dict[str, float] = {}
    bare: dict[str, float] = {}
    faults: dict[str, int] = {}
    for key, held in random.sample(_WAYS, len(_WAYS)):
        async with ground.raw() as raw_process:
            bare[key] = await raw_drain(raw_process, count, held=held)
        ours[key], found = await _ours(ground, count, held)
        faults |= {f"{what}, {key}": number for what, number in found.items()}
    return Sample(ours, bare, faults)


async def _ours(ground: Ground, count: int, held: bool) -> tuple[float, dict[str, int]]:
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(ground.database(migrated=True))
        conn = await stack.enter_async_context(place.connection())
        holder = await stack.enter_async_context(place.connection())
        if held:
            await holder.execute(raw.SNAPSHOT)
        await fill_overdue(conn, count)
        await vacuum(conn)
        worker = await stack.enter_async_context(place.worker())
        await until_empty(conn, [worker])
        await worker.stop()
        starts = worker.starts()
        # not when it was seen to be empty: that takes longer to see among the dead rows
        ((settled, over_us),) = await conn.fetch(_SPAN)
    seconds = (over_us - min(at_ns for _, at_ns in starts) / 1000) / 1e6
    twice = len(starts) - len({number for number, _ in starts})
    return count / seconds, {"lost": count - settled, "twice": twice}


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    about = f"{sizes.snapshot_tasks:,} no-op tasks, one node"
    return (
        Figure("without", about, "/s"),
        Figure(
            "held",
            f"{about}, beside an open transaction",
            "/s",
            Target(Measure.RATIO, least=0.85, of="without"),
        ),
    )


SCENARIO = Scenario(
    "snapshot",
    "tasks due before the worker starts, from the first start until the last is settled; without"
    " anybody else, and beside a repeatable read transaction that is open from before the first"
    " task was written",
    "asyncpg alone leases and settles as many rows, in turn as in throughput, in the same two ways",
    _figures,
    run,
    brief=False,
)
