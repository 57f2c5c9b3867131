"""Where it is measured: a PostgreSQL server of its own, and a fresh database for each run."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from delayq.dsn import parse_dsn
from delayq.embedded import PrivateServer, find_binaries
from delayq.migrate import migrate

from .processes import Child, Worker, child, environment, worker

if TYPE_CHECKING:
    from delayq.database import Connection

    from .options import Options

# What a server of one's own would have; `max_wal_size` is PostgreSQL's default, which the
# embedded server of delayq is below.
OPTIONS: Final = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "1GB",
}
STATEMENTS: Final = {
    # Loaded, but off in all databases but those where statements are counted.
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "none",
}
_BESIDES: Final = ("log_", "lc_", "default_text", "unix_socket", "listen_addresses", "timezone")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Ground:
    """The server, and the folder for the logs of all runs."""

    admin: Connection
    dsn: str
    folder: Path
    settings: Mapping[str, str]
    """DELAYQ_ variables that are not to be the defaults"""
    counts_statements: bool
    own: bool
    """False: somebody's server, where nothing is left behind"""

    @asynccontextmanager
    async def database(self, *, migrated: bool, counted: bool = False) -> AsyncIterator[Place]:
        """A fresh database, dropped at the end of the block; with delayq's schema if `migrated`.

        `counted`: pg_stat_statements counts in it.
        """
        name = f"bench_{os.getpid()}_{next(_numbers)}"
        await self.admin.execute(f'create database "{name}" template template0')
        try:
            if counted and self.counts_statements and self.own:
                await self.admin.execute(
                    f"alter database \"{name}\" set pg_stat_statements.track = 'top'"
                )
            place = Place(self, name, dsn_of(self.dsn, name), self.folder / name)
            place.folder.mkdir()
            if migrated:
                async with connected(place.dsn) as conn:
                    await migrate(conn)
            yield place
        finally:
            await self.admin.execute(f'drop database if exists "{name}" with (force)')

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[Child, str]]:
        """A fresh raw process and the DSN of a fresh database for it."""
        async with self.database(migrated=False) as place, place.child("raw") as process:
            yield process, place.dsn

    async def statements(self, database: str) -> int:
        """Statements that clients of a database have sent so far; else its transactions."""
        query = (
            "select coalesce(sum(calls), 0)::bigint from pg_stat_statements s"
            " join pg_database d on d.oid = s.dbid where datname = $1"
            if self.counts_statements
            else "select xact_commit + xact_rollback from pg_stat_database where datname = $1"
        )
        return int(await self.admin.fetchval(query, database))

    async def differing(self) -> dict[str, str]:
        """Server settings that are not PostgreSQL's defaults, but for logs and locale."""
        rows = await self.admin.fetch(
            "select name, current_setting(name) as value from pg_settings"
            " where setting is distinct from boot_val and source not in ('default', 'override',"
            " 'client', 'session') order by name"
        )
        return {
            row["name"]: row["value"]
            for row in rows
            if not row["name"].lower().startswith(_BESIDES)
        }


@dataclass(frozen=True, slots=True)
class Place:
    """One fresh database, and the processes that use it."""

    ground: Ground
    name: str
    dsn: str
    folder: Path

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A plain connection to it."""
        async with connected(self.dsn) as conn:
            yield conn

    @asynccontextmanager
    async def worker(self, name: str = "worker") -> AsyncIterator[Worker]:
        """A `delayq run` on it."""
        env = environment(self.dsn, self.ground.settings)
        async with worker(self.folder, env, name) as started:
            yield started

    @asynccontextmanager
    async def child(self, module: str) -> AsyncIterator[Child]:
        """A child process with this database as its DELAYQ_DSN."""
        env = environment(self.dsn, self.ground.settings)
        async with child(module, self.folder, env) as started:
            yield started


@asynccontextmanager
async def prepared(options: Options) -> AsyncIterator[Ground]:
    """The server of these options, started now and stopped at the end unless it is a DSN's."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder(options.keep))
        dsn = options.dsn or stack.enter_context(_server(folder, options.pg_bin))
        admin = await stack.enter_async_context(connected(dsn))
        runs = folder / "runs"
        runs.mkdir()
        own = options.dsn is None
        counts = await _count_statements(admin, own)
        yield Ground(admin, dsn, runs, options.settings, counts, own)


@contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="delayq-bench-"))
    folder.chmod(0o755)  # the server may have to run as another user
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _server(folder: Path, pg_bin: Path | None) -> Iterator[str]:
    binaries = find_binaries(pg_bin, allow_system=True)
    libraries = binaries.parent.glob("lib/**/pg_stat_statements.*")
    counting = any(path.suffix in (".so", ".dylib") for path in libraries)
    options = OPTIONS | (STATEMENTS if counting else {})
    with PrivateServer(folder / "server", options, pg_bin=binaries) as server:
        yield server.dsn


async def _count_statements(admin: Connection, own: bool) -> bool:
    """True if statements can be counted; else transactions are."""
    try:
        if own:
            await admin.execute("create extension if not exists pg_stat_statements")
        await admin.fetchval("select count(*) from pg_stat_statements")
    except asyncpg.PostgresError:
        return False
    return True


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    """A plain connection, closed at the end of the block."""
    conn = await asyncpg.connect(**parse_dsn(dsn).connect_arguments())
    try:
        yield conn
    finally:
        await conn.close(timeout=5)


def dsn_of(dsn: str, database: str) -> str:
    """The DSN of another database of the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{quote(database, safe='')}"))
