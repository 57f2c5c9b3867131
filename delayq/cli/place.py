"""Where the tasks are: opens the database that the command is about.

`--dsn`, else DELAYQ_DSN, else `.env`; without any the embedded PostgreSQL of the project, which is
started for the length of the command unless somebody else has it running.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from delayq.cli.options import Invocation
from delayq.database import Connection, Database, close, parse_dsn
from delayq.migrate import check_schema
from delayq.report_store import ReportStore
from delayq.settings import Settings

_NOBODY = 0  # no node: incarnations are never 0


@asynccontextmanager
async def database(settings: Settings) -> AsyncIterator[Database]:
    """The database itself; nothing is connected yet."""
    if settings.dsn is not None:
        yield Database(parse_dsn(settings.dsn.get_secret_value()), settings)
        return
    # Imported here, since whoever names a database has no use for the rest of the application.
    from delayq.app import open_embedded  # noqa: PLC0415

    async with open_embedded(settings) as place:
        yield place


@asynccontextmanager
async def connection(database: Database) -> AsyncIterator[Connection]:
    """One connection with the session settings of a node. The schema is not checked."""
    conn = await database.connect_control(_NOBODY, "command line")
    try:
        yield conn
    finally:
        await close(conn)


@asynccontextmanager
async def reports(invocation: Invocation) -> AsyncIterator[ReportStore]:
    """The figures of the database, whose schema was checked."""
    async with database(invocation.settings()) as place, connection(place) as conn:
        await check_schema(conn)
        yield ReportStore(conn)
