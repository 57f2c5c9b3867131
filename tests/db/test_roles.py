"""What the roles of scripts/deploy/roles.sql can do, and what they cannot."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import pytest

from delayq.clock import Clock
from delayq.context import Context
from delayq.database import Database, parse_dsn
from delayq.handler_policy import PolicyDefaults
from delayq.handlers import Registry, Scheduler, make_task_decorator
from delayq.node import Node
from delayq.settings import load_settings
from delayq.statements import statement
from tests.conftest import SHORT
from tests.helpers import connected, wait_for

if TYPE_CHECKING:
    from delayq.database import Connection

ROLES = (Path(__file__).resolve().parents[2] / "scripts" / "deploy" / "roles.sql").read_text()
REFUSED = asyncpg.InsufficientPrivilegeError
Login = Callable[..., Awaitable[str]]


@pytest.fixture
async def owner(conn: Connection) -> Connection:
    """The owner of the schema, after roles.sql, with a table of the application."""
    await conn.execute(ROLES)
    await conn.execute("create table orders (id bigint primary key, state text not null)")
    await conn.execute("create schema private; create table private.secrets (word text)")
    return conn


@pytest.fixture
async def login(dsn: str, owner: Connection) -> AsyncIterator[Login]:
    """Makes a login role that is granted others, and gives its DSN."""
    made: list[str] = []

    async def make(*granted: str) -> str:
        name, password = f"login_{secrets.token_hex(6)}", secrets.token_hex(8)
        await owner.execute(f"create role {name} login password '{password}'")
        made.append(name)
        for role in granted:
            await owner.execute(f"grant {role} to {name}")
        parts = urlsplit(dsn)
        place = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{quote(name)}:{password}@{place}"))

    yield make
    for name in made:
        await owner.execute(f"drop owned by {name}; drop role {name}")


@asynccontextmanager
async def logged_in(login: Login, *granted: str) -> AsyncIterator[Connection]:
    async with connected(await login(*granted)) as conn:
        yield conn


async def schedule(conn: Connection, kind: str = "expire", **options: object) -> int:
    names = "".join(f", {name} => ${place}" for place, name in enumerate(options, 2))
    sql = f"select id from delayq.schedule($1, delay => interval '1 hour'{names})"
    return int(await conn.fetchval(sql, kind, *options.values()))


async def lease(owner: Connection, task: int) -> None:
    await owner.execute(
        "update delayq.tasks set state = 'running', lease_owner = 1, lease_token = 7, attempt = 1"
        " where id = $1",
        task,
    )


async def test_roles_can_be_set_up_again_and_again(owner: Connection) -> None:
    await owner.execute(ROLES)
    rows = await owner.fetch(
        "select rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolreplication as mighty"
        " from pg_roles where rolname in ('delayq_app', 'delayq_node')"
    )
    assert [row["mighty"] for row in rows] == [False, False]


@pytest.mark.parametrize("role", ["delayq_app", "delayq_node"])
async def test_the_roles_own_nothing_and_reach_no_other_schema(
    owner: Connection, login: Login, role: str
) -> None:
    owned = "select count(*) from pg_shdepend where deptype = 'o' and refobjid = $1::regrole"
    assert await owner.fetchval(owned, role) == 0
    async with logged_in(login, role) as conn:
        for forbidden in (
            "select * from private.secrets",
            "select * from orders",
            "create table delayq.mine ()",
            "create schema mine",
            "drop table delayq.tasks",
            "alter table delayq.tasks disable trigger all",
            "truncate delayq.tasks",
            f"select delayq.grant_node('{role}')",
        ):
            with pytest.raises(REFUSED):
                await conn.execute(forbidden)


async def test_a_stranger_may_not_even_look(owner: Connection, login: Login) -> None:
    async with logged_in(login) as conn:
        for forbidden in (
            "select * from delayq.tasks",
            "insert into delayq.tasks (kind) values ('expire')",
            "select delayq.cancel(1)",
            "select delayq.settle(1, 1)",
        ):
            with pytest.raises(REFUSED):
                await conn.execute(forbidden)


async def test_the_application_schedules_moves_cancels_and_reads(
    owner: Connection, login: Login
) -> None:
    async with logged_in(login, "delayq_app") as conn:
        task = await schedule(conn, key="order:1", idempotency_key="request-1")
        again = await schedule(conn, key="order:1", idempotency_key="request-1")
        assert again == task
        move = "select delayq.reschedule(kind => 'expire', key => 'order:1', delay => '2 hours')"
        assert await conn.fetchval(move) == "moved"
        assert await conn.fetchval("select delayq.run_now($1)", task) == "moved"
        assert await conn.fetchval("select delayq.cancel($1)", task) == "cancelled"
        assert await conn.fetchval("select delayq.revive($1)", task) == "already_finished"
        assert await conn.fetchval("select delayq.discard($1)", task) == "already_finished"
        read = "select state from delayq.task_history where id = $1"
        assert await conn.fetchval(read, task) == "cancelled"


async def test_the_application_can_call_every_statement_of_its_client(
    owner: Connection, login: Login
) -> None:
    many: list[Any] = [["k"], ["{}"], [0], [None], [0], [None], [None], [None], ["{}"]]
    calls: list[tuple[str, list[Any]]] = [
        ("schedule_many", many),
        ("schedule_keyed", [*many, ["x"], ["keep"], ["request-1"], None]),
        ("schedule_one", ["k", "{}", 0, None, "x", "keep", None, 0, None, None, None, "{}", None]),
        ("schedule_plain", ["k", 0, None, "{}", "{}", 0, None, None, None]),
        ("reschedule_many", [[1], [0], [None], True]),
        ("reschedule_key", ["k", "x", 0, None, None]),
        ("reschedule_keys", ["k", ["x"], 0, None, False]),
        ("cancel_many", [[1], True]),
        ("keys_page", ["k", "x", "", 10]),
        ("cancel_keys", ["k", ["x"], False]),
        ("cancel_key", ["k", "x", None]),
        ("revive_many", [[1], 0]),
        ("discard_many", [[1]]),
        ("get", [1]),
        ("key_holder", ["k", "x"]),
        ("list_live", [0, None, None, None, 10]),
        ("list_dead", [0, None, None, 10]),
        ("list_history", [2**62, None, None, None, 10]),
        ("nodes", [10]),
    ]
    async with logged_in(login, "delayq_app") as conn:
        for name, arguments in calls:
            await conn.fetch(statement(name), *arguments)


async def test_the_application_inserts_plain_rows_but_no_idempotency_key_and_no_lease(
    owner: Connection, login: Login
) -> None:
    async with logged_in(login, "delayq_app") as conn:
        await conn.execute("insert into delayq.tasks (kind, payload) values ('expire', '{}')")
        for column, value in (
            ("idempotency_key", "'mine'"),
            ("state", "'pending'"),
            ("lease_owner", "0"),
            ("attempt", "0"),
            ("cancel_requested", "true"),
            ("next", "'{}'"),
        ):
            with pytest.raises(REFUSED):
                await conn.execute(
                    f"insert into delayq.tasks (kind, {column}) values ('expire', {value})"
                )


async def test_the_application_cannot_change_leases_history_or_nodes(
    owner: Connection, login: Login
) -> None:
    async with logged_in(login, "delayq_app") as conn:
        task = await schedule(conn)
        await lease(owner, task)
        for forbidden in (
            "update delayq.tasks set execute_at = now()",
            "delete from delayq.tasks",
            "delete from delayq.task_history",
            "delete from delayq.dead_tasks",
            "update delayq.nodes set state = 'dead'",
            "insert into delayq.nodes values (1)",
            "update delayq.kinds set paused = true",
            "delete from delayq.idempotency",
            f"select delayq.settle({task}, 7)",
            f"select * from delayq.settle_many(array[{task}], array[7], array[0])",
            f"select * from delayq.adopt(array[{task}], null)",
            "select * from delayq.make_partitions(7)",
            "select * from delayq.drop_partitions(now())",
        ):
            with pytest.raises(REFUSED):
                await conn.execute(forbidden)
    assert await owner.fetchval("select state from delayq.tasks where id = $1", task) == "running"


@asynccontextmanager
async def running_node(dsn: str) -> AsyncIterator[tuple[Node, asyncio.Event]]:
    """A node whose one handler cancels an order as its effect."""
    registry, done = Registry(), asyncio.Event()
    task = make_task_decorator(registry, Mock(spec=Scheduler), PolicyDefaults())

    @task
    async def expire(ctx: Context, order_id: int) -> None:
        async with ctx.effect() as conn:
            await conn.execute("update orders set state = 'expired' where id = $1", order_id)
        done.set()

    settings = load_settings(dsn=dsn, embedded=False, **SHORT)
    async with Node(Database(parse_dsn(dsn), settings), registry, settings, clock=Clock()) as node:
        yield node, done


async def eventually(conn: Connection, sql: str, task: int) -> object:
    async with asyncio.timeout(10):
        while (found := await conn.fetchval(sql, task)) is None:  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.01)
    return found


async def test_a_login_with_the_grants_of_node_and_application_runs_an_effect(
    owner: Connection, login: Login, dsn: str
) -> None:
    await owner.execute("insert into orders values (42, 'unpaid')")
    node_dsn = await login("delayq_node")
    await owner.execute(f"grant select, update on orders to {urlsplit(node_dsn).username}")
    async with logged_in(login, "delayq_app") as app, running_node(node_dsn) as (_, done):
        sql = "select id from delayq.schedule('expire', '{\"order_id\": 42}', delay => '0')"
        task = await app.fetchval(sql)
        await asyncio.wait_for(done.wait(), 10)
        ended = "select state from delayq.task_history where id = $1"
        assert await eventually(app, ended, task) == "succeeded"
    assert await owner.fetchval("select state from orders") == "expired"
    assert await owner.fetchval("select count(*) from delayq.nodes") == 0


async def test_an_effect_on_a_table_that_was_not_granted_fails_and_changes_nothing(
    owner: Connection, login: Login
) -> None:
    await owner.execute("insert into orders values (42, 'unpaid')")
    async with running_node(await login("delayq_node")):
        task = await owner.fetchval(
            "select id from delayq.schedule('expire', '{\"order_id\": 42}', delay => '0',"
            " max_attempts => 1)"
        )
        await eventually(owner, "select id from delayq.dead_tasks where id = $1", task)
    assert await owner.fetchval("select state from orders") == "unpaid"


async def test_the_node_role_can_do_every_duty_of_upkeep(owner: Connection, login: Login) -> None:
    duties: list[tuple[str, list[Any]]] = [
        ("make_partitions", [8]),
        ("drop_partitions", [7]),
        ("prune_default", [7, 10]),
        ("prune_idempotency", [30, "", "", 10]),
        ("pause_kind", ["expire", True]),
        ("bury", [1, None]),
        ("end_sessions", [1]),
    ]
    async with logged_in(login, "delayq_node") as conn:
        for name, arguments in duties:
            await conn.fetch(statement(name), *arguments)
        lacking = await conn.fetchrow(statement("doctor_privileges"))
    assert lacking is not None
    assert (lacking["app"], lacking["node"]) == ([], [])


async def test_the_application_role_lacks_nothing_that_an_application_needs(
    owner: Connection, login: Login
) -> None:
    async with logged_in(login, "delayq_app") as conn:
        lacking = await conn.fetchrow(statement("doctor_privileges"))
    assert lacking is not None
    assert lacking["app"] == []
    assert "execute on delayq.settle" in lacking["node"]


async def test_nodes_of_one_login_may_end_each_others_sessions_but_nobody_elses(
    owner: Connection, login: Login
) -> None:
    dsn = await login("delayq_node")
    frozen = {"server_settings": {"application_name": "delayq/77"}}
    strange = {"server_settings": {"application_name": "delayq/88"}}
    async with connected(dsn) as judge, connected(dsn, **frozen) as peer:
        assert await judge.fetch(statement("end_sessions"), 77)
        await wait_for(peer.is_closed, "the frozen peer's session ends")
        async with connected(await login("delayq_app"), **strange) as stranger:
            with pytest.raises(REFUSED):
                await judge.fetch(statement("end_sessions"), 88)
            assert await stranger.fetchval("select 1") == 1


async def test_a_new_day_of_history_needs_no_new_grant(owner: Connection, login: Login) -> None:
    await owner.execute(
        "create table delayq.later partition of delayq.task_history"
        " for values from ('2100-01-01 00:00+00') to ('2100-01-02 00:00+00')"
    )
    async with logged_in(login, "delayq_app") as conn:
        sql = "select count(*) from delayq.task_history where finished_at > '2099-01-01'"
        assert await conn.fetchval(sql) == 0
