"""The reader's room: figures for people (`stats`, `nodes`) and findings (`doctor`).

One method a statement, nothing decided. Every statement is bounded in what it reads, and none
fails on an odd row: instants arrive as integer microseconds, null where a stranger wrote infinity.
Errors leave translated (see `failures`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import asyncpg

from delayq.failures import sqlstate_of, translated
from delayq.statements import statement

if TYPE_CHECKING:
    from delayq.database import Connection, PooledConnection

    Prepared: TypeAlias = asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]

_DEFAULT_LIMIT: Final = 10_001
# What is said of a prepared statement that another backend got, by it or by the pooler.
_FORGOTTEN: Final = ("26000", "08P01", "0A000")


class Part(NamedTuple):
    """A part of one day's history: a range of instants, and the place where to begin."""

    after: datetime
    until: datetime
    begin: str


class Days(NamedTuple):
    """The newest history: the partition of today, and the end of yesterday's."""

    today: Part
    yesterday: Part


class ReportStore:
    """Reads on the connection that it is given; the caller owns that."""

    def __init__(self, conn: Connection | PooledConnection) -> None:
        self._conn = conn

    @asynccontextmanager
    async def report(self, limit_ms: int) -> AsyncIterator[None]:
        """One read-only transaction for a whole report, each statement limited to `limit_ms`."""
        with translated():
            async with self._conn.transaction(readonly=True, isolation="read_committed"):
                await self._fetch("stats_settings", str(limit_ms))
                yield

    @asynccontextmanager
    async def figure(self) -> AsyncIterator[None]:
        """A part of a report that may fail without the rest (a savepoint)."""
        with translated():
            async with self._conn.transaction():
                yield

    # --- figures ------------------------------------------------------------------------------

    async def clock(self) -> asyncpg.Record:
        """The database's clock: `clock` as a datetime, `clock_us`."""
        return await self._one("stats_clock")

    async def live(self, limit: int) -> list[asyncpg.Record]:
        """(kind, state, tasks) of the first `limit` live tasks."""
        return await self._fetch("stats_live", limit)

    async def sample(self, pages: int) -> list[asyncpg.Record]:
        """(kind, state, tasks, share) of the live tasks on a sample of the table's pages."""
        return await self._fetch("stats_sample", pages)

    async def window(self, after: datetime, until: datetime, each: int) -> list[asyncpg.Record]:
        """Live tasks due in (after, until] by kind, state, node; `each` rows a bucket and end."""
        return await self._fetch("stats_window", after, until, each)

    async def leaves(self) -> asyncpg.Record:
        """The lengths in pages of the newest history partitions, and the last midnight."""
        return await self._one("stats_leaves")

    async def finished_count(self, since: datetime, days: Days) -> list[asyncpg.Record]:
        """(state, tasks, older, first_us) of what finished `since`, in the newest pages."""
        return await self._fetch("stats_finished_count", since, *days.today, *days.yesterday)

    async def finished(self, since: datetime, days: Days) -> list[asyncpg.Record]:
        """Lateness and run time of what finished `since`: in all, by kind, by node."""
        return await self._fetch("stats_finished", since, *days.today, *days.yesterday)

    async def dead(self, limit: int) -> list[asyncpg.Record]:
        """(kind, tasks) of the dead tasks, `limit` counted at the most."""
        return await self._fetch("stats_dead", limit)

    async def dead_ids(self, kind: str, after: int, limit: int) -> list[int]:
        """A page of ids of dead tasks of a kind, in order."""
        return [row["id"] for row in await self._fetch("dead_ids", kind, after, limit)]

    async def nodes(self, limit: int) -> list[asyncpg.Record]:
        """Every node, with its counters as JSON text."""
        return await self._fetch("stats_nodes", limit)

    async def paused(self) -> list[str]:
        """The kinds that somebody paused."""
        return [row["kind"] for row in await self._fetch("stats_paused")]

    # --- findings -----------------------------------------------------------------------------

    async def server(self) -> asyncpg.Record:
        """Version, role, clock and the like. Needs no schema."""
        return await self._one("doctor_server")

    async def backend(self) -> int:
        """The pid of the server process that answered."""
        return int((await self._one("doctor_backend"))[0])

    async def prepare(self) -> Prepared:
        """A named prepared statement, to see how long it lasts."""
        with translated():
            return await self._conn.prepare(statement("doctor_backend"), name="delayq_doctor")

    async def lasts(self, prepared: Prepared) -> bool:
        """True if the server that answers now knows the statement."""
        with translated():
            try:
                await prepared.fetch()
            except asyncpg.PostgresError as error:
                if sqlstate_of(error) in _FORGOTTEN:
                    return False
                raise
        return True

    async def notify(self, channel: str, message: str) -> None:
        """Send a notification."""
        await self._fetch("doctor_notify", channel, message)

    async def zone(self) -> asyncpg.Record:
        """The session's time zone, and how many columns have none."""
        return await self._one("doctor_zone")

    async def connections(self) -> asyncpg.Record:
        """Limits and numbers of connections."""
        return await self._one("doctor_connections")

    async def privileges(self) -> asyncpg.Record:
        """What this role lacks, as `app` and as `node`."""
        return await self._one("doctor_privileges")

    async def holders(self) -> list[asyncpg.Record]:
        """What holds back vacuum."""
        return await self._fetch("doctor_holders")

    async def tables(self) -> list[asyncpg.Record]:
        """How vacuum fares with the tables."""
        return await self._fetch("doctor_tables")

    async def partitions(self) -> asyncpg.Record:
        """Days of history partitions ahead, and rows in the default one."""
        return await self._one("doctor_partitions", _DEFAULT_LIMIT)

    # --- how ----------------------------------------------------------------------------------

    async def _fetch(self, name: str, *args: object) -> list[asyncpg.Record]:
        with translated():
            return await self._conn.fetch(statement(name), *args)

    async def _one(self, name: str, *args: object) -> asyncpg.Record:
        return (await self._fetch(name, *args))[0]
