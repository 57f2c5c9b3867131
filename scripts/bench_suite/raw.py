"""The figures without delayq: asyncpg alone, asyncio alone; a process of its own, on command.

Each does the least that the job needs, on a table of its own in a fresh database of the same
server. There are no retries, no recovery, no handlers and no limits in here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

import asyncpg

from delayq.dsn import parse_dsn

from .callers import rate_for, rate_over
from .commands import Command, obey
from .numbers import spread

if TYPE_CHECKING:
    from delayq.database import Connection, Pool

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
INSERT = """
    insert into raw_task (kind, payload, execute_at)
    values ('noop', '{"n": 7}', now() + interval '1 hour') returning id, execute_at
"""
DELETE = "delete from raw_task where id = $1"
LOOK = "select id from raw_task where state = 0 and execute_at <= now() order by execute_at limit 1"


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


async def drain(*, dsn: str, rows: int, pipelined: bool) -> Mapping[str, object]:
    """Lease and settle all rows: in turn on one connection, or on two at the same time."""
    async with connections(dsn, 1 + pipelined) as conns:
        await prepare(conns[0], rows)
        began = perf_counter()
        done = await (_pipelined if pipelined else _in_turn)(*conns)
        return {"per_s": done / (perf_counter() - began), "done": done}


async def _leases(conn: Connection) -> AsyncIterator[list[asyncpg.Record]]:
    """Batches until there are none."""
    last = (datetime(2000, 1, 1, tzinfo=UTC), 0)
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


async def timers(*, count: int, first_us: float, step_us: float) -> Mapping[str, object]:
    """Bare `loop.call_at` timers; how late they were called, in milliseconds."""
    loop = asyncio.get_running_loop()
    late_ms: list[float] = []
    over = asyncio.Event()

    def fire(due_us: float) -> None:
        late_ms.append((time_ns() / 1000 - due_us) / 1000)
        if len(late_ms) == count:
            over.set()

    ahead_s = loop.time() - time_ns() / 1e9
    for i in range(count):
        due_us = first_us + i * step_us
        loop.call_at(due_us / 1e6 + ahead_s, fire, due_us)
    await over.wait()
    return spread(late_ms)


async def insert(*, dsn: str, seconds: float, callers: int, pool: int) -> Mapping[str, object]:
    """One INSERT … RETURNING a call."""
    async with connections(dsn, 1) as (conn,):
        await prepare(conn)
    async with _pool(dsn, min(callers, pool)) as opened:
        return {"per_s": await rate_for(seconds, callers, lambda: opened.fetchrow(INSERT))}


async def delete(*, dsn: str, rows: int, callers: int, pool: int) -> Mapping[str, object]:
    """One DELETE by id a call."""
    async with connections(dsn, 1) as (conn,):
        await prepare(conn, rows)
        ids = [int(row[0]) for row in await conn.fetch("select id from raw_task order by id")]
    async with _pool(dsn, min(callers, pool)) as opened:
        return {"per_s": await rate_over(ids, callers, lambda id: opened.execute(DELETE, id))}


async def poll(*, dsn: str, seconds: float, pollers: int) -> Mapping[str, object]:
    """Connections that each LISTEN, and look for due rows once a second."""
    async with connections(dsn, pollers) as opened:
        await prepare(opened[0])
        for conn in opened:
            await conn.execute("listen raw_task")
        until = perf_counter() + seconds
        while perf_counter() < until:
            for conn in opened:
                await conn.fetch(LOOK)
            await asyncio.sleep(1)
    return {}


@asynccontextmanager
async def _pool(dsn: str, size: int) -> AsyncIterator[Pool]:
    # Nothing is reset between two calls, which would be a statement more; delayq does not either.
    async def leave_as_it_is(_: object) -> None: ...

    async with asyncpg.create_pool(
        **parse_dsn(dsn).connect_arguments(), min_size=size, max_size=size, reset=leave_as_it_is
    ) as pool:
        yield pool


COMMANDS: Mapping[str, Command] = {
    "drain": drain,
    "timers": timers,
    "insert": insert,
    "delete": delete,
    "poll": poll,
}

if __name__ == "__main__":
    asyncio.run(obey(COMMANDS))
