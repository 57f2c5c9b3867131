"""Connections have the settings that the protocol needs, whatever stands in between."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from delayq.database import Connection, Database, close, parse_dsn, translated
from delayq.errors import (
    AuthenticationFailed,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    DelayQError,
    InvalidArgument,
    TransactionConflict,
)
from delayq.settings import Settings, load_settings
from tests.conftest import Logged
from tests.helpers import Server, absent, connected, wait_until_blocked
from tests.relay import relay

CONTROL = {
    "plan_cache_mode": "force_custom_plan",
    "jit": "off",
    "default_transaction_isolation": "read committed",
    "statement_timeout": "30000",
    "lock_timeout": "5000",
    "idle_in_transaction_session_timeout": "60000",
    "TimeZone": "UTC",
}
MARKER = "planted-marker"


@pytest.fixture
def quick() -> Settings:
    """Settings that give up connecting soon."""
    return load_settings(connect_timeout_s=0.5)


async def test_a_control_connection_has_its_settings_and_names_its_node(database: Database) -> None:
    conn = await database.connect_control(42, "lease")
    assert await database.read_back(conn) == {**CONTROL, "application_name": "delayq/42"}
    assert not database.behind_pooler
    await close(conn)


async def test_what_a_role_or_the_dsn_prefers_does_not_reach_a_control_connection(
    dsn: str, settings: Settings
) -> None:
    async with connected(dsn) as conn:
        name = parse_dsn(dsn).database
        await conn.execute(
            f"alter database {name} set default_transaction_isolation = serializable"
        )
    given = f"{dsn}&options=-c%20jit=on%20-c%20statement_timeout=0%20-c%20work_mem=3MB"
    database = Database(parse_dsn(given), settings)
    control = await database.connect_control(1, "lease")
    assert await database.read_back(control) == {**CONTROL, "application_name": "delayq/1"}
    assert await control.fetchval("show work_mem") == "3MB"
    await close(control)


async def test_a_reset_does_not_take_the_settings_away(database: Database) -> None:
    conn = await database.connect_control(1, "lease")
    await conn.execute("set jit = on; reset all")
    assert await database.read_back(conn) == {**CONTROL, "application_name": "delayq/1"}
    await close(conn)


async def test_settings_that_were_lost_are_set_again(database: Database) -> None:
    conn = await database.connect_control(1, "lease")
    await conn.execute("set jit = on; set plan_cache_mode = auto")
    await database.check_control(conn)
    assert await database.read_back(conn) == {**CONTROL, "application_name": "delayq/1"}
    await close(conn)


async def test_pooled_connections_keep_their_settings_and_the_roles_time_zone(
    dsn: str, settings: Settings
) -> None:
    database = Database(parse_dsn(f"{dsn}&options=-c%20TimeZone=Asia/Kolkata"), settings)
    pool = await database.create_pool(1, 1, "delayq client")
    for _ in range(2):  # a release in between resets the session
        async with pool.acquire() as conn:
            assert await conn.fetchval("show plan_cache_mode") == "force_custom_plan"
            assert await conn.fetchval("show application_name") == "delayq client"
            assert await conn.fetchval("show statement_timeout") == "30s"
            assert await conn.fetchval("show TimeZone") == "Asia/Kolkata"
    await pool.close()


async def test_the_dsn_may_give_the_applications_statements_another_time_limit(
    dsn: str, settings: Settings
) -> None:
    database = Database(parse_dsn(f"{dsn}&options=-c%20statement_timeout=7s"), settings)
    pool = await database.create_pool(1, 1, "delayq client")
    assert await pool.fetchval("show statement_timeout") == "7s"
    assert not database.behind_pooler
    await pool.close()


# --- poolers --------------------------------------------------------------------------------


def _refusing(parameters: dict[str, str]) -> dict[str, str] | str:
    return "unsupported startup parameter: jit" if "jit" in parameters else parameters


def _dropping(parameters: dict[str, str]) -> dict[str, str] | str:
    kept = ("user", "database", "application_name", "client_encoding")
    return {name: value for name, value in parameters.items() if name in kept}


@pytest.mark.parametrize("pooler", [_refusing, _dropping], ids=["refusing", "dropping"])
async def test_settings_are_set_afterwards_where_a_pooler_does_not_pass_them_on(
    dsn: str, settings: Settings, pooler: object
) -> None:
    async with relay(dsn, pooler) as wire:  # type: ignore[arg-type]  # either of the two above
        database = Database(parse_dsn(wire.dsn), settings)
        conn = await database.connect_control(9, "lease")
        assert database.behind_pooler
        assert await database.read_back(conn) == {**CONTROL, "application_name": "delayq/9"}
        before = wire.connections
        await close(await database.connect_control(9, "settle"))
        assert wire.connections == before + 1, "what was learnt is not tried again"
        await close(conn)


async def test_pooled_connections_get_their_settings_back_behind_a_pooler(
    dsn: str, settings: Settings
) -> None:
    async with relay(dsn, _dropping) as wire:
        database = Database(parse_dsn(wire.dsn), settings)
        pool = await database.create_pool(1, 1, "delayq client")
        for _ in range(2):
            async with pool.acquire() as conn:
                assert await conn.fetchval("show plan_cache_mode") == "force_custom_plan"
        await pool.close()


async def test_settings_that_do_not_take_are_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for a pooler that answers SET from one backend and the question from another.
    monkeypatch.setattr("delayq.database._SET", "select $1::text[], $2::text[]")
    conn = await database.connect_control(1, "lease")
    await conn.execute("set jit = on")
    with pytest.raises(DatabaseError, match="the session settings jit do not take"):
        await database.check_control(conn)
    await close(conn)


# --- what cannot be reached ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://app:{MARKER}@127.0.0.1:1/shop",
        f"postgresql://app:{MARKER}@nonesuch.invalid:5432/shop",
        f"postgresql://app:{MARKER}@/shop?host=/nonesuch",
    ],
)
async def test_an_unreachable_database_is_described_without_the_password(
    text: str, quick: Settings, logged: list[Logged]
) -> None:
    dsn = parse_dsn(text)
    with pytest.raises(DatabaseUnavailable) as refused:
        await Database(dsn, quick).connect_control(1, "beat")
    assert f"beat connection to {dsn.describe()}" in str(refused.value)
    _nothing_shows(refused.value, logged)


async def test_a_server_that_never_answers_is_given_up_in_time(dsn: str, quick: Settings) -> None:
    async with relay(dsn) as wire:
        wire.deafen()
        with pytest.raises(DatabaseTimeout, match="no answer in time"):
            await Database(parse_dsn(wire.dsn), quick).connect_control(1, "beat")


async def test_the_dsns_own_time_limit_goes_before_the_setting(
    dsn: str, settings: Settings
) -> None:
    async with relay(dsn) as wire:
        wire.deafen()
        database = Database(parse_dsn(f"{wire.dsn}&connect_timeout=1"), settings)
        async with asyncio.timeout(5):
            with pytest.raises(DatabaseTimeout):
                await database.connect_control(1, "beat")


async def test_a_pool_meets_an_outage_with_the_same_errors(dsn: str, quick: Settings) -> None:
    async with relay(dsn) as wire:
        pool = await Database(parse_dsn(wire.dsn), quick).create_pool(0, 1, "delayq client")
        assert await pool.fetchval("select 1") == 1
        wire.cut()
        with pytest.raises(DatabaseUnavailable), translated():
            await pool.fetchval("select 1")
        with pytest.raises(DatabaseUnavailable):
            await pool.acquire()
        wire.resume()
        assert await pool.fetchval("select 1") == 1
        await pool.close()


async def test_a_missing_database_is_named(server: Server, quick: Settings) -> None:
    with pytest.raises(DatabaseError, match='database "nonesuch" does not exist'):
        await Database(parse_dsn(server.dsn_of("nonesuch")), quick).connect_control(1, "beat")


@pytest.mark.parametrize("name", ["sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile"])
def test_a_file_that_is_not_there_is_named_before_anything_is_tried(
    name: str, quick: Settings
) -> None:
    dsn = parse_dsn(f"postgresql://app:{MARKER}@127.0.0.1:1/shop?{name}=/nonesuch/file")
    with pytest.raises(InvalidArgument, match=f"{name}: there is no file /nonesuch/file"):
        Database(dsn, quick)


async def test_tls_parameters_that_the_driver_refuses_are_the_callers_mistake(
    quick: Settings, logged: list[Logged]
) -> None:
    given = "sslmode=require&ssl_min_protocol_version=x"
    dsn = parse_dsn(f"postgresql://app:{MARKER}@127.0.0.1:1/shop?{given}")
    with pytest.raises(InvalidArgument, match="dsn") as refused:
        await Database(dsn, quick).connect_control(1, "beat")
    _nothing_shows(refused.value, logged)


async def test_a_connection_service_file_with_mistakes_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: Settings, logged: list[Logged]
) -> None:
    (tmp_path / "services").write_text(f"[shop]\nhost=127.0.0.1\n{MARKER}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with pytest.raises(InvalidArgument, match="service file") as refused:
        await Database(parse_dsn("postgresql:///?service=shop"), quick).connect_control(1, "beat")
    _nothing_shows(refused.value, logged)


# --- passwords ------------------------------------------------------------------------------


@pytest.fixture
async def guarded(server: Server, dsn: str) -> AsyncIterator[str]:
    """A role that this server lets in by password only; its name."""
    role = f"guarded_{parse_dsn(dsn).database}"
    async with connected(server.dsn) as admin:
        hba = Path(await admin.fetchval("show hba_file"))
        await admin.execute(f"create role {role} login password '{MARKER}'")
        before = _demand_password(hba, role)
        await admin.execute("select pg_reload_conf()")
        yield role
        _put_back(hba, before)
        await admin.execute("select pg_reload_conf()")
        await admin.execute(f"drop role {role}")


def _demand_password(hba: Path, role: str) -> str:
    if not hba.is_file():
        absent("a server whose pg_hba.conf can be edited")
    before = hba.read_text()
    _put_back(hba, f"local all {role} scram-sha-256\nhost all {role} all scram-sha-256\n{before}")
    return before


def _put_back(hba: Path, text: str) -> None:
    hba.write_text(text)


def _as(dsn: str, role: str, password: str) -> str:
    return dsn.replace("postgres@", f"{role}:{password}@")


async def test_the_right_password_is_let_in(dsn: str, guarded: str, quick: Settings) -> None:
    database = Database(parse_dsn(_as(dsn, guarded, MARKER)), quick)
    conn = await database.connect_control(1, "beat")
    assert await conn.fetchval("select current_user") == guarded
    await close(conn)


async def test_a_wrong_password_is_told_without_either_password(
    dsn: str, guarded: str, quick: Settings, logged: list[Logged]
) -> None:
    wrong = "wr%6Fng-planted-marker"
    database = Database(parse_dsn(_as(dsn, guarded, wrong)), quick)
    with pytest.raises(AuthenticationFailed) as refused:
        await database.connect_control(1, "beat")
    assert f"as {guarded}" in str(refused.value)
    _nothing_shows(refused.value, logged)
    assert "wr%6F" not in str(refused.value)


# --- errors of statements -------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "select $1::text::int",
        "insert into public.secrets values ($1)",
        "select 1 / (length($1) - length($1))",
        "do $$ begin raise exception 'planted-marker'; end $$",
        "select 'planted-marker' 1",
    ],
)
async def test_no_value_of_a_failed_statement_is_in_the_error(
    database: Database, statement: str, logged: list[Logged]
) -> None:
    conn = await database.connect_control(1, "lease")
    await conn.execute("create table public.secrets (value text check (value = 'x'))")
    arguments = (MARKER,) if "$1" in statement else ()
    with pytest.raises(DatabaseError) as failed, translated():
        await conn.execute(statement, *arguments)
    _nothing_shows(failed.value, logged)
    await close(conn)


async def test_a_value_of_the_wrong_type_is_refused_without_being_shown(
    database: Database, logged: list[Logged]
) -> None:
    conn = await database.connect_control(1, "lease")
    with pytest.raises(DatabaseError, match=r"query argument \$1") as failed, translated():
        await conn.fetchval("select $1::int", MARKER)
    _nothing_shows(failed.value, logged)
    await close(conn)


async def test_a_statement_that_takes_too_long_ends_by_the_servers_limit(
    dsn: str, settings: Settings
) -> None:
    short = settings.model_copy(update={"statement_timeout_s": 0.05, "lock_timeout_s": 0.05})
    conn = await Database(parse_dsn(dsn), short).connect_control(1, "lease")
    with pytest.raises(DatabaseTimeout), translated():
        await conn.execute("select pg_sleep(10)")
    assert await conn.fetchval("select 1") == 1, "the connection is still good"
    await close(conn)


async def test_a_lock_that_is_not_given_ends_by_the_servers_limit(
    dsn: str, settings: Settings
) -> None:
    short = settings.model_copy(update={"lock_timeout_s": 0.05})
    waiting = await Database(parse_dsn(dsn), short).connect_control(1, "lease")
    async with connected(dsn) as holder, holder.transaction():
        await holder.execute("lock table delayq.nodes")
        with pytest.raises(DatabaseTimeout, match="a lock was not given"), translated():
            await waiting.execute("select from delayq.nodes")
    await close(waiting)


async def test_a_deadlock_is_a_conflict_that_may_be_tried_again(dsn: str, conn: Connection) -> None:
    async with connected(dsn) as loser, connected(dsn) as winner:
        await loser.execute("set deadlock_timeout = '10ms'")
        async with winner.transaction():
            async with loser.transaction():
                await loser.execute("select pg_advisory_xact_lock(1)")
                await winner.execute("select pg_advisory_xact_lock(2)")
                waits = asyncio.ensure_future(winner.execute("select pg_advisory_xact_lock(1)"))
                await wait_until_blocked(conn, winner.get_server_pid())
                with pytest.raises(TransactionConflict), translated():
                    await loser.execute("select pg_advisory_xact_lock(2)")
            await waits


async def test_a_killed_session_is_an_outage(database: Database, conn: Connection) -> None:
    control = await database.connect_control(1, "lease")
    await conn.execute("select pg_terminate_backend($1)", control.get_server_pid())
    with pytest.raises(DatabaseUnavailable), translated():
        await control.fetchval("select 1")
    await close(control)


async def test_closing_does_not_wait_for_a_server_that_is_silent(
    dsn: str, settings: Settings
) -> None:
    async with relay(dsn) as wire:
        conn = await Database(parse_dsn(wire.dsn), settings).connect_control(1, "lease")
        wire.deafen()
        async with asyncio.timeout(5):
            await close(conn)
        assert conn.is_closed()


def _nothing_shows(error: DelayQError, logged: list[Logged]) -> None:
    told = "".join(traceback.format_exception(error)) + "".join(one.text for one in logged)
    assert MARKER not in told
