# mypy: disable-error-code="import-not-found"
"""pgqueuer, on asyncpg and uvloop as its own command line runs it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.queries import Queries

from .. import starts
from ..contract import Description, Due, Kind

BATCH = 100
DEQUEUE_S = 10
POOL = 10
DESCRIPTION = Description(
    packages=("pgqueuer", "asyncpg", "uvloop"),
    settings=f"batch_size={BATCH} (default 10), dequeue_timeout={DEQUEUE_S} s (default 30), pool"
    f" of {POOL} asyncpg connections, uvloop, the autovacuum settings of `pgq autovac`,"
    " durability durable (default)",
    documented="guides, Performance Tuning; guides, Reliability Model",
    left="select exists (select from pgqueuer where status = 'picked'"
    " or status = 'queued' and execute_after <= now())",
    remarks={
        "lateness": "takes a delay, not an instant: it counts from the INSERT's now(); waits at"
        " least 0.1 s between two looks (min_dequeue_poll_interval, not an option)",
        "crash": "a job is picked again 30 s after its last heartbeat (heartbeat_timeout)",
    },
)


async def install(dsn: str) -> None:
    """`pgq install` and `pgq autovac`."""
    conn = await asyncpg.connect(dsn)
    try:
        queries = Queries.from_asyncpg_connection(conn)
        await queries.install()
        await queries.optimize_autovacuum()
    finally:
        await conn.close()


def serve(dsn: str) -> None:
    """`pgq run`."""
    uvloop.run(_serve(dsn))


async def _serve(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=POOL, max_size=POOL) as pool:
        await _run(PgQueuer.from_asyncpg_pool(pool))


async def _run(app: Any) -> None:
    async def noop(job: Any) -> None:
        await starts.noop(json.loads(job.payload)["n"])

    async def hold(job: Any) -> None:
        await starts.hold(json.loads(job.payload)["n"])

    app.entrypoint("noop")(noop)
    app.entrypoint("hold")(hold)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.shutdown.set)
    await app.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=DEQUEUE_S))


class Client:
    """Enqueues."""

    def __init__(self, queries: Any) -> None:
        self._queries = queries

    async def schedule(self, due: Due) -> None:
        """`enqueue` of one."""
        await self._queries.enqueue(Kind.NOOP.value, _payload(due), 0, _delay(due))

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """`enqueue` of lists."""
        await self._queries.enqueue(
            [kind.value] * len(dues),
            [_payload(due) for due in dues],
            [0] * len(dues),
            [_delay(due) for due in dues],
        )


def _payload(due: Due) -> bytes:
    return json.dumps({"n": due.number}).encode()


def _delay(due: Due) -> timedelta:
    return timedelta(microseconds=due.at_us - time.time_ns() // 1000)


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Client]:
    """An application that only enqueues."""
    async with asyncpg.create_pool(dsn, min_size=1, max_size=POOL) as pool:
        yield Client(Queries.from_asyncpg_pool(pool))
