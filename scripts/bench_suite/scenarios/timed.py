"""Tasks that are due at stated instants, on a warm worker, beside bare timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..numbers import lateness
from ..processes import BenchError, until

if TYPE_CHECKING:
    from ..processes import Child, Worker
    from ..server import Ground, Place

_START_LIMIT_S = 30.0
_GRACE_S = 20.0
_WARM = -1
_ACTIVE = "select count(*) from delayq.nodes where state = 'active'"


@dataclass(frozen=True, slots=True)
class Warm:
    """A node that has run a task already, and a producer that has scheduled one."""

    place: Place
    worker: Worker
    producer: Child

    async def schedule(self, count: int, first_us: int, step_us: int) -> list[int]:
        """Tasks 0, 1, … at these instants; their ids. Raises BenchError if it took too long."""
        answer = await self.producer.ask(
            "schedule", count=count, first_us=first_us, step_us=step_us
        )
        if time.time_ns() // 1000 > first_us:
            raise BenchError("scheduling took longer than the lead; give a longer --lead-seconds")
        ids: list[int] = answer["ids"]
        return ids

    async def all_started(self, count: int) -> None:
        """Return once every task has started, or the grace is over."""
        await until(lambda: len(self._numbers()) >= count, _GRACE_S, self.worker)

    def _numbers(self) -> set[int]:
        return {number for number, _ in self.worker.starts() if number >= 0}


@asynccontextmanager
async def warm(ground: Ground) -> AsyncIterator[Warm]:
    """A fresh database with one node that is up."""
    async with (
        ground.database(migrated=True) as place,
        place.worker() as worker,
        place.child("producer") as producer,
    ):
        await active(place, [worker])
        now_us = time.time_ns() // 1000
        await producer.ask("schedule", count=1, first_us=now_us, number=_WARM)
        if not await until(lambda: bool(worker.starts()), _START_LIMIT_S, worker):
            raise BenchError(f"the first task did not run: {worker.log_tail()}")
        yield Warm(place, worker, producer)


async def active(place: Place, workers: list[Worker]) -> None:
    """Return once all these nodes have joined."""
    deadline = time.monotonic() + _START_LIMIT_S
    async with place.connection() as conn:
        while await conn.fetchval(_ACTIVE) < len(workers):
            for worker in workers:
                worker.check()
            if time.monotonic() > deadline:
                raise BenchError(f"not all nodes joined: {workers[0].log_tail()}")
            await asyncio.sleep(0.05)


async def beside_timers(
    ground: Ground, count: int, step_us: int, lead_s: float, raw_shift_us: int
) -> tuple[list[float], dict[str, int], dict[str, float]]:
    """Lateness of tasks in ms, what went wrong, and the percentiles of bare timers.

    The timers are called in the same seconds, in a process of their own, `raw_shift_us` away
    from the tasks so that the two do not fight for the processor at the same instant.
    """
    async with warm(ground) as node, node.place.child("raw") as timers:
        first_us = (time.time_ns() // 1_000_000 + round(lead_s * 1000)) * 1000
        bare = asyncio.create_task(
            timers.ask("timers", count=count, first_us=first_us + raw_shift_us, step_us=step_us)
        )
        await node.schedule(count, first_us, step_us)
        spread = await bare
        await node.all_started(count)
        await node.worker.stop()
        late_ms, faults = lateness(
            node.worker.starts(), count, lambda number: first_us + number * step_us
        )
    return late_ms, faults, spread
