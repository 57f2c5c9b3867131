"""Tries out, on real connections, what `doctor` reports. Every wait is bounded."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from delayq.cli import checks, figures
from delayq.cli.checks import Check, Limits, Route
from delayq.cli.place import connection
from delayq.cli.text import one_line
from delayq.database import Connection, Database, Pool
from delayq.errors import DatabaseError, DatabaseTimeout, DelayQError
from delayq.failures import translated
from delayq.instants import EPOCH
from delayq.migrate import check_schema, schema_version
from delayq.report_store import ReportStore
from delayq.settings import Settings

PATIENCE_S: Final = 2.0
_LIMIT_MS: Final = 5_000
_EACH: Final = 40
_NODES: Final = 1_000


async def examine(database: Database, settings: Settings, limits: Limits) -> list[Check]:
    """All checks, in the order in which they explain each other.

    Later ones are left out where an earlier one makes them impossible. Raises nothing that the
    database can cause: what fails is a finding.
    """
    found: list[Check] = []
    try:
        async with _connected(database) as (conn, pool):
            found.append(_connected_check(database))
            await _Examination(database, settings, limits, found).all(conn, pool)
    except DelayQError as error:
        name = "connection" if not found else "examination"
        found.append(Check(name, "fail", one_line(error), _REACH))
    return found


_REACH: Final = (
    "correct DELAYQ_DSN, start PostgreSQL, or let this computer and role in (pg_hba.conf)"
)


def _connected_check(database: Database) -> Check:
    return Check("connection", "ok", f"connected to {database.dsn.describe()}")


@asynccontextmanager
async def _connected(database: Database) -> AsyncIterator[tuple[Connection, Pool]]:
    async with connection(database) as conn:
        pool = await database.create_pool(0, 2, "delayq/doctor")
        try:
            yield conn, pool
        finally:
            pool.terminate()


class _Examination:
    def __init__(
        self, database: Database, settings: Settings, limits: Limits, found: list[Check]
    ) -> None:
        self._database = database
        self._settings = settings
        self._limits = limits
        self._found = found

    async def all(self, conn: Connection, pool: Pool) -> None:
        store = ReportStore(conn)
        server = await store.server()
        self._found.append(checks.server_version(server))
        await self._try("clock", lambda: _clock(store, self._limits))
        await self._try("time zone", lambda: _zone(pool))
        await self._try("connections", lambda: self._connections(store))
        await self._try("pooler", lambda: self._pooler(conn, pool))
        await self._try("listen", lambda: _listening(conn, pool))
        self._found.append(checks.notify_queue(server, self._limits))
        await self._try("old snapshots", lambda: self._holders(store, server))
        if await self._schema(conn):
            await self._try("privileges", lambda: _privileges(store, server))
            await self._try("partitions", lambda: self._partitions(store))
            await self._try("vacuum", lambda: self._vacuum(store, server))
            await self._tasks(store)

    async def _try(self, name: str, check: Callable[[], Awaitable[Check]]) -> None:
        try:
            self._found.append(await check())
        except DelayQError as error:
            advice = "the check itself failed; correct what the failed checks above say first"
            self._found.append(Check(name, "warn", f"not known: {one_line(error)}", advice))

    async def _connections(self, store: ReportStore) -> Check:
        return checks.connections(await store.connections(), self._settings)

    async def _pooler(self, conn: Connection, pool: Pool) -> Check:
        return checks.pooler(await _route(self._database, conn, pool))

    async def _holders(self, store: ReportStore, server: figures.Row) -> Check:
        return checks.vacuum_holders(await store.holders(), server["sees_all"], self._limits)

    async def _partitions(self, store: ReportStore) -> Check:
        return checks.partitions(await store.partitions(), self._limits)

    async def _vacuum(self, store: ReportStore, server: figures.Row) -> Check:
        return checks.vacuum(await store.tables(), server, self._limits)

    async def _schema(self, conn: Connection) -> bool:
        try:
            await check_schema(conn)
        except DatabaseError as error:
            text, _, advice = str(error).partition("; ")
            self._found.append(Check("schema", "fail", text, advice))
            return False
        self._found.append(
            Check("schema", "ok", f"version {await schema_version(conn)}, as needed")
        )
        return True

    async def _tasks(self, store: ReportStore) -> None:
        """What the tasks and the nodes say, from one reading of both."""
        try:
            async with store.report(_LIMIT_MS):
                clock = await store.clock()
                due = figures.due_of(await store.window(EPOCH, clock["clock"], _EACH))
                nodes = [figures.node_of(row) for row in await store.nodes(_NODES)]
                paused = await store.paused()
        except DelayQError as error:
            self._found.append(Check("tasks", "warn", f"not known: {one_line(error)}"))
            return
        self._found += [
            checks.node_states(nodes),
            checks.served_kinds(due, nodes),
            checks.overdue(due, nodes, paused, clock["clock_us"], self._limits),
            checks.orphans(due, nodes),
        ]


async def _clock(store: ReportStore, limits: Limits) -> Check:
    # The one place that looks at this computer's wall clock: to say how far off it is.
    sent_us = time.time_ns() // 1_000
    database_us = (await store.server())["clock_us"]
    received_us = time.time_ns() // 1_000
    offset_us = database_us - (sent_us + received_us) // 2
    return checks.clock_offset(offset_us, received_us - sent_us, limits)


async def _zone(pool: Pool) -> Check:
    async with pool.acquire(timeout=PATIENCE_S) as conn:
        return checks.time_zone(await ReportStore(conn).zone())


async def _privileges(store: ReportStore, server: figures.Row) -> Check:
    return checks.privileges(await store.privileges(), server["role"])


# --- the route ----------------------------------------------------------------------------------


async def _route(database: Database, conn: Connection, pool: Pool) -> Route:
    # A pooler makes up the number that the server should have given at the start.
    apart = conn.get_server_pid() != await ReportStore(conn).backend()
    moved = survive = None
    if apart or database.behind_pooler:
        moved, survive = await _session_lasts(conn, pool)
    return Route(apart or database.behind_pooler, database.behind_pooler, moved, survive)


async def _session_lasts(conn: Connection, pool: Pool) -> tuple[bool | None, bool | None]:
    """(is our backend given to others, does a prepared statement last); None: not to be told.

    Poolers hand out first what was given back last. So the other session, connected before we
    use ours and then busy in a transaction, is given our backend, and we get another one.
    """
    store = ReportStore(conn)
    try:
        async with asyncio.timeout(PATIENCE_S), pool.acquire() as other:
            prepared = await store.prepare()
            ours = await store.backend()
            async with other.transaction():
                taken = await ReportStore(other).backend() == ours
                moved = taken or await store.backend() != ours
                return moved, await store.lasts(prepared)
    except TimeoutError:
        return None, None


# --- listening ----------------------------------------------------------------------------------


async def _listening(conn: Connection, pool: Pool) -> Check:
    """LISTEN on one connection, NOTIFY on another, as nodes and clients do."""
    channel = f"delayq_doctor_{secrets.token_hex(8)}"
    heard = asyncio.Event()

    def hear(*_: object) -> None:
        heard.set()

    with translated():
        await conn.add_listener(channel, hear)
        try:
            started = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                async with pool.acquire() as other:
                    await ReportStore(other).notify(channel, "here")
                await heard.wait()
            return checks.listening(round((time.monotonic() - started) * 1e6), PATIENCE_S)
        except (TimeoutError, DatabaseTimeout):
            return checks.listening(None, PATIENCE_S)
        finally:
            await conn.remove_listener(channel, hear)
