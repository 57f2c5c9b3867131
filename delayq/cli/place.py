"""Connections of a command to the database that it is about.

`--dsn`, else DELAYQ_DSN, else `.env`; without any the embedded PostgreSQL of the project, which is
started for the length of the command unless somebody else has it running.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from delayq import place
from delayq.cli.options import Invocation
from delayq.database import Connection, Database
from delayq.migrate import check_schema
from delayq.place import open_database
from delayq.report_store import ReportStore


def connection(database: Database) -> AbstractAsyncContextManager[Connection]:
    """One connection with the session settings of a node. The schema is not checked."""
    return place.connection(database, "command line")


@asynccontextmanager
async def reports(invocation: Invocation) -> AsyncIterator[ReportStore]:
    """The figures of the database, whose schema was checked."""
    async with open_database(invocation.settings()) as database, connection(database) as conn:
        await check_schema(conn)
        yield ReportStore(conn)
