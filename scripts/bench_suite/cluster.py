"""Nodes that are up and have run something, with a process that schedules for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .processes import BenchError, TooLate, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq.database import Connection

    from .processes import Child, Worker
    from .server import Ground, Place

_START_LIMIT_S = 30.0
_GRACE_S = 20.0
_BEAT_LIMIT_S = 15.0
_STILL_LIMIT_S = 60.0
_LOOK_S = 0.02
_WARM_TASKS = 32
"""for each node: enough that none of several goes without"""
_ACTIVE = "select count(*) from delayq.nodes where state = 'active'"
_COUNTERS = "select id, expires_at, counters::text from delayq.nodes where state = 'active'"
# From the end: the first rows are long gone, and dead ones need not be stepped over.
_LEFT = "select id from delayq.tasks order by id desc limit 1"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that have each run a task already, and a producer that has scheduled some."""

    place: Place
    workers: Sequence[Worker]
    producer: Child
    warmed: int
    """starts that do not count"""

    async def schedule(
        self, count: int, first_us: int, step_us: int, **options: object
    ) -> list[int]:
        """Tasks 0, 1, … at these instants; their ids. Raises TooLate if that took too long."""
        answer = await self.producer.ask(
            "schedule", count=count, first_us=first_us, step_us=step_us, **options
        )
        if time.time_ns() // 1000 > first_us:
            raise TooLate("scheduling took longer than the lead; give a longer --lead-seconds")
        ids: list[int] = answer["ids"]
        return ids

    async def all_started(self, count: int, grace_s: float = _GRACE_S) -> None:
        """Return once so many tasks have started, or the grace is over."""
        wanted = count + self.warmed
        await until(
            lambda: sum(worker.count() for worker in self.workers) >= wanted,
            grace_s,
            *self.workers,
        )

    async def stop(self) -> list[tuple[int, int]]:
        """End all nodes; (task number, nanoseconds since 1970) of every start, warming included."""
        for worker in self.workers:
            await worker.stop()
        return [start for worker in self.workers for start in worker.starts()]


@asynccontextmanager
async def warm(
    ground: Ground, nodes: int = 1, place: Place | None = None, *, at_once: bool = False
) -> AsyncIterator[Cluster]:
    """So many nodes that are up, on this database or on a fresh one."""
    async with AsyncExitStack() as stack:
        if place is None:
            place = await stack.enter_async_context(ground.database(migrated=True))
        workers = [
            await stack.enter_async_context(place.worker(f"worker-{i}", at_once=at_once))
            for i in range(nodes)
        ]
        producer = await stack.enter_async_context(place.child("producer"))
        await active(place, workers)
        warmed = _WARM_TASKS * nodes
        now_us = time.time_ns() // 1000
        await producer.ask("schedule", count=warmed, first_us=now_us, number=-warmed)
        if not await until(lambda: sum(w.count() for w in workers) >= warmed, _START_LIMIT_S):
            raise BenchError(f"the first tasks did not run: {workers[0].log_tail()}")
        yield Cluster(place, workers, producer, warmed)


async def active(place: Place, workers: Sequence[Worker]) -> None:
    """Return once all these nodes have joined."""
    deadline = time.monotonic() + _START_LIMIT_S
    async with place.connection() as conn:
        while await conn.fetchval(_ACTIVE) < len(workers):
            for worker in workers:
                worker.check()
            if time.monotonic() > deadline:
                raise BenchError(f"not all nodes joined: {workers[0].log_tail()}")
            await asyncio.sleep(0.05)


async def until_empty(conn: Connection, workers: Sequence[Worker]) -> int:
    """When the last task was settled; looks every 20 ms, and never a tenth of the time.

    Raises BenchError if no handler has started for a minute.
    """
    started, deadline = -1, 0.0
    while True:
        began = time.monotonic()
        if await conn.fetchval(_LEFT) is None:
            return time.time_ns()
        now = sum(worker.count() for worker in workers)
        if now > started:
            started, deadline = now, began + _STILL_LIMIT_S
        elif began > deadline:
            raise BenchError(f"nothing goes on; {now} tasks started: {workers[0].log_tail()}")
        for worker in workers:
            worker.check()
        await asyncio.sleep(max(_LOOK_S, 10 * (time.monotonic() - began)))


async def counters(conn: Connection) -> list[dict[str, Any]]:
    """What each node counted, as its next beat tells."""
    before = {row["id"]: row["expires_at"] for row in await conn.fetch(_COUNTERS)}
    deadline = time.monotonic() + _BEAT_LIMIT_S
    while time.monotonic() < deadline:
        rows = await conn.fetch(_COUNTERS)
        if all(row["expires_at"] != before.get(row["id"]) for row in rows):
            return [json.loads(row["counters"]) for row in rows]
        await asyncio.sleep(0.1)
    raise BenchError(f"not all nodes have beaten within {_BEAT_LIMIT_S:g} s")
