"""No product: the least that asyncpg needs, as a ceiling for the others.

Leases what is due in batches, runs it, settles it into a history, in turn on one connection. No
retries, no recovery, no limits, one handler after another.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ...raw import BATCH, LEASE, SETTLE, TABLES, connections
from .. import starts
from ..contract import Description, Due, Kind

if TYPE_CHECKING:
    from delayq.database import Connection

DESCRIPTION = Description(
    packages=("asyncpg",),
    settings=f"leases {BATCH} rows at a time (UPDATE … FOR UPDATE SKIP LOCKED … RETURNING, HOT,"
    " asynchronous commit) and settles them (DELETE moved into a history table, synchronous"
    " commit), in turn on one connection; sleeps until the next instant",
    documented="no product",
    left="select exists (select from raw_task where execute_at <= now())",
    cannot={"crash": "has no leases that end: what was running when its worker died is lost"},
)
ONE = """
    insert into raw_task (kind, payload, execute_at) values ('noop', $1, $2)
    returning id, execute_at
"""
MANY = """
    insert into raw_task (kind, payload, execute_at)
    select 'noop', jsonb_build_object('n', n), at
      from unnest($1::bigint[], $2::timestamptz[]) as due (n, at)
    returning id
"""
NEXT = "select min(execute_at) from raw_task where state = 0"
_BEGINNING = (datetime(2000, 1, 1, tzinfo=UTC), 0)
_LOOK_S = 0.05
_OWNER = 7


async def install(dsn: str) -> None:
    """The tables of the raw figures of `scripts/bench`."""
    async with connections(dsn, 1) as (conn,):
        await conn.execute(TABLES)


def serve(dsn: str) -> None:
    """Lease, run and settle until SIGTERM."""
    asyncio.run(_serve(dsn))


async def _serve(dsn: str) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with connections(dsn, 1) as (conn,):
        while not over.is_set():
            await _run_due(conn, over)
            await _sleep(conn)


async def _run_due(conn: Connection, over: asyncio.Event) -> None:
    """Everything that is due, from the oldest on; each batch starts where the last one ended."""
    last = _BEGINNING
    while not over.is_set():
        batch = await conn.fetch(LEASE, *last, BATCH, _OWNER, random.getrandbits(40))
        if not batch:
            return
        last = max((row["execute_at"], row["id"]) for row in batch)
        for row in batch:
            starts.started(json.loads(row["payload"])["n"])
        await conn.execute(SETTLE, [row[0] for row in batch], [row[1] for row in batch])


async def _sleep(conn: Connection) -> None:
    """Until the next instant; looks for new ones meanwhile."""
    at = await conn.fetchval(NEXT)
    left_s = _LOOK_S if at is None else at.timestamp() - time.time()
    await asyncio.sleep(min(_LOOK_S, max(0.0, left_s)))


class Client:
    """Bare INSERTs."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    async def schedule(self, due: Due) -> None:
        """One row a statement."""
        await self._conn.fetchrow(ONE, json.dumps({"n": due.number}), due.at)

    async def schedule_many(self, kind: Kind, dues: Sequence[Due]) -> None:
        """All rows in one statement."""
        del kind  # what stays is not measured here
        numbers, instants = [due.number for due in dues], [due.at for due in dues]
        await self._conn.execute(MANY, numbers, instants)


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Client]:
    """One connection."""
    async with connections(dsn, 1) as (conn,):
        yield Client(conn)
