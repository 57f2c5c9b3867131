"""The schema comes to a database in whole steps, and is recognised afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

import pytest

from delayq import migrate as runner
from delayq import statements
from delayq.database import Connection, Database, parse_dsn
from delayq.errors import (
    DatabaseTimeout,
    DatabaseUnavailable,
    InvalidArgument,
    MigrationError,
    PrivilegeMissing,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from delayq.migrate import check_schema, migrate, schema_version
from delayq.settings import load_settings
from delayq.statements import Migration
from tests.helpers import Server, connected, wait_until_blocked

Give = Callable[..., None]


@pytest.fixture
async def empty(empty_dsn: str) -> AsyncIterator[Connection]:
    """A connection to a database without a schema."""
    async with connected(empty_dsn) as conn:
        yield conn


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Takes the texts of the migrations that the program shall have from now on."""

    def replace(*texts: str) -> None:
        steps = [
            Migration(number, f"step{number}", sql, checksum=f"sum of {sql}")
            for number, sql in enumerate(texts, start=1)
        ]
        monkeypatch.setattr(statements, "migrations", lambda: list(steps))

    return replace


async def _tables(conn: Connection) -> list[str]:
    rows = await conn.fetch(
        "select tablename from pg_tables where schemaname = 'delayq' order by 1"
    )
    return [row["tablename"] for row in rows]


# --- going forward --------------------------------------------------------------------------


async def test_an_empty_database_is_brought_to_the_newest_version(empty: Connection) -> None:
    assert await schema_version(empty) is None
    applied = await migrate(empty)
    assert applied == statements.migrations()
    assert await schema_version(empty) == len(applied)
    await check_schema(empty)


async def test_what_was_applied_is_remembered_with_its_name_checksum_and_time(
    empty: Connection, give: Give
) -> None:
    give("create table delayq.one ()")
    await migrate(empty)
    row = await empty.fetchrow("select *, clock_timestamp() as now from delayq.migrations")
    assert row is not None
    assert (row["version"], row["name"], row["checksum"]) == (
        1,
        "step1",
        "sum of create table delayq.one ()",
    )
    assert row["applied_at"] <= row["now"]


async def test_only_what_is_missing_is_applied(empty: Connection, give: Give) -> None:
    give("create table delayq.one ()")
    await migrate(empty)
    give("create table delayq.one ()", "create table delayq.two ()")
    assert [step.version for step in await migrate(empty)] == [2]
    assert await migrate(empty) == []


async def test_a_target_ends_the_way_early(empty: Connection, give: Give) -> None:
    give("select 1", "select 2", "select 3")
    assert [step.version for step in await migrate(empty, target=2)] == [1, 2]
    assert await migrate(empty, target=1) == [], "there is no way down"
    assert await schema_version(empty) == 2


@pytest.mark.parametrize("target", [0, -1, 4])
async def test_a_target_that_does_not_exist_is_refused(
    empty: Connection, give: Give, target: int
) -> None:
    give("select 1", "select 2", "select 3")
    with pytest.raises(InvalidArgument, match="from 1 to 3"):
        await migrate(empty, target=target)
    assert await schema_version(empty) is None


async def test_a_migration_that_fails_leaves_nothing_behind_and_can_be_tried_again(
    empty: Connection, give: Give
) -> None:
    give("create table delayq.one ()", "create table delayq.two (); select nonesuch()")
    with pytest.raises(MigrationError, match=r"0002_step2 failed.*nonesuch\(\) does not exist"):
        await migrate(empty)
    assert await schema_version(empty) == 1
    assert await _tables(empty) == ["migrations", "one"]
    give("create table delayq.one ()", "create table delayq.two ()")
    assert [step.version for step in await migrate(empty)] == [2]


async def test_a_migration_that_forgets_the_schemas_name_fails(
    empty: Connection, give: Give
) -> None:
    give("create table one ()")
    with pytest.raises((MigrationError, PrivilegeMissing)):
        await migrate(empty)


async def test_a_migration_is_not_stopped_by_the_time_limits_of_its_session(
    empty_dsn: str, give: Give
) -> None:
    give("select pg_sleep(0.3)")
    short = load_settings(statement_timeout_s=0.1, lock_timeout_s=0.1)
    conn = await Database(parse_dsn(empty_dsn), short).connect_control(0, "migrate")
    assert len(await migrate(conn)) == 1
    assert await conn.fetchval("show statement_timeout") == "100ms"
    await conn.close()


async def test_a_migration_runs_at_read_committed_whatever_the_role_prefers(
    empty: Connection, give: Give
) -> None:
    give("create table delayq.level as select current_setting('transaction_isolation') as name")
    await empty.execute("set default_transaction_isolation = serializable")
    await migrate(empty)
    assert await empty.fetchval("select name from delayq.level") == "read committed"


async def test_a_transaction_of_the_callers_is_refused(empty: Connection) -> None:
    async with empty.transaction():
        with pytest.raises(InvalidArgument, match="must not be inside a transaction"):
            await migrate(empty)


# --- two at once ----------------------------------------------------------------------------


async def test_two_migrators_at_once_apply_each_step_once(empty_dsn: str) -> None:
    async with connected(empty_dsn) as one, connected(empty_dsn) as two:
        both = await asyncio.gather(migrate(one), migrate(two))
        applied = sorted(step.version for part in both for step in part)
        assert applied == [step.version for step in statements.migrations()]
        await check_schema(one)


async def test_a_migrator_waits_for_another_without_a_transaction_open(
    empty_dsn: str, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    give("select 1")
    polled = asyncio.Event()
    real = asyncio.sleep

    async def sleep(_: float) -> None:
        polled.set()
        await real(0.001)

    monkeypatch.setattr("delayq.migrate.asyncio.sleep", sleep)
    async with connected(empty_dsn) as other, connected(empty_dsn) as conn:
        async with other.transaction():
            await other.execute("select pg_advisory_xact_lock($1)", runner._LOCK)
            waiting = asyncio.ensure_future(migrate(conn))
            await polled.wait()
            assert not waiting.done()
        assert len(await waiting) == 1


async def test_a_migrator_gives_up_when_the_other_one_does_not_end(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    async with connected(empty_dsn) as other, connected(empty_dsn) as conn:
        async with other.transaction():
            await other.execute("select pg_advisory_xact_lock($1)", runner._LOCK)
            with pytest.raises(DatabaseTimeout, match="another migration is running"):
                await migrate(conn)
        assert await schema_version(conn) is None


async def test_a_killed_migrator_leaves_no_lock(empty_dsn: str) -> None:
    async with connected(empty_dsn) as killed:
        transaction = killed.transaction()
        await transaction.start()
        await killed.execute("select pg_advisory_xact_lock($1)", runner._LOCK)
        killed.terminate()
    async with connected(empty_dsn) as conn:
        assert await migrate(conn)


async def test_a_table_that_somebody_uses_is_tried_again_until_he_is_done(
    empty_dsn: str, give: Give
) -> None:
    steps = [
        "create table delayq.one ()",
        "set lock_timeout = 50; alter table delayq.one add a int",
    ]
    give(*steps[:1])
    async with connected(empty_dsn) as conn, connected(empty_dsn) as user:
        await migrate(conn)
        give(*steps)
        async with user.transaction():
            await user.execute("select from delayq.one")
            waiting = asyncio.ensure_future(migrate(conn))
            await wait_until_blocked(user, "alter table delayq.one")
            assert not waiting.done()
        assert [step.version for step in await waiting] == [2]


# --- what is refused ------------------------------------------------------------------------


async def test_an_edited_migration_is_refused_by_name(empty: Connection, give: Give) -> None:
    give("select 1", "select 2")
    await migrate(empty)
    give("select 1", "select 2 -- edited", "create table delayq.three ()")
    with pytest.raises(MigrationError, match="0002_step2 was edited after it was applied"):
        await migrate(empty)
    assert await schema_version(empty) == 2


async def test_a_gap_in_what_was_applied_is_refused(empty: Connection, give: Give) -> None:
    give("select 1", "select 2")
    await migrate(empty)
    await empty.execute("delete from delayq.migrations where version = 1")
    with pytest.raises(MigrationError, match="skipped migration 0001_step1"):
        await migrate(empty)


async def test_a_newer_database_is_left_alone(empty: Connection, give: Give) -> None:
    give("select 1", "select 2")
    await migrate(empty)
    give("select 1 -- even edited")
    with pytest.raises(SchemaTooNew, match=r"version 2.*knows only 1.*upgrade delayq"):
        await migrate(empty)
    with pytest.raises(SchemaTooNew, match="version 2"):
        await check_schema(empty)


async def test_a_database_without_a_schema_is_told_what_to_run(empty: Connection) -> None:
    with pytest.raises(SchemaMissing, match="run `delayq migrate`"):
        await check_schema(empty)


async def test_an_older_schema_is_told_both_versions_and_what_to_run(
    empty: Connection, give: Give
) -> None:
    give("select 1", "select 2", "select 3")
    await migrate(empty, target=2)
    with pytest.raises(
        SchemaTooOld, match=r"version 2, this program needs version 3.*`delayq migrate`"
    ):
        await check_schema(empty)


async def test_a_half_made_schema_counts_as_none(empty: Connection, give: Give) -> None:
    give("select 1")
    await empty.execute("create schema delayq")
    assert await schema_version(empty) is None
    with pytest.raises(SchemaMissing):
        await check_schema(empty)
    assert len(await migrate(empty)) == 1


# --- who may --------------------------------------------------------------------------------


@pytest.fixture
async def plain_role(server: Server, empty_dsn: str) -> AsyncIterator[str]:
    """A role that may log in and nothing else; its DSN."""
    name = f"plain_{parse_dsn(empty_dsn).database}"
    async with connected(server.dsn) as admin:
        await admin.execute(f"create role {name} login")
        yield empty_dsn.replace("postgres@", f"{name}@")
    async with connected(empty_dsn) as owner:
        await owner.execute(f"drop owned by {name} cascade; drop role {name}")


async def test_a_role_that_may_not_create_a_schema_is_told_so(plain_role: str) -> None:
    async with connected(plain_role) as conn:
        with pytest.raises(PrivilegeMissing, match="GRANT CREATE ON DATABASE"):
            await migrate(conn)


async def test_a_role_that_owns_the_empty_schema_needs_no_more(
    plain_role: str, empty: Connection, give: Give
) -> None:
    give("create table delayq.one ()")
    role = parse_dsn(plain_role).user
    await empty.execute(f"create schema delayq authorization {role}")
    async with connected(plain_role) as conn:
        assert len(await migrate(conn)) == 1


async def test_a_role_that_may_not_see_the_schema_is_told_so(
    plain_role: str, empty: Connection
) -> None:
    await migrate(empty)
    async with connected(plain_role) as conn:
        with pytest.raises(PrivilegeMissing, match="permission denied for schema delayq"):
            await check_schema(conn)
        with pytest.raises(PrivilegeMissing):
            await migrate(conn)


async def test_a_lost_connection_is_an_outage_and_not_a_mistake_of_the_migration(
    empty: Connection, give: Give
) -> None:
    give("select pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(DatabaseUnavailable):
        await migrate(empty)


def test_the_steps_do_not_show_their_text() -> None:
    assert "select" not in repr(dataclasses.replace(statements.migrations()[0], sql="select 1"))
