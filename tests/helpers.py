"""What tests do to a database: own its clock, wait until somebody is really blocked, count.

Nothing here sleeps for a while and hopes; what cannot be waited for by an event is polled with a
limit, and the limit fails the test.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import pytest

from delayq.dsn import parse_dsn

if TYPE_CHECKING:
    from delayq.database import Connection
    from tests.conftest import Logged

PATIENCE_S = 10.0
_CLOCK = """
    create or replace function delayq.clock() returns timestamptz
        language sql volatile parallel safe
    as $$ select pg_catalog.clock_timestamp() + interval '{offset} seconds' $$
"""
_BLOCKED = """
    select pid from pg_stat_activity
     where wait_event_type = 'Lock' and datname = current_database()
       and pid <> pg_backend_pid() and ($1::int is null or pid = $1)
       and ($2::text is null or query ilike '%' || $2 || '%')
     limit 1
"""


@dataclass(frozen=True, slots=True)
class Server:
    """The PostgreSQL server of this test session. `template` is a migrated database."""

    dsn: str
    template: str
    version: int

    def dsn_of(self, database: str) -> str:
        """The DSN of another database of this server."""
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{quote(database, safe='')}"))


async def connect(dsn: str, **options: Any) -> Connection:
    """A plain connection, by the reader that delayq uses. The caller closes it."""
    return await asyncpg.connect(**parse_dsn(dsn).connect_arguments(), **options)


@asynccontextmanager
async def connected(dsn: str, **options: Any) -> AsyncIterator[Connection]:
    """The same, closed at the end of the block."""
    conn = await connect(dsn, **options)
    try:
        yield conn
    finally:
        await conn.close(timeout=5)


async def create_database(server: Server, name: str, template: str | None = None) -> None:
    """Make a database on the server; a copy of `template`, else an empty one."""
    # file_copy is the faster way for a small template, but only newer servers know the word.
    strategy = "strategy file_copy" if template and server.version >= 15 else ""
    async with connected(server.dsn) as admin:
        await admin.execute(
            f'create database "{name}" template "{template or "template0"}" {strategy}'
        )


async def drop_database(server: Server, name: str) -> None:
    """Remove a database, whoever is still connected to it."""
    async with connected(server.dsn) as admin:
        await admin.execute(f'drop database if exists "{name}" with (force)')


async def advance_clock(conn: Connection, seconds: float) -> float:
    """Move the database's clock forward (or back), and return how far it is ahead by now."""
    source = await conn.fetchval(
        "select prosrc from pg_proc where oid = 'delayq.clock()'::regprocedure"
    )
    ahead = re.search(r"interval '(\S+) seconds'", source)
    offset = (float(ahead[1]) if ahead else 0.0) + seconds
    await conn.execute(_CLOCK.format(offset=f"{offset:.6f}"))
    return offset


async def wait_until_blocked(conn: Connection, who: int | str | None = None) -> int:
    """Wait until a session of this database waits for a lock, and return its pid.

    `who` is its pid or a piece of its query; None means any session but this one. `conn` must be
    free: it is the one that looks.
    """
    pid, query = (who, None) if isinstance(who, int) else (None, who)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        # Inside a transaction the view shows what it showed at the first look.
        await conn.execute("select pg_stat_clear_snapshot()")
        found = await conn.fetchval(_BLOCKED, pid, query)
        if found is not None:
            return int(found)
        await asyncio.sleep(0.005)
    raise AssertionError(f"nobody ({who}) waited for a lock within {PATIENCE_S} s")


async def wait_for(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Wait until `condition()` is true; for what gives no event."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        await asyncio.sleep(0.005)


def events(logged: Sequence[Logged], name: str) -> list[Logged]:
    """Those of what was logged that have this name."""
    return [event for event in logged if event.event == name]


def absent(what: str) -> NoReturn:
    """Give up this test because the machine lacks something. The summary names it."""
    pytest.skip(f"absent: {what}")
