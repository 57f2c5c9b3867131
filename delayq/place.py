"""Where the tasks are: the database that is named, or else the embedded one of the project."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from delayq.database import Connection, Database, close, parse_dsn
from delayq.errors import InvalidSettings
from delayq.migrate import migrate
from delayq.settings import Settings

_NOBODY: Final = 0  # no node: incarnations are never 0


def named_database(settings: Settings) -> Database | None:
    """The database of `settings.dsn`. InvalidArgument if that is malformed."""
    if settings.dsn is None:
        return None
    return Database(parse_dsn(settings.dsn.get_secret_value()), settings)


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """The database to work on; nothing is connected yet.

    Without a DSN it is the embedded PostgreSQL of the project: started unless somebody has it
    running, migrated, and there until the block ends. Raises InvalidSettings if that is
    switched off, EmbeddedError that names the ways out.
    """
    database = named_database(settings)
    if database is not None:
        yield database
        return
    if settings.embedded is False:
        raise InvalidSettings("DELAYQ_DSN: is not set; name the database there")
    # Imported here, since whoever names a database has no use for a server of ours.
    from delayq.embedded import embedded_server  # noqa: PLC0415 - see above

    server = embedded_server(
        settings.embedded_dir, pg_bin=settings.pg_bin, allow_system=settings.embedded is True
    )
    async with server as running:
        database = Database(parse_dsn(running.dsn), settings)
        async with connection(database, "migration") as conn:
            await migrate(conn)
        yield database


@asynccontextmanager
async def connection(database: Database, purpose: str) -> AsyncIterator[Connection]:
    """One connection with the session settings of a node. The schema is not checked."""
    conn = await database.connect_control(_NOBODY, purpose)
    try:
        yield conn
    finally:
        await close(conn)
