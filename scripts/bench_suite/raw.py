"""The figures without delayq: a table of tasks, and asyncpg alone that leases and settles them.

It does the least that the job needs, on a table of its own in a fresh database of the same
server. There are no retries, no recovery, no handlers and no limits in here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

import asyncpg

from delayq.dsn import parse_dsn

from .numbers import median

if TYPE_CHECKING:
    from delayq.database import Connection

BATCH = 100
_OWNER = 7
_PIPELINE = 2
"""batches leased and not yet settled"""

# No index on what a lease changes and half of each page free, so that a lease is a HOT update: of
# the layouts that were tried the fastest, by a little.
TABLES = """
    create table raw_task (
        id bigint generated always as identity primary key,
        kind text not null,
        payload jsonb not null,
        execute_at timestamptz not null,
        attempt integer not null default 0,
        state smallint not null default 0,
        lease_owner bigint not null default 0,
        lease_token bigint not null default 0,
        leased_at timestamptz not null default '-infinity',
        created_at timestamptz not null default now()
    ) with (fillfactor = 50);
    create index on raw_task (execute_at, id);
    create table raw_history (like raw_task, finished_at timestamptz not null);
    create index on raw_history (id)
"""
FILL = """
    insert into raw_task (kind, payload, execute_at)
    select 'noop', jsonb_build_object('n', n), now() - interval '1 s' + n * interval '1 us'
      from generate_series(1, $1::integer) n
"""
# From the last row of the batch before on, so that it does not step over what was leased already.
LEASE = """
    with asynchronously as materialized (select set_config('synchronous_commit', 'off', true))
    update raw_task
       set state = 1, attempt = attempt + 1, leased_at = now(),
           lease_owner = $4, lease_token = $5 + id
     where id = any (array(
         select id from raw_task
          where state = 0 and (execute_at, id) > ($1, $2) and execute_at <= now()
          order by execute_at, id limit $3 for update skip locked))
       and exists (select from asynchronously)
    returning id, lease_token, kind, payload, execute_at
"""
SETTLE = """
    with gone as (
        delete from raw_task
         where id = any ($1::bigint[]) and lease_token = any ($2::bigint[]) and state = 1
        returning *)
    insert into raw_history select *, now() from gone
"""
SNAPSHOT = "begin isolation level repeatable read; select count(*) from pg_class"
_WINDOW = """
    select id, execute_at, kind from raw_task
     where state = 0 and execute_at <= $1 order by execute_at, id
"""
WINDOW_PASSES = 5
_LEFT = "select id from raw_task limit 1"
_LOOK_S = 0.005
_BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)
_COMMITTED_LATE = timedelta(seconds=2)


async def connect(dsn: str) -> Connection:
    """A plain connection with plans for the values at hand, as delayq's have."""
    return await asyncpg.connect(
        **parse_dsn(dsn).connect_arguments(),
        server_settings={"plan_cache_mode": "force_custom_plan", "jit": "off"},
    )


@asynccontextmanager
async def connections(dsn: str, count: int) -> AsyncIterator[list[Connection]]:
    """Connections that are closed at the end of the block."""
    opened = [await connect(dsn) for _ in range(count)]
    try:
        yield opened
    finally:
        for conn in opened:
            await conn.close(timeout=5)


async def prepare(conn: Connection, rows: int = 0) -> None:
    """Fresh tables with due rows, vacuumed and checkpointed as delayq's are."""
    await conn.execute(f"drop table if exists raw_task, raw_history; {TABLES}")
    if rows:
        await conn.execute(FILL, rows)
    await conn.execute("vacuum analyze raw_task")
    await conn.execute("checkpoint")


async def drain(
    *, dsn: str, rows: int, pipelined: bool, held: bool = False
) -> Mapping[str, object]:
    """Lease and settle all rows: in turn on one connection, or on two at the same time.

    `held`: beside a snapshot that stays open, so that no dead row can be removed.
    """
    async with connections(dsn, 3) as (first, second, holder):
        if held:
            await holder.execute(SNAPSHOT)
        await prepare(first, rows)
        began = perf_counter()
        done = await (_pipelined(first, second) if pipelined else _in_turn(first))
        return {"per_s": done / (perf_counter() - began), "done": done}


async def fill(*, dsn: str, rows: int) -> Mapping[str, object]:
    """Due rows for several processes that each take their `share`."""
    async with connections(dsn, 1) as (conn,):
        await prepare(conn, rows)
    return {}


async def share(*, dsn: str) -> Mapping[str, object]:
    """Lease and settle in turn until nothing is left; others do so at the same time."""
    async with connections(dsn, 1) as (conn,):
        began_ns = time_ns()
        done = await _in_turn(conn)
        return {"done": done, "began_ns": began_ns, "ended_ns": time_ns()}


async def follow(*, dsn: str, until_ns: int) -> Mapping[str, object]:
    """Lease and settle in turn what becomes due, until then and until nothing is left."""
    async with connections(dsn, 1) as (conn,):
        since = _BEGINNING
        while time_ns() < until_ns or await conn.fetchval(_LEFT) is not None:
            async for batch in _leases(conn, since):
                await _settle(conn, batch)
                # rows may be committed after later ones, but not by much
                since = max(since, batch[0]["execute_at"] - _COMMITTED_LATE)
            await asyncio.sleep(_LOOK_S)
        return {"ended_ns": time_ns()}


async def window(*, dsn: str, rows: int) -> Mapping[str, object]:
    """Read so many rows that become due by the index; the median of some passes."""
    async with connections(dsn, 1) as (conn,):
        await prepare(conn, rows)
        took_ms = []
        for _ in range(WINDOW_PASSES):
            began = perf_counter()
            await conn.fetch(_WINDOW, datetime.now(UTC))
            took_ms.append((perf_counter() - began) * 1000)
        return {"ms": median(took_ms)}


async def _leases(
    conn: Connection, since: datetime = _BEGINNING
) -> AsyncIterator[list[asyncpg.Record]]:
    """Batches until there are none."""
    last = (since, 0)
    while batch := await conn.fetch(LEASE, *last, BATCH, _OWNER, random.getrandbits(40)):
        last = max((row["execute_at"], row["id"]) for row in batch)
        yield batch


async def _settle(conn: Connection, batch: list[asyncpg.Record]) -> int:
    await conn.execute(SETTLE, [row[0] for row in batch], [row[1] for row in batch])
    return len(batch)


async def _in_turn(conn: Connection) -> int:
    return sum([await _settle(conn, batch) async for batch in _leases(conn)])


async def _pipelined(lease_conn: Connection, settle_conn: Connection) -> int:
    leased: asyncio.Queue[list[asyncpg.Record]] = asyncio.Queue(_PIPELINE)

    async def lease() -> None:
        async for batch in _leases(lease_conn):
            await leased.put(batch)
        await leased.put([])

    async def settle() -> int:
        done = 0
        while batch := await leased.get():
            done += await _settle(settle_conn, batch)
        return done

    _, done = await asyncio.gather(lease(), settle())
    return done
