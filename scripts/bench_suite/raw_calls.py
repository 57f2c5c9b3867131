"""What an application would send without delayq: one statement a call, or one for many rows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

import asyncpg

from delayq.dsn import parse_dsn

from .callers import rate_for, rate_over
from .raw import connections, prepare

if TYPE_CHECKING:
    from delayq.database import Connection, Pool

BULK = 1_000
"""rows of one statement in bulk"""
INSERT = """
    insert into raw_task (kind, payload, execute_at)
    values ('noop', '{"n": 7}', now() + $1::interval) returning id, execute_at
"""
INSERT_MANY = """
    insert into raw_task (kind, payload, execute_at)
    select * from unnest($1::text[], $2::jsonb[], $3::timestamptz[]) returning id
"""
# what a call does to one row, and to many
CHANGES = {
    "cancel": (
        "delete from raw_task where id = $1",
        "delete from raw_task where id = any ($1::bigint[])",
    ),
    "reschedule": (
        "update raw_task set execute_at = now() + interval '2 hours' where id = $1",
        "update raw_task set execute_at = now() + interval '2 hours' where id = any ($1::bigint[])",
    ),
}


async def insert(*, dsn: str, seconds: float, callers: int, pool: int) -> Mapping[str, object]:
    """One INSERT … RETURNING a call, an hour ahead."""
    async with connections(dsn, 1) as (conn,):
        await prepare(conn)
    ahead = timedelta(hours=1)
    async with _pool(dsn, min(callers, pool)) as opened:
        return {"per_s": await rate_for(seconds, callers, lambda: opened.fetchrow(INSERT, ahead))}


async def feed(
    *, dsn: str, seconds: float, callers: int, pool: int, ahead_s: float
) -> Mapping[str, object]:
    """The same, soon due, for another process that follows; how many, and since when."""
    ahead, count = timedelta(seconds=ahead_s), 0

    async def call() -> None:
        nonlocal count
        await opened.fetchrow(INSERT, ahead)
        count += 1

    async with _pool(dsn, min(callers, pool)) as opened:
        began_ns = time_ns()
        await rate_for(seconds, callers, call)
        return {"count": count, "began_ns": began_ns}


async def insert_bulk(*, dsn: str, rows: int) -> Mapping[str, object]:
    """All rows by INSERT … SELECT FROM unnest, some at a time, each a transaction."""
    async with connections(dsn, 1) as (conn,):
        await prepare(conn)
        at = datetime.now(UTC) + timedelta(hours=1)
        began = perf_counter()
        for part in _parts(range(rows)):
            payloads = [json.dumps({"n": n}) for n in part]
            await conn.fetch(INSERT_MANY, ["noop"] * len(part), payloads, [at] * len(part))
        return {"per_s": rows / (perf_counter() - began)}


async def change(
    *, dsn: str, verb: str, rows: int, callers: int, pool: int
) -> Mapping[str, object]:
    """One statement by id a call."""
    async with _rows(dsn, rows) as (_, ids), _pool(dsn, min(callers, pool)) as opened:
        sql = CHANGES[verb][0]
        return {"per_s": await rate_over(ids, callers, lambda id: opened.execute(sql, id))}


async def change_bulk(*, dsn: str, verb: str, rows: int) -> Mapping[str, object]:
    """All rows by their ids, some at a time, each a transaction."""
    async with _rows(dsn, rows) as (conn, ids):
        began = perf_counter()
        for part in _parts(ids):
            await conn.execute(CHANGES[verb][1], part)
        return {"per_s": rows / (perf_counter() - began)}


def _parts(items: Sequence[int]) -> list[Sequence[int]]:
    return [items[start : start + BULK] for start in range(0, len(items), BULK)]


@asynccontextmanager
async def _rows(dsn: str, rows: int) -> AsyncIterator[tuple[Connection, list[int]]]:
    async with connections(dsn, 1) as (conn,):
        await prepare(conn, rows)
        yield conn, [int(row[0]) for row in await conn.fetch("select id from raw_task order by id")]


@asynccontextmanager
async def _pool(dsn: str, size: int) -> AsyncIterator[Pool]:
    # Nothing is reset between two calls, which would be a statement more; delayq does not either.
    async def leave_as_it_is(_: object) -> None: ...

    async with asyncpg.create_pool(
        **parse_dsn(dsn).connect_arguments(), min_size=size, max_size=size, reset=leave_as_it_is
    ) as pool:
        yield pool
