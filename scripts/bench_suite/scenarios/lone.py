"""One task alone: from its instant until it is settled, as somebody else sees it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from time import time_ns
from typing import TYPE_CHECKING, NamedTuple

from .. import raw
from ..cluster import warm
from ..numbers import lateness, percentile
from ..processes import BenchError
from ..scenario import Figure, Measure, Sample, Scenario, Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from delayq.database import Connection

    from ..server import Ground, Place
    from ..sizes import Sizes

_LIMIT_S = 5.0
# Whoever settles tells the observer as it commits, delayq and the raw task alike: to look all the
# time would take the processor away from what is measured.
_TELL = """
    create function bench_tell() returns trigger language plpgsql
    as $$ begin notify bench_settled; return null; end $$;
    create trigger bench_tell after insert on {history}
        for each statement execute function bench_tell()
"""


class Observer:
    """Hears when a transaction that wrote history has committed."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[int] = asyncio.Queue()

    @asynccontextmanager
    async def listening(self, place: Place, history: str) -> AsyncIterator[Self]:
        """Listens on a connection of its own to the end of the block."""
        async with place.connection() as conn:
            await conn.execute(_TELL.format(history=history))
            await conn.add_listener("bench_settled", self._hear)
            yield self

    async def settled_ns(self) -> int:
        """When the next one was heard. Raises BenchError if that takes too long."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await self._heard.get()
        except TimeoutError:
            raise BenchError(f"a lone task was not settled within {_LIMIT_S:g} s") from None

    def _hear(self, *_: object) -> None:
        self._heard.put_nowait(time_ns())


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run; the raw task half way between each two."""
    count, step_us = sizes.lone_tasks, round(sizes.lone_spacing_seconds * 1e6)
    async with (
        ground.database(migrated=False) as other,
        raw.connections(other.dsn, 1) as (bare,),
        warm(ground) as node,
        Observer().listening(node.place, "delayq.task_history") as observer,
    ):
        await raw.prepare(bare, count)
        async with Observer().listening(other, "raw_history") as raw_observer:
            first_us = time_ns() // 1000 + round(sizes.lead_seconds * 1e6)
            await node.schedule(count, first_us, step_us)
            done_ms, raws = [], []
            for due_us in range(first_us, first_us + count * step_us, step_us):
                await _sleep_until(due_us - step_us // 4)
                done_ms.append((await observer.settled_ns() / 1000 - due_us) / 1000)
                raws.append(await _raw_task(bare, due_us + step_us // 2, raw_observer))
        starts = await node.stop()
    late_ms, faults = lateness(starts, count, lambda number: first_us + number * step_us)
    settled = percentile(done_ms, 50)
    ours = {"done": settled, "round_trips": settled, "start": percentile(late_ms, 50)}
    return Sample(ours, _medians(raws), faults)


async def _sleep_until(at_us: int) -> None:
    await asyncio.sleep(max(0.0, (at_us - time_ns() / 1000) / 1e6))


class _Raw(NamedTuple):
    """Milliseconds of one raw task: from due to leased and to settled, and its round trips."""

    start: float
    done: float
    round_trips: float


async def _raw_task(bare: Connection, due_us: int, observer: Observer) -> _Raw:
    """A bare timer, then one due row leased, then settled."""
    await _sleep_until(due_us)
    began = time_ns()
    rows = await bare.fetch(raw.LEASE, datetime(2000, 1, 1, tzinfo=UTC), 0, 1, 7, 7)
    leased = time_ns()
    await bare.execute(raw.SETTLE, [rows[0][0]], [rows[0][1]])
    answered, heard = time_ns(), await observer.settled_ns()
    due_ns = due_us * 1000
    return _Raw((leased - due_ns) / 1e6, (heard - due_ns) / 1e6, (answered - began) / 1e6)


def _medians(raws: list[_Raw]) -> dict[str, float]:
    return {
        name: percentile([one[place] for one in raws], 50)
        for place, name in enumerate(_Raw._fields)
    }


SCENARIO = Scenario(
    "lone",
    "single tasks, scheduled ahead, well apart; from due until an observer hears that it is "
    "settled (a trigger on the history notifies it at the commit)",
    "asyncpg alone, half way between each two tasks: a bare timer, then one due row leased and "
    "settled with the statements of throughput, from due until the same sort of observer hears of "
    "it; or its two round trips only, without the timer; beside the start: until it is leased",
    (
        Figure("done", "lone task, due to settled, p50", "ms", Target(Measure.RATIO, most=1.0)),
        Figure("round_trips", "lone task (raw: the two round trips only)", "ms"),
        Figure("start", "lone task, due to started, p50", "ms"),
    ),
    run,
)
