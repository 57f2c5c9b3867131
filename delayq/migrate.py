"""Brings the schema of a database to the version of this program, and checks that it is there.

Each numbered file is one transaction: it is applied and remembered, or nothing of it happened.
Two migrators at once take turns by an advisory lock that belongs to the transaction, so it
needs no session of its own (a pooler may stand in between) and a killed migrator leaves none.
It is polled, never waited for: a waiting statement would be a transaction that others wait for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from delayq import statements
from delayq.errors import (
    DatabaseTimeout,
    InvalidArgument,
    MigrationError,
    PrivilegeMissing,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from delayq.failures import DRIVER_ERRORS, is_transient, sqlstate_of, translate, translated

if TYPE_CHECKING:
    import asyncpg

    from delayq.database import Connection
    from delayq.statements import Migration

__all__ = ["check_schema", "migrate", "schema_version"]

_LOCK: Final = 0x64656C61797101  # "delayq", 1
_POLL_S: Final = 0.1
_PATIENCE_S: Final = 60.0  # for another migrator, and for a lock on a table
_LONGEST_S: Final = 3_600.0  # one migration; an index over a big table takes its time

_TRY_LOCK: Final = "select pg_catalog.pg_try_advisory_xact_lock($1)"
# Unqualified names in a migration are mistakes: nothing can be made in pg_catalog. And whoever
# waits for a table lock makes everyone else wait behind him, so not for long.
_PREPARE: Final = """
    set local search_path = pg_catalog, pg_temp;
    set local statement_timeout = 0;
    set local lock_timeout = '2s';
    set local idle_in_transaction_session_timeout = '60s'
"""
_HAS_SCHEMA: Final = "select exists (select from pg_catalog.pg_namespace where nspname = 'delayq')"
_HAS_TABLE: Final = "select pg_catalog.to_regclass('delayq.migrations') is not null"
_CREATE_TABLE: Final = """
    create table delayq.migrations (
        version integer primary key check (version > 0),
        name text not null,
        checksum text not null,
        applied_at timestamptz not null default pg_catalog.clock_timestamp()
    )
"""
_APPLIED: Final = "select version, name, checksum from delayq.migrations order by version"
_REMEMBER: Final = "insert into delayq.migrations (version, name, checksum) values ($1, $2, $3)"
_VERSION: Final = "select max(version) from delayq.migrations"


async def migrate(conn: Connection, target: int | None = None) -> list[Migration]:
    """Apply what is missing up to version `target` (default: all) and return it, in order.

    Needs a connection of its own, outside a transaction, with the right to create a schema (or
    owning it). Safe to call from several places at once. Raises `SchemaTooNew` and touches
    nothing if the database is ahead of this program, `MigrationError` if an applied file was
    edited or one fails, `PrivilegeMissing`, or `DatabaseTimeout` if another migrator or a lock
    stands in the way for a minute. There is no way down.
    """
    steps = _up_to(target)
    if conn.is_in_transaction():
        raise InvalidArgument("conn", "must not be inside a transaction; migrations have their own")
    applied = []
    while (step := await _patiently(conn, steps)) is not None:
        applied.append(step)
    return applied


async def schema_version(conn: Connection) -> int | None:
    """The version of the schema in the database, or None if it has none."""
    with translated():
        if not await conn.fetchval(_HAS_TABLE):
            return None
        version = await conn.fetchval(_VERSION)
    return None if version is None else int(version)


async def check_schema(conn: Connection) -> None:
    """Return if the schema has exactly the version that this program was made for.

    Raises `SchemaMissing`, `SchemaTooOld` or `SchemaTooNew` with both versions and what to do.
    """
    found, needed = await schema_version(conn), _latest()
    if found is None:
        raise SchemaMissing(
            f"the database has no delayq schema, this program needs version {needed}; "
            "run `delayq migrate`"
        )
    if found < needed:
        raise SchemaTooOld(
            f"the delayq schema has version {found}, this program needs version {needed}; "
            "run `delayq migrate`"
        )
    if found > needed:
        raise _too_new(found)


async def _patiently(conn: Connection, steps: list[Migration]) -> Migration | None:
    """Apply the next step once it is our turn. None if there is nothing left to apply."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + _PATIENCE_S
    while True:
        try:
            return await _apply_next(conn, steps)
        except _NotOurTurnError as wait:
            if loop.time() > give_up_at:
                raise DatabaseTimeout(f"{wait}; try again later, nothing was changed") from None
        await asyncio.sleep(_POLL_S)


async def _apply_next(conn: Connection, steps: list[Migration]) -> Migration | None:
    with translated():
        async with conn.transaction(isolation="read_committed"):
            await conn.execute(_PREPARE)
            if not await conn.fetchval(_TRY_LOCK, _LOCK):
                raise _NotOurTurnError("another migration is running")
            await _create_table(conn)
            step = _next(await conn.fetch(_APPLIED), steps)
            if step is not None:
                await _apply(conn, step)
            return step


async def _create_table(conn: Connection) -> None:
    try:
        # "if not exists" would ask for the right to create even where nothing is to be made.
        if not await conn.fetchval(_HAS_SCHEMA):
            await conn.execute("create schema delayq")
        if not await conn.fetchval(_HAS_TABLE):
            await conn.execute(_CREATE_TABLE)
    except DRIVER_ERRORS as error:
        if sqlstate_of(error) == "42501":
            raise _may_not_create() from None
        raise


def _next(rows: list[asyncpg.Record], steps: list[Migration]) -> Migration | None:
    """The first step that is missing, after comparing those that are there with our files."""
    known = statements.migrations()
    if rows and rows[-1]["version"] > len(known):
        raise _too_new(rows[-1]["version"])
    for row, migration in zip(rows, known, strict=False):
        _compare(row, migration)
    return steps[len(rows)] if len(rows) < len(steps) else None


def _compare(row: asyncpg.Record, migration: Migration) -> None:
    if row["version"] != migration.version:
        raise MigrationError(
            f"the database skipped migration {_title(migration)}; restore delayq.migrations"
        )
    if row["checksum"] != migration.checksum:
        raise MigrationError(
            f"migration {_title(migration)} was edited after it was applied; restore the file "
            "and write the change as a new migration"
        )


async def _apply(conn: Connection, step: Migration) -> None:
    try:
        await conn.execute(step.sql, timeout=_LONGEST_S)
        await conn.execute(_REMEMBER, step.version, step.name, step.checksum)
    except DRIVER_ERRORS as error:
        raise _failed(step, error) from None


def _failed(step: Migration, error: BaseException) -> Exception:
    state = sqlstate_of(error)
    if state == "55P03":
        return _NotOurTurnError(f"migration {_title(step)} could not lock a table in time")
    translation = translate(error)
    if is_transient(error):
        return translation
    if isinstance(translation, PrivilegeMissing):
        return PrivilegeMissing(f"migration {_title(step)}: {translation}")
    # A migration's text is ours: for a mistake in it the server's message quotes no data.
    told = f" ({error})" if state.startswith("42") else ""
    return MigrationError(
        f"migration {_title(step)} failed, nothing of it stays: {translation}{told}"
    )


def _up_to(target: int | None) -> list[Migration]:
    latest = _latest()
    if target is not None and not 1 <= target <= latest:
        raise InvalidArgument("target", f"must be a version from 1 to {latest}")
    return statements.migrations()[:target]


def _latest() -> int:
    return len(statements.migrations())


def _title(migration: Migration) -> str:
    return f"{migration.version:04}_{migration.name}"


def _too_new(found: int) -> SchemaTooNew:
    return SchemaTooNew(
        f"the delayq schema has version {found}, this program knows only {_latest()}; "
        "upgrade delayq (nothing was touched)"
    )


def _may_not_create() -> PrivilegeMissing:
    return PrivilegeMissing(
        "the role may not create the schema delayq; run `delayq migrate` as the owner of the "
        "database, or GRANT CREATE ON DATABASE to this role"
    )


class _NotOurTurnError(Exception):
    """Somebody else holds the lock; the transaction is rolled back and tried again."""
