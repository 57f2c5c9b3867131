"""Where it is measured: a PostgreSQL server of its own, and a fresh database for each run."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from delayq.dsn import parse_dsn
from delayq.embedded import PrivateServer, find_binaries
from delayq.migrate import migrate

from .fill import fill_far_ahead, remove_others, vacuum
from .processes import BenchError, Child, Worker, child, environment, worker

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
_LONG: Final = 1_000_000
_BYTES_A_TASK: Final = 1_000
"""on disk, its indexes and what the server needs to write it included"""


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
    _filled: dict[int, Place] = field(default_factory=dict)

    @asynccontextmanager
    async def database(self, *, migrated: bool) -> AsyncIterator[Place]:
        """A fresh database, dropped at the end of the block; with delayq's schema if `migrated`."""
        place = await self._create(f"bench_{os.getpid()}_{next(_numbers)}")
        try:
            if migrated:
                async with connected(place.dsn) as conn:
                    await migrate(conn)
            yield place
        finally:
            await self._drop(place)

    async def filled(self, count: int) -> Place:
        """A database with delayq's schema and so many tasks a month ahead.

        All scenarios and runs share the one of that size: to write ten million tasks takes
        minutes. What a run that failed left behind is removed. Raises BenchError if the disk has
        no room for it.
        """
        if count not in self._filled:
            self._filled[count] = await self._fill(count)
        place = self._filled[count]
        async with connected(place.dsn) as conn:
            await remove_others(conn, count)
        place = replace(place, folder=self.folder / f"{place.name}_{next(_numbers)}")
        place.folder.mkdir()
        return place

    async def _fill(self, count: int) -> Place:
        self._need_room(count * _BYTES_A_TASK)
        if count >= _LONG:
            print(f"writes {count:,} tasks", file=sys.stderr, flush=True)
        place = await self._create(f"bench_{os.getpid()}_filled_{count}")
        try:
            async with connected(place.dsn) as conn:
                await migrate(conn)
                await fill_far_ahead(conn, count)
                await vacuum(conn)
        except BaseException:
            await self._drop(place)  # half filled it is nothing to compare with
            raise
        return place

    async def close(self) -> None:
        """Remove the shared databases."""
        for place in self._filled.values():
            await self._drop(place)

    @asynccontextmanager
    async def counted(self, place: Place) -> AsyncIterator[None]:
        """pg_stat_statements counts what sessions send that begin in the block."""
        setting = f'alter database "{place.name}" {{}} pg_stat_statements.track'
        counts = self.counts_statements and self.own
        if counts:
            await self.admin.execute(setting.format("set") + " = 'top'")
        try:
            yield
        finally:
            if counts:
                await self.admin.execute(setting.format("reset"))

    async def _create(self, name: str) -> Place:
        await self.admin.execute(f'create database "{name}" template template0')
        place = Place(self, name, dsn_of(self.dsn, name), self.folder / name)
        place.folder.mkdir()
        return place

    async def _drop(self, place: Place) -> None:
        await self.admin.execute(f'drop database if exists "{place.name}" with (force)')

    def _need_room(self, wanted: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if self.own and free < wanted:
            raise BenchError(
                f"needs {wanted / 1e9:.0f} GB in {self.folder.parent}, where {free / 1e9:.0f} GB"
                " are free (TMPDIR names another place)"
            )

    async def backends(self, place: Place) -> list[int]:
        """The processes of the server that serve the clients of a database now."""
        rows = await self.admin.fetch(
            "select pid from pg_stat_activity"
            " where datname = $1 and backend_type = 'client backend'",
            place.name,
        )
        return [row["pid"] for row in rows]

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[Child, str]]:
        """A fresh raw process and the DSN of a fresh database for it."""
        async with self.database(migrated=False) as place, place.child("raw_process") as process:
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
    async def worker(self, name: str = "worker", *, at_once: bool = False) -> AsyncIterator[Worker]:
        """A `delayq run` on it; `at_once`: what its handlers note is written as it happens."""
        env = environment(self.dsn, self.ground.settings)
        async with worker(self.folder, env, name, at_once=at_once) as started:
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
        ground = Ground(admin, dsn, runs, options.settings, counts, own)
        stack.push_async_callback(ground.close)
        yield ground


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
