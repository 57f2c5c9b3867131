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


# --- every right that there is --------------------------------------------------------------------

_RIGHTS = """
    with granted(what, name, acl) as (
        select 'schema', nspname, nspacl from pg_namespace
        union all
        select 'relation', n.nspname || '.' || c.relname, c.relacl
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
        union all
        select 'column', n.nspname || '.' || c.relname || '.' || a.attname, a.attacl
          from pg_attribute a join pg_class c on c.oid = a.attrelid
                              join pg_namespace n on n.oid = c.relnamespace
        union all
        select 'function', n.nspname || '.' || p.proname, p.proacl
          from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        union all
        select 'database', datname, datacl from pg_database where datname = current_database()
        union all
        select 'type', n.nspname || '.' || t.typname, t.typacl
          from pg_type t join pg_namespace n on n.oid = t.typnamespace
    )
    select what, name, lower(right_.privilege_type) as may, right_.is_grantable as pass_on
      from granted, aclexplode(acl) as right_ where right_.grantee = $1::regrole
"""
INSERTS = (
    "kind payload headers key priority due_at execute_at misfire_grace_ms timeout_ms max_attempts"
).split()
APPLICATION_CALLS = (
    "bucket cancel cancel_keys cancel_many check_reference clock discard discard_many find hint"
    " hint_horizon hint_line hint_text instant is_order live micros notify reschedule"
    " reschedule_keys reschedule_many revive revive_many run_now run_now_many schedule"
    " schedule_keyed schedule_many schedule_one"
).split()
ADMINISTRATORS_CALLS = {"grant_app", "grant_node"}
READ, WRITE = {"select"}, {"select", "insert", "update", "delete"}
NODE_WRITES = {
    **dict.fromkeys("tasks dead_tasks nodes idempotency kinds".split(), WRITE),
    "task_history": {"select", "insert"},
    "task_history_default": {"select", "delete"},
}


async def _rights(owner: Connection, role: str) -> dict[str, dict[str, set[str]]]:
    """By kind of object: what each may be used for."""
    found: dict[str, dict[str, set[str]]] = {}
    for row in await owner.fetch(_RIGHTS, role):
        assert not row["pass_on"], row
        name = row["name"].removeprefix("delayq.")
        found.setdefault(row["what"], {}).setdefault(name, set()).add(row["may"])
    return found


async def _names(owner: Connection, sql: str) -> set[str]:
    return {row[0] for row in await owner.fetch(sql)}


_TABLES = """
    select relname from pg_class
     where relnamespace = 'delayq'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f')
"""
_FUNCTIONS = "select distinct proname from pg_proc where pronamespace = 'delayq'::regnamespace"


async def test_the_application_role_has_these_rights_and_no_others(owner: Connection) -> None:
    rights = await _rights(owner, "delayq_app")
    assert rights.pop("schema") == {"delayq": {"usage"}}
    assert rights.pop("relation") == dict.fromkeys(await _names(owner, _TABLES), READ)
    assert rights.pop("column") == {f"tasks.{name}": {"insert"} for name in INSERTS}
    assert sorted(rights.pop("function")) == APPLICATION_CALLS
    assert rights == {}


async def test_the_node_role_has_these_rights_and_no_others(owner: Connection) -> None:
    rights = await _rights(owner, "delayq_node")
    tables = dict.fromkeys(await _names(owner, _TABLES), READ)
    assert rights.pop("schema") == {"delayq": {"usage"}}
    assert rights.pop("relation") == tables | NODE_WRITES
    assert rights.pop("column") == {f"tasks.{name}": {"insert"} for name in INSERTS}
    functions = await _names(owner, _FUNCTIONS)
    assert set(rights.pop("function")) == functions - ADMINISTRATORS_CALLS
    assert rights == {}


async def test_nobody_else_has_any_right_and_the_roles_belong_to_no_other(
    owner: Connection,
) -> None:
    others = await owner.fetch(_RIGHTS.replace("$1::regrole", "0"))  # what everybody has
    assert [row for row in others if row["name"].startswith("delayq")] == []
    member_of = await owner.fetch(
        "select roleid::regrole::text from pg_auth_members"
        " where member in ('delayq_app'::regrole, 'delayq_node'::regrole)"
    )
    assert member_of == []


@pytest.mark.parametrize("role", ["delayq_app", "delayq_node"])
async def test_no_role_changes_the_schema_or_touches_what_is_not_delayqs(
    owner: Connection, login: Login, role: str
) -> None:
    async with logged_in(login, role) as conn:
        forbidden = [
            f"{verb} {table}"
            for table in ("orders", "private.secrets")
            for verb in ("select from", "delete from", "truncate", "drop table", "lock table")
        ]
        forbidden += [
            "insert into orders values (1, 'x')",
            "update orders set state = 'x'",
            "insert into private.secrets values ('x')",
            "update private.secrets set word = 'x'",
            "create table private.mine ()",
            "create function private.mine() returns int language sql as 'select 1'",
            "create function delayq.mine() returns int language sql as 'select 1'",
            "create or replace function delayq.clock() returns date language sql as 'select null'",
            "alter function delayq.clock() volatile",
            "create index on delayq.tasks (kind)",
            "create rule mine as on insert to delayq.tasks do nothing",
            "alter table delayq.tasks add column mine int",
            "comment on table delayq.tasks is 'mine'",
            "drop schema delayq cascade",
            "alter schema private rename to mine",
            "create role mine",
            "set role postgres",
            "copy delayq.tasks (kind) to program 'cat'",
            "select pg_read_file('postgresql.conf')",
            "update delayq.migrations set checksum = ''",
            "delete from delayq.migrations",
        ]
        if conn.get_server_version().major >= 15:  # before, PostgreSQL gave everybody that right
            forbidden.append("create table public.mine ()")
        assert [sql for sql in forbidden if not await refused(conn, sql)] == []


async def refused(conn: Connection, sql: str) -> bool:
    """Whether the role lacks the right to do so; nothing of it stays."""
    transaction = conn.transaction()
    await transaction.start()
    try:
        await conn.execute(sql)
    except REFUSED:
        return True
    finally:
        await transaction.rollback()
    return False


async def test_the_application_writes_no_table_by_itself(owner: Connection, login: Login) -> None:
    async with logged_in(login, "delayq_app") as conn:
        await schedule(conn, key="order:1")
        for table in await _names(owner, _TABLES):
            column = await owner.fetchval(
                "select attname from pg_attribute where attrelid = $1::regclass and attnum = 1",
                f"delayq.{table}",
            )
            forbidden = [
                f"update delayq.{table} set {column} = default",
                f"delete from delayq.{table}",
                f"truncate delayq.{table}",
                f"select * from delayq.{table} for update",
                f"insert into delayq.{table} ({column}) overriding system value values (default)",
            ]
            if table != "tasks":  # whoever may insert may lock so
                forbidden.append(f"lock table delayq.{table} in row exclusive mode")
            assert [sql for sql in forbidden if not await refused(conn, sql)] == []


# Whoever can make functions of his own puts them before PostgreSQL's. They are plain ones, with
# their caller's rights: if a function of delayq called one, it would run as the owner.
_TRAPS = """
    create function evil.{name}({arguments}) returns {result} language plpgsql as $$
    begin raise exception 'hijacked as %', current_user; end $$
"""
HIJACKED = [
    ("array_position", "text[], text", "integer"),
    ("unnest", "bigint[]", "setof bigint"),
    ("unnest", "text[]", "setof text"),
    ("generate_series", "bigint, bigint", "setof bigint"),
    ("now", "", "timestamptz"),
    ("random", "", "float8"),
    ("clock_timestamp", "", "timestamptz"),
    ("octet_length", "text", "integer"),
    ("pg_column_size", "jsonb", "integer"),
    ("jsonb_typeof", "jsonb", "text"),
    ("current_setting", "text, boolean", "text"),
    ("set_config", "text, text, boolean", "text"),
    ("pg_notify", "text, text", "void"),
    ("hashint8extended", "bigint, bigint", "bigint"),
    ("equal", "bigint, bigint", "boolean"),
    ("equal", "text, text", "boolean"),
    ("added", "timestamptz, interval", "timestamptz"),
    ("joined", "bigint, text", "text"),
]
_OPERATORS = """
    create operator evil.= (leftarg = bigint, rightarg = bigint, function = evil.equal);
    create operator evil.= (leftarg = text, rightarg = text, function = evil.equal);
    create operator evil.+ (leftarg = timestamptz, rightarg = interval, function = evil.added);
    create operator evil.|| (leftarg = bigint, rightarg = text, function = evil.joined);
"""


SCHEDULED = """
    created::pg_catalog.text from delayq.schedule(
        'expire', delay => '5 minutes', key => 'a', idempotency_key => 'b', payload => '{"n": 1}')
"""
VERBS = [
    (SCHEDULED, "true"),
    ("created::pg_catalog.text from delayq.schedule('expire', delay => '0', key => 'a')", "false"),
    ("delayq.reschedule(kind => 'expire', key => 'a', delay => '1 hour')", "moved"),
    ("answer from delayq.reschedule_keys('expire', array['a'], 0, null, true)", "moved"),
    ("delayq.run_now(kind => 'expire', key => 'a')", "moved"),
    ("answer from delayq.cancel_keys('expire', array['a'])", "cancelled"),
    ("delayq.cancel(9999)", "not_found"),
    ("answer from delayq.cancel_many(array[9999]::pg_catalog.int8[], true)", "not_found"),
    ("delayq.revive(9999)", "not_found"),
    ("delayq.discard(9999)", "not_found"),
]
DUTIES = [
    ("delayq.settle(9999, 1)", "lost"),
    ("count(*)::pg_catalog.text from delayq.make_partitions(7)", "8"),
    ("count(*)::pg_catalog.text from delayq.drop_partitions('2001-01-01')", "0"),
]


@pytest.mark.parametrize("role", ["delayq_app", "delayq_node"])
async def test_functions_that_run_as_the_owner_are_not_led_astray_by_their_caller(
    owner: Connection, login: Login, role: str
) -> None:
    dsn = await login(role)
    await owner.execute(f"create schema evil authorization {urlsplit(dsn).username}")
    async with connected(dsn) as conn:
        for name, arguments, result in HIJACKED:
            await conn.execute(_TRAPS.format(name=name, arguments=arguments, result=result))
        await conn.execute(_OPERATORS)
        for name in ("tasks", "dead_tasks", "task_history", "idempotency", "kinds"):
            await conn.execute(f"create temporary table {name} (like delayq.{name})")
        await conn.execute("set search_path = pg_temp, evil, pg_catalog")
        with pytest.raises(asyncpg.RaiseError, match="hijacked as login_"):
            await conn.execute("select 'a'::text = 'a'::text")  # so the trap is set
        for sql, answer in VERBS + (DUTIES if role == "delayq_node" else []):
            assert await conn.fetchval(f"select {sql}") == answer, sql
        for name in ("tasks", "task_history", "idempotency"):
            assert await conn.fetchval(f"select count(*) from pg_temp.{name}") == 0
    assert await owner.fetchval("select count(*) from delayq.task_history") == 1


async def test_no_function_of_an_application_in_public_is_called_with_the_rights_of_a_node(
    owner: Connection, login: Login
) -> None:
    """Where everybody may create in `public`, as in clusters that began before PostgreSQL 15."""
    await owner.execute("insert into orders values (42, 'unpaid')")
    await owner.execute("grant create on schema public to public")
    node_dsn = await login("delayq_node")
    await owner.execute(f"grant select, update on orders to {urlsplit(node_dsn).username}")
    closer = [
        ("unnest", "smallint[]", "setof smallint"),
        ("pg_column_size", "delayq.payload", "integer"),
        ("equal", "delayq.kind, text", "boolean"),
    ]
    async with logged_in(login, "delayq_app") as app:
        for name, arguments, result in HIJACKED + closer:
            trap = _TRAPS.format(name=name, arguments=arguments, result=result)
            await app.execute(trap.replace("evil.", "public."))
        await app.execute(
            "create operator public.="
            " (leftarg = delayq.kind, rightarg = text, function = public.equal)"
        )
        with pytest.raises(asyncpg.RaiseError, match="hijacked as login_"):
            await app.execute("select array_position(array['a'], 'a'::text)")  # so the trap is set
        async with running_node(node_dsn) as (_, done):
            task = await app.fetchval(
                "select id from delayq.schedule('expire', '{\"order_id\": 42}', delay => '0')"
            )
            await asyncio.wait_for(done.wait(), 10)
            ended = "select state from delayq.task_history where id = $1"
            assert await eventually(app, ended, task) == "succeeded"


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


async def test_a_session_of_that_name_in_another_database_is_not_ended(
    dsn: str, owner: Connection, login: Login
) -> None:
    """It may be a superuser's, and then nobody's sessions at all would be ended."""
    name = await owner.fetchval("select current_database()")
    elsewhere = dsn.replace(f"/{name}", "/postgres")
    assert elsewhere != dsn
    same = {"server_settings": {"application_name": "delayq/99"}}
    async with (
        connected(elsewhere, **same) as other,
        connected(await login("delayq_node")) as judge,
    ):
        assert await judge.fetch(statement("end_sessions"), 99) == []
        assert await other.fetchval("select 1") == 1


async def test_a_new_day_of_history_needs_no_new_grant(owner: Connection, login: Login) -> None:
    await owner.execute(
        "create table delayq.later partition of delayq.task_history"
        " for values from ('2100-01-01 00:00+00') to ('2100-01-02 00:00+00')"
    )
    async with logged_in(login, "delayq_app") as conn:
        sql = "select count(*) from delayq.task_history where finished_at > '2099-01-01'"
        assert await conn.fetchval(sql) == 0
