"""Doctor finds what is broken: each test breaks one thing and reads the advice."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from delayq.cli import examine as examining
from delayq.cli.checks import Check, Limits, worst
from delayq.cli.examine import examine
from delayq.database import Database, parse_dsn
from delayq.report_store import ReportStore
from delayq.settings import Settings, load_settings
from tests.db.test_pooler import DROPPED, Behind, behind  # noqa: F401 - a fixture
from tests.db.test_stats import node, pending
from tests.helpers import Server, absent, connected

if TYPE_CHECKING:
    from delayq.database import Connection

# Other tests of the same server have transactions and slots of their own.
PATIENT = Limits(transaction_warn_s=3_000)


async def findings(
    database: Database, settings: Settings, limits: Limits = PATIENT
) -> dict[str, Check]:
    return {check.name: check for check in await examine(database, settings, limits)}


def unreachable(dsn: str) -> Database:
    return Database(parse_dsn(dsn), load_settings(connect_timeout_s=2))


@asynccontextmanager
async def role(dsn: str, name: str, *rights: str) -> AsyncIterator[Database]:
    """The database as a role of its own sees it, which is gone afterwards."""
    async with connected(dsn) as conn:
        await conn.execute(f"create role {name} login")
        for right in rights:
            await conn.execute(right.format(role=name))
    try:
        yield Database(dataclasses.replace(parse_dsn(dsn), user=name), load_settings())
    finally:
        async with connected(dsn) as conn:
            await conn.execute(f"drop owned by {name}")
            await conn.execute(f"drop role {name}")


async def test_a_healthy_database_gets_no_failure(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await node(conn, 1, ["a"])
    await pending(conn, "a", 60)
    found = await findings(database, settings)
    assert {name for name, check in found.items() if check.status == "fail"} == set()
    assert list(found) == [
        "connection", "server", "clock", "time zone", "connections", "pooler", "listen",
        "notify queue", "old snapshots", "schema", "privileges", "partitions", "vacuum",
        "nodes", "kinds", "overdue", "running",
    ]  # fmt: skip
    assert found["listen"].status == "ok"
    assert all(check.finding for check in found.values())
    assert all(check.advice for check in found.values() if check.status != "ok")


async def test_a_database_that_is_not_there(server: Server, settings: Settings) -> None:
    found = await examine(unreachable(server.dsn_of("no_such_database")), settings, PATIENT)
    assert [(check.name, check.status) for check in found] == [("connection", "fail")]
    assert "DELAYQ_DSN" in found[0].advice


async def test_a_server_that_does_not_listen(settings: Settings) -> None:
    found = await examine(unreachable("postgresql://app:S3cr%2Ft@127.0.0.1:1/x"), settings, PATIENT)
    assert worst(found) == "fail"
    assert "127.0.0.1:1" in found[0].finding
    assert "S3cr" not in repr(found)


async def test_a_missing_schema(empty_dsn: str, settings: Settings) -> None:
    found = await findings(unreachable(empty_dsn), settings)
    assert found["schema"].status == "fail"
    assert "delayq migrate" in found["schema"].advice
    assert found["listen"].status == "ok"
    assert "kinds" not in found


async def test_an_old_and_a_new_schema(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute(
        "insert into delayq.migrations (version, name, checksum) values (999, 'x', 'x')"
    )
    assert "999" in (await findings(database, settings))["schema"].finding
    await conn.execute("delete from delayq.migrations where version > 1")
    assert "version 1" in (await findings(database, settings))["schema"].finding


async def test_a_role_that_may_do_nothing(dsn: str, settings: Settings) -> None:
    name = f"reader_{parse_dsn(dsn).database}"
    rights = (
        "grant usage on schema delayq to {role}",
        "grant select on all tables in schema delayq to {role}",
    )
    async with role(dsn, name, *rights) as place:
        found = await findings(place, settings)
    assert found["privileges"].status == "fail"
    assert f"delayq.grant_app('{name}')" in found["privileges"].advice


async def test_a_role_that_may_schedule_only(dsn: str, settings: Settings) -> None:
    name = f"app_{parse_dsn(dsn).database}"
    rights = ("select delayq.grant_app('{role}')",)
    async with role(dsn, name, *rights) as place:
        found = await findings(place, settings)
    assert found["privileges"].status == "warn"
    assert "may schedule but not run tasks" in found["privileges"].finding
    assert f"delayq.grant_node('{name}')" in found["privileges"].advice


async def test_a_role_that_may_run_tasks(dsn: str, settings: Settings) -> None:
    name = f"node_{parse_dsn(dsn).database}"
    rights = ("select delayq.grant_node('{role}')",)
    async with role(dsn, name, *rights) as place:
        found = await findings(place, settings)
    assert found["privileges"].status == "ok"
    assert "not visible" in found["old snapshots"].finding


async def test_a_time_zone_that_bare_instants_fall_into(
    conn: Connection, database: Database, settings: Settings
) -> None:
    name = await conn.fetchval("select current_database()")
    await conn.execute(f"alter database {name} set timezone = 'Europe/Berlin'")
    found = await findings(database, settings)
    assert found["time zone"].status == "warn"
    assert "Europe/Berlin" in found["time zone"].finding
    assert "offset" in found["time zone"].advice


async def test_a_column_that_lost_its_time_zone(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute(
        "alter table delayq.kinds alter column updated_at type timestamp using now()"
    )
    assert (await findings(database, settings))["time zone"].status == "fail"


async def test_a_connection_limit_that_leaves_no_room(
    conn: Connection, database: Database, settings: Settings
) -> None:
    name = await conn.fetchval("select current_database()")
    await conn.execute(f"alter database {name} connection limit 5")
    found = (await findings(database, settings))["connections"]
    assert found.status == "warn"
    assert "of 5 connections of the database" in found.finding
    assert "rolling restart" in found.advice


async def test_clocks_that_disagree(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = time.time_ns()
    monkeypatch.setattr("time.time_ns", lambda: here - 3_600 * 10**9)
    found = (await findings(database, settings))["clock"]
    assert found.status == "warn"
    assert "1h ahead of this computer's" in found.finding


async def test_a_notification_that_does_not_arrive(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallow(*_: object) -> None:
        return

    monkeypatch.setattr(ReportStore, "notify", swallow)
    monkeypatch.setattr(examining, "PATIENCE_S", 0.1)
    found = (await findings(database, settings))["listen"]
    assert found.status == "warn"
    assert "pooler" in found.advice


async def test_a_kind_that_nobody_serves(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await node(conn, 1, ["other"])
    await pending(conn, "lonely", -10, 3)
    found = await findings(database, settings)
    assert found["kinds"].status == "fail"
    assert "3 due tasks of kinds that nobody serves: lonely" in found["kinds"].finding
    assert found["overdue"].status == "ok"


async def test_overdue_tasks_of_a_served_kind(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await node(conn, 1, ["a"])
    await pending(conn, "a", -90)
    assert (await findings(database, settings))["overdue"].status == "fail"
    await conn.execute("insert into delayq.kinds (kind, paused) values ('a', true)")
    assert (await findings(database, settings))["overdue"].status == "ok"


async def test_dead_and_silent_nodes(
    conn: Connection, database: Database, settings: Settings
) -> None:
    assert (await findings(database, settings))["nodes"].status == "warn"
    await node(conn, 1, ["a"], state="dead")
    assert (await findings(database, settings))["nodes"].status == "fail"
    await node(conn, 2, ["a"])
    await node(conn, 3, ["a"], ttl_s=-20)
    found = (await findings(database, settings))["nodes"]
    assert found.status == "warn"
    assert found.finding.startswith("1 live, 1 dead, 1 silent")


async def test_a_running_task_of_a_dead_node(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await node(conn, 1, ["a"], state="dead")
    await conn.execute(
        """insert into delayq.tasks (kind, execute_at, state, lease_owner, lease_token, attempt)
           values ('a', delayq.clock() - interval '1 min', 'running', 1, 1, 1)"""
    )
    found = (await findings(database, settings))["running"]
    assert found.status == "warn"
    assert "1 running tasks belong to nodes that are dead or gone" in found.finding


async def test_missing_partitions_and_rows_in_the_default_one(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute(
        """do $$ declare name text; begin
             for name in select relname from pg_class where relname ~ '^task_history_[0-9]{8}$' loop
                 execute format('drop table delayq.%I', name);
             end loop;
           end $$"""
    )
    assert (await findings(database, settings))["partitions"].status == "fail"
    await conn.execute("select delayq.make_partitions(1)")
    assert (await findings(database, settings))["partitions"].status == "warn"
    await conn.execute("select delayq.make_partitions(7)")
    assert (await findings(database, settings))["partitions"].status == "ok"
    await conn.execute(
        """insert into delayq.task_history (
               id, kind, state, headers, priority, due_at, execute_at, created_at, attempt,
               interruptions, errors, lease_token, finished_at)
           values (1, 'a', 'cancelled', '{}', 0, now(), now(), now(), 0, 0, '[]', 0,
                   now() - interval '9 days')"""
    )
    found = (await findings(database, settings))["partitions"]
    assert found.status == "warn"
    assert "1 rows in the default one" in found.finding
    assert "make_partitions" in found.advice


async def test_a_transaction_that_stays_open(
    dsn: str, database: Database, settings: Settings
) -> None:
    limits = dataclasses.replace(PATIENT, transaction_warn_s=0)
    async with (
        connected(dsn, server_settings={"application_name": "forgotten"}) as stranger,
        stranger.transaction(isolation="repeatable_read"),
    ):
        pid = await stranger.fetchval("select pg_backend_pid()")
        found = (await findings(database, settings, limits))["old snapshots"]
    assert found.status == "warn"
    assert f"pid {pid} (forgotten)" in found.finding
    assert "pg_terminate_backend" in found.advice


async def test_a_prepared_transaction(
    conn: Connection, database: Database, settings: Settings
) -> None:
    name = f"forgotten-{await conn.fetchval('select current_database()')}"
    if await conn.fetchval("show max_prepared_transactions") == "0":
        absent("prepared transactions (max_prepared_transactions is 0)")
    await conn.execute("begin")
    await conn.execute("insert into delayq.kinds (kind) values ('x')")
    await conn.execute(f"prepare transaction '{name}'")
    try:
        limits = dataclasses.replace(PATIENT, transaction_warn_s=0)
        found = (await findings(database, settings, limits))["old snapshots"]
    finally:
        await conn.execute(f"rollback prepared '{name}'")
    assert f"prepared transaction {name}" in found.finding
    assert "ROLLBACK PREPARED" in found.advice


async def test_a_replication_slot_without_a_reader(
    conn: Connection, database: Database, settings: Settings
) -> None:
    name = f"forgotten_{await conn.fetchval('select current_database()')}"
    await conn.execute("select pg_create_physical_replication_slot($1, true)", name)
    try:
        found = (await findings(database, settings))["old snapshots"]
    finally:
        await conn.execute("select pg_drop_replication_slot($1)", name)
    assert found.status == "warn"
    assert f"replication slot {name} has no reader" in found.finding
    assert "pg_drop_replication_slot" in found.advice


async def test_autovacuum_that_was_switched_off(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute("alter table delayq.tasks set (autovacuum_enabled = off)")
    found = (await findings(database, settings))["vacuum"]
    assert found.status == "fail"
    assert found.advice == "alter table delayq.tasks reset (autovacuum_enabled)"


async def test_dead_rows_that_pile_up(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute("alter table delayq.tasks set (autovacuum_vacuum_threshold = 1000000)")
    await pending(conn, "a", 3_600, 50)
    await conn.execute("delete from delayq.tasks")
    limits = dataclasses.replace(PATIENT, dead_rows=20)
    async with asyncio.timeout(15):  # the statistics arrive when they please
        while (found := (await findings(database, settings, limits))["vacuum"]).status == "ok":
            await conn.fetchval("select pg_stat_clear_snapshot()")
    assert "tasks has 50 dead rows" in found.finding


@pytest.mark.more
@pytest.mark.parametrize("ignored", ["", DROPPED], ids=["refusing", "dropping"])
async def test_a_pooler_in_transaction_mode(
    behind: Behind,  # noqa: F811 - the fixture
    settings: Settings,
    ignored: str,
) -> None:
    async with behind(pool_mode="transaction", ignore_startup_parameters=ignored) as database:
        found = await findings(database, settings)
    assert found["pooler"].status == "warn"
    assert "transaction mode" in found["pooler"].finding
    assert "prepared statements fail" in found["pooler"].finding
    assert "straight at PostgreSQL" in found["pooler"].advice
    assert found["listen"].status == "warn"
    assert found["schema"].status == "ok"


@pytest.mark.more
async def test_a_pooler_in_session_mode(
    behind: Behind,  # noqa: F811 - the fixture
    settings: Settings,
) -> None:
    async with behind(pool_mode="session", ignore_startup_parameters=DROPPED) as database:
        found = await findings(database, settings)
    assert "start-up settings are dropped" in found["pooler"].finding
    assert "transaction mode" not in found["pooler"].finding
    assert found["listen"].status == "ok"


async def test_hostile_names_are_shown_as_text(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await pending(conn, "\x1b[31mevil\nkind", -10)
    found = await findings(database, settings)
    assert all(check.finding.isprintable() for check in found.values())
