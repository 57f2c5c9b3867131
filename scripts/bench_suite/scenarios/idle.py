"""Nodes that have nothing to do: what they send, and what processor time they use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cluster import active
from ..processes import BenchError
from ..scenario import NAN, Figure, Measure, Sample, Scenario, Target
from ..usage import cpu_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..processes import Worker
    from ..server import Ground, Place
    from ..sizes import Sizes

_SETTLE_S = 6.0
"""joining, and the first sweep after it, are no idling"""
_FLUSH_S = 15.0
"""a session that idles tells how many transactions it had only after ten seconds"""
_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class _Idlers:
    """Processes that idle on one database."""

    place: Place
    pids: Sequence[int]
    nodes: int

    async def used(self) -> tuple[float, float, float]:
        """Statements sent so far, processor seconds of the nodes, and of their sessions."""
        ground = self.place.ground
        sent = await ground.statements(self.place.name)
        # somebody else's server may be another computer
        served = cpu_s(await ground.backends(self.place)) if ground.own else NAN
        return sent, cpu_s(self.pids), served


async def run(ground: Ground, sizes: Sizes) -> Sample:
    """One run: nodes with nothing pending, nodes with much, and pollers, in the same seconds."""
    nodes = sizes.idle_nodes
    seconds = sizes.idle_seconds + 2 * _POLL_S
    async with AsyncExitStack() as stack:
        places = [await ground.filled(count) for count in (0, max(1, sizes.idle_pending))]
        fleets = [
            (place, await stack.enter_async_context(_fleet(place, nodes))) for place in places
        ]
        other = await stack.enter_async_context(ground.database(migrated=False))
        await stack.enter_async_context(ground.counted(other))
        pollers = await stack.enter_async_context(other.child("raw_process"))
        await asyncio.sleep(_SETTLE_S if ground.counts_statements else _FLUSH_S)
        polling = asyncio.create_task(
            pollers.ask("poll", dsn=other.dsn, seconds=seconds, pollers=nodes)
        )
        await asyncio.sleep(_POLL_S)
        idlers = [_Idlers(place, [w.pid for w in workers], nodes) for place, workers in fleets]
        none, many, raw = await _measured(
            [*idlers, _Idlers(other, [pollers.pid], nodes)], sizes.idle_seconds
        )
        await polling
        ran = 0
        for _, workers in fleets:
            for worker in workers:
                await worker.stop()
                ran += worker.count()
    counted = "pg_stat_statements" if ground.counts_statements else "transactions only"
    ours = none | {f"{key}_pending": value for key, value in many.items()}
    return Sample(
        ours,
        raw | {f"{key}_pending": value for key, value in raw.items()},
        {"ran": ran},
        {"counted": counted},
    )


@asynccontextmanager
async def _fleet(place: Place, nodes: int) -> AsyncIterator[list[Worker]]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(place.ground.counted(place))
        workers = [
            await stack.enter_async_context(place.worker(f"worker-{i}")) for i in range(nodes)
        ]
        await active(place, workers)
        yield workers


async def _measured(idlers: Sequence[_Idlers], seconds: float) -> list[dict[str, float]]:
    """For each: statements a second, and percent of a core, of a node."""
    before, began = [await each.used() for each in idlers], time.monotonic()
    await asyncio.sleep(seconds)
    after, took = [await each.used() for each in idlers], time.monotonic() - began
    if min(sent for sent, _, _ in after) == 0:
        raise BenchError("no statements were counted")
    found = []
    for each, old, new in zip(idlers, before, after, strict=True):
        sent, used, served = ((b - a) / took / each.nodes for a, b in zip(old, new, strict=True))
        found.append({"per_s": sent, "cpu": 100 * used, "server_cpu": 100 * served})
    return found


def _figures(sizes: Sizes) -> tuple[Figure, ...]:
    lines: list[Figure] = []
    for key, pending in (("", 0), ("_pending", sizes.idle_pending)):
        about = f"of an idle node, {pending:,} pending"
        lines += (
            Figure(f"per_s{key}", f"statements {about}", "/s", Target(Measure.VALUE, most=1.0)),
            Figure(f"cpu{key}", f"processor {about}", "%", Target(Measure.VALUE, most=0.5)),
            Figure(f"server_cpu{key}", f"processor of the server {about}", "%"),
        )
    return tuple(lines)


SCENARIO = Scenario(
    "idle",
    "nodes without work, some with nothing in the table, some with much a month ahead: statements"
    " of all sorts, BEGIN and COMMIT too, and percent of one core, per node",
    "as many connections of one process that LISTEN and look for a due row once a second, in the"
    " same seconds, per connection",
    _figures,
    run,
)
