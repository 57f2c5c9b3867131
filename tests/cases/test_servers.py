"""PostgreSQL under delayq: connections, conflicts, notifications, ids, schemas old and new."""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from delayq import DelayQ, SchemaMissing, SchemaTooNew, SchemaTooOld, statements
from delayq.cli.main import run
from delayq.context import Context
from delayq.migrate import migrate
from delayq.model import TaskRequest
from delayq.request import build_request
from delayq.settings import load_settings
from delayq.statements import Migration
from tests.conftest import SHORT
from tests.helpers import connected, wait_for
from tests.nodes import Application, all_ended, ended, eventually, life, no_live_tasks, schedule
from tests.process.crew import spread

if TYPE_CHECKING:
    from pathlib import Path

    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

NOISE_S = 2.0
HOUR = timedelta(hours=1)


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


# --- connections --------------------------------------------------------------------------------

LISTENERS = """
    select pid from pg_stat_activity
     where application_name = 'delayq/' || $1::bigint and query ilike '%ping to itself%'
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
async def test_nothing_falls_between_a_lost_listener_and_the_next(
    app: Application, conn: Connection, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C053. Committed at any moment while nobody listens, with sweeps ten seconds apart."""
    # cut off again and again it comes back later and later, which is no gap, but takes time here
    monkeypatch.setattr("delayq.listener._RETRY_LONGEST_S", 0.2)
    seed = random.randrange(2**32)
    dice = random.Random(seed)

    @app.task
    async def tick() -> None:
        pass

    async with app.node(sweep_interval_s=9.0, horizon_s=30.0) as node:
        for _ in range(rounds):
            pid = await eventually(lambda: conn.fetchval(LISTENERS, node.id), "it listens")
            await conn.execute("select pg_terminate_backend($1)", pid)
            # the moment is what varies; coming back takes some hundredths of a second
            await asyncio.sleep(dice.choice([dice.uniform(0, 0.04), dice.uniform(0, 0.3)]))
            task_id = await schedule(conn, "tick")

            async def another(gone: int = pid) -> bool:
                found = await conn.fetchval(LISTENERS, node.id)
                return found is not None and found != gone

            end = await ended(conn, task_id)
            assert (end.lateness_us or 0) / 1e6 < 0.5 + NOISE_S, f"seed {seed}"
            await eventually(another, "it listens again")
        assert len(await conn.fetch(LISTENERS, node.id)) == 1


BACKENDS = """
    select count(*) from pg_stat_activity
     where application_name like 'delayq/%' and datname = current_database()
"""


@pytest.fixture
async def narrow_dsn(dsn: str, conn: Connection) -> AsyncIterator[str]:
    """The DSN of a role that may have 18 connections: two nodes and a little, not three."""
    name = f"narrow_{secrets.token_hex(6)}"
    await conn.execute(f"create role {name} login connection limit 18")
    await conn.execute(f"grant usage on schema delayq to {name}")
    await conn.execute(f"select delayq.grant_node('{name}')")
    parts = urlsplit(dsn)
    place = parts.netloc.rpartition("@")[2]
    yield urlunsplit(parts._replace(netloc=f"{name}@{place}"))
    await conn.execute(f"drop owned by {name} cascade")
    await conn.execute(f"drop role {name}")


async def test_a_node_that_finds_no_connection_free_comes_in_when_another_has_left(
    app: Application, conn: Connection, narrow_dsn: str, logged: list[Logged]
) -> None:
    """C058. Seven connections a node, however many workers; too many is tried again."""

    @app.task
    async def tick() -> None:
        pass

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(app.node(narrow_dsn, max_workers=500))
        await stack.enter_async_context(app.node(narrow_dsn, max_workers=500))
        ids = await spread(conn, "tick", 100, first_s=0.2, every_ms=20, payload="{}")
        third = app.node(narrow_dsn, max_workers=500)
        starting = asyncio.create_task(third.start())
        await wait_for(
            lambda: [e for e in logged if e.event == "node.step_retry"], "there is no room"
        )
        assert await conn.fetchval(BACKENDS) <= 18
        first.request_drain()
        await first.wait()
        await starting
        stack.push_async_callback(third.wait)
        stack.callback(third.request_drain)
        ends = await all_ended(conn, ids)
        assert await conn.fetchval(BACKENDS) == 2 * 7
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}


SHARED = """
    create table shared (id int primary key, n int not null);
    insert into shared select i, 0 from generate_series(1, 5) as i;
    create table effects (task_id bigint)
"""
FAR_AHEAD = """
    insert into delayq.tasks (kind, execute_at)
    select 'shares', delayq.clock() + interval '1 hour' from generate_series(1, 50) returning id
"""


async def _cancel_in_bulk(dsn: str) -> None:
    """Schedules and cancels hundreds, in no order, until it is cancelled itself."""
    async with connected(dsn) as conn:
        while True:
            ids = [row["id"] for row in await conn.fetch(FAR_AHEAD)]
            random.shuffle(ids)
            await conn.fetch("select * from delayq.cancel_many($1::bigint[])", ids)


async def test_duties_bulk_cancels_and_serializable_handlers_at_once_lose_and_repeat_nothing(
    app: Application, conn: Connection, dsn: str, logged: list[Logged]
) -> None:
    """C060. What the handlers' own statements run into is charged to them; nothing else is."""
    await conn.execute(SHARED)
    conflicts: Counter[int] = Counter()

    @app.task(max_attempts=1_000)
    async def shares(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute("set transaction isolation level serializable")
            try:
                await effect.execute("update shared set n = n + 1 where id = $1", 1 + ctx.id % 5)
                await effect.fetchval("select sum(n) from shared")
                await effect.execute("insert into effects values ($1)", ctx.id)
            except asyncpg.PostgresError:
                conflicts[ctx.id] += 1
                raise

    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(app.node(max_workers=8)) for _ in range(3)]
        busy = [asyncio.create_task(_cancel_in_bulk(dsn)) for _ in range(2)]
        ids = await spread(conn, "shares", 40, first_s=0.1, every_ms=10, payload="{}")
        ending = asyncio.create_task(all_ended(conn, ids, 30))
        while not ending.done():
            for node in nodes:
                for duty in ("sweep", "orphans", "upkeep"):
                    life(node)._maintenance.run_now(duty)
            await asyncio.wait({ending}, timeout=0.2)
        ends = await ending
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert {i: end.attempt - 1 for i, end in ends.items() if end.attempt > 1} == conflicts
    effects = await conn.fetch("select task_id from effects order by 1")
    assert [row["task_id"] for row in effects] == sorted(ids)
    assert await conn.fetchval("select sum(n) from shared") == len(ids)
    assert not [event for event in logged if event.level in ("ERROR", "CRITICAL")]


# --- notifications ------------------------------------------------------------------------------


async def test_whatever_is_scheduled_a_notification_stays_far_below_the_servers_limit(
    settings: Settings, conn: Connection, dsn: str
) -> None:
    """C070. It names ids, instants and kinds, never keys and payloads; many become one scan."""
    heard: list[str] = []
    kinds = ["k", "k" * 500, "é" * 250, "a\nb"]
    async with connected(dsn) as listener, DelayQ(settings=settings) as dq:
        await listener.add_listener("delayq", lambda *a: heard.append(str(a[3])))
        for kind in kinds:
            await dq.send(kind, {"secret": "x" * 1_000_000}, delay=0, key="y" * 500)
            await dq.schedule_many(_requests(kind, 100))
        await dq.schedule_many(_requests("k" * 500, 5_000))
        await conn.execute(
            "insert into delayq.tasks (kind, payload) select repeat('z', 400), '{}'"
            " from generate_series(1, 5000)"
        )
        await conn.execute("select pg_notify('delayq', 'marker')")
        await wait_for(lambda: "marker" in heard, "everything was heard")
    assert 2 * len(kinds) < len(heard) < 100  # for more than ten thousand tasks
    assert max(len(message.encode()) for message in heard) < 7_600
    assert not [message for message in heard if "xxx" in message or "yyy" in message]
    assert await conn.fetchval("select count(*) from delayq.tasks") == 4 + 400 + 5_000 + 5_000


def _requests(kind: str, count: int) -> list[TaskRequest]:
    return [build_request(kind, delay=0)] * count


# --- ids ----------------------------------------------------------------------------------------


class Shop:
    """One application with a handler for each end."""

    def __init__(self, settings: Settings) -> None:
        self.dq = dq = DelayQ(settings=settings)
        self.release = asyncio.Event()

        @dq.task(max_attempts=2, backoff_base=0.01, backoff_max=0.02)
        async def fails() -> None:
            raise ValueError("no")

        @dq.task
        async def works(ctx: Context) -> None:
            async with ctx.effect() as effect:
                await effect.execute("select 1")

        @dq.task
        async def long() -> None:
            await self.release.wait()

    async def send(self, kind: str, delay: float = 0, **options: Any) -> int:
        return (await self.dq.send(kind, {}, delay=delay, **options)).id


@pytest.mark.parametrize(
    "first",
    [
        2**31 + 10,
        2**53 + 10,
        2**62,
    ],
)
async def test_a_whole_life_goes_well_with_ids_beyond_what_an_int_or_a_double_holds(
    settings: Settings, conn: Connection, first: int, logged: list[Logged]
) -> None:
    """C085."""
    await conn.execute(
        "select setval(pg_get_serial_sequence('delayq.tasks', 'id'), $1, false)", first
    )
    shop = Shop(settings)
    dq = shop.dq
    async with dq.node() as node:
        ids = [await shop.send("works") for _ in range(3)]
        ids += [task.id for task in await dq.schedule_many(_requests("works", 20))]
        dead, moved = await shop.send("fails"), await shop.send("works", 3_600)
        cancelled, waiting = await shop.send("works", 3_600), await shop.send("works", 3_600)
        assert await dq.reschedule(moved, delay=0.1)
        assert await dq.cancel(cancelled)
        running = await shop.send("long", key="l")
        await wait_for(lambda: running in life(node)._executor.running, "it runs")
        try:
            again = await dq.send("long", {}, delay=0, key="l", on_conflict="replace")
        finally:
            shop.release.set()  # or leaving would wait for it, if this is refused
        ends = await all_ended(conn, [*ids, moved, dead, cancelled])
        assert ends.pop(dead).state == "dead"
        assert await dq.revive(dead)
        assert (await ended(conn, dead)).attempt == 2
        for duty in ("orphans", "full_scan", "upkeep"):
            life(node)._maintenance.run_now(duty)
        assert again.follow_up is not None
        ends |= await all_ended(conn, [running, again.follow_up])
        assert [task.id for task in await dq.list()] == [waiting]
        assert await dq.discard(dead)
    assert {end.state for end in ends.values()} == {"succeeded", "cancelled"}
    assert min(ends) >= first
    assert not [event for event in logged if event.level in ("ERROR", "CRITICAL")]


async def test_beats_are_written_by_nodes_and_not_by_tasks_and_rewrite_no_index(
    app: Application, conn: Connection
) -> None:
    """C090. Whatever runs, a beat updates one row of one small table, in its page."""
    release, started = asyncio.Event(), 0

    @app.task
    async def long() -> None:
        nonlocal started
        started += 1
        await release.wait()

    await conn.execute("create table writes (place text)")
    for table in ("tasks", "nodes"):
        await conn.execute(
            f"create function on_{table}() returns trigger language plpgsql as $$"
            f" begin insert into public.writes values ('{table}'); return null; end $$;"
            f" create trigger noted after update on delayq.{table}"
            f" for each row execute function on_{table}()"
        )
    async with app.node(max_workers=300) as node:
        await spread(conn, "long", 300, first_s=0, every_ms=0, payload="{}")
        await wait_for(lambda: started == 300, "all of them run")
        await conn.execute("truncate writes")
        beats = "select count(*) from writes where place = 'nodes'"

        async def beaten() -> bool:
            return int(await conn.fetchval(beats)) >= 2

        await eventually(beaten, "a few beats")
        assert await conn.fetchval("select count(*) from writes where place = 'tasks'") == 0
        release.set()
        await no_live_tasks(conn)
        assert node.counters is not None
    indexes = await conn.fetch(
        "select indexdef from pg_indexes where schemaname = 'delayq' and indexdef !~ 'btree'"
    )
    assert indexes == []  # and none over documents
    keys = await conn.fetchval("select indexdef from pg_indexes where tablename = 'nodes'")
    assert "(id)" in keys  # what a beat changes is in no index: its updates can be HOT


# --- schemas old and new --------------------------------------------------------------------------

WRONG: dict[str, tuple[type[Exception], str]] = {
    "none": (SchemaMissing, "no delayq schema"),
    "half made": (SchemaMissing, "no delayq schema"),
    "older": (SchemaTooOld, "version 3"),
    "newer": (SchemaTooNew, "version 99"),
}


@pytest.fixture(params=WRONG)
async def wrong(request: pytest.FixtureRequest, empty_dsn: str) -> tuple[str, str]:
    """What is wrong with the schema, and the DSN of that database."""
    what: str = request.param
    async with connected(empty_dsn) as conn:
        if what == "half made":
            await conn.execute("create schema delayq")
        if what == "older":
            await migrate(conn, target=3)
        if what == "newer":
            await migrate(conn)
            await conn.execute("insert into delayq.migrations values (99, 'later', 'x')")
    return what, empty_dsn


async def test_a_schema_of_another_version_is_refused_before_anything_is_done(
    wrong: tuple[str, str],
) -> None:
    """C111. By a client and by a node."""
    what, dsn = wrong
    error, words = WRONG[what]
    dq = DelayQ(dsn)

    @dq.task
    async def tick() -> None:
        pass

    with pytest.raises(error, match=words) as refused:
        async with dq:
            pass
    assert "delayq migrate" in str(refused.value) or what == "newer"
    with pytest.raises(error, match=words):
        async with dq.node():
            pass
    async with connected(dsn) as conn:
        if await conn.fetchval("select to_regclass('delayq.nodes') is not null"):
            assert await conn.fetchval("select count(*) from delayq.nodes") == 0


@pytest.mark.parametrize("command", ["list", "cancel 7", "schedule k --in 5m", "run shop_app:dq"])
def test_a_command_on_a_schema_of_another_version_exits_with_4(
    wrong: tuple[str, str],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """C111. And with one line that says what to do."""
    what, dsn = wrong
    (tmp_path / "shop_app.py").write_text(
        "from delayq import DelayQ\ndq = DelayQ()\n\n@dq.task\nasync def k() -> None: ...\n"
    )
    monkeypatch.setenv("DELAYQ_DSN", dsn)
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_app", raising=False)
    assert run(command.split()) == 4
    said = capsys.readouterr()
    assert WRONG[what][1] in said.err
    assert said.err.count("\n") == 1


ADDED = """
    alter table delayq.tasks add column note text;
    create table delayq.notes (id bigint primary key);
    create function delayq.later() returns integer language sql as $$ select 1 $$
"""


async def test_nodes_and_clients_of_the_old_version_go_on_while_the_schema_moves_on(
    app: Application, conn: Connection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C112. Migrations only add; whoever starts afterwards has to be of the new version."""
    old = statements.migrations()
    runs: Counter[int] = Counter()

    @app.task
    async def tick(ctx: Context) -> None:
        runs[ctx.id] += 1

    async def versions(*steps: Migration) -> None:
        monkeypatch.setattr(statements, "migrations", lambda: [*old, *steps])

    async with AsyncExitStack() as stack:
        dq = await stack.enter_async_context(DelayQ(settings=settings))
        for _ in range(2):
            await stack.enter_async_context(app.node())
        ids = await spread(conn, "tick", 300, first_s=0.1, every_ms=8, payload="{}")
        await versions(Migration(len(old) + 1, "added", ADDED, "sum"))
        async with connected(settings.dsn.get_secret_value() if settings.dsn else "") as other:
            assert [step.name for step in await migrate(other)] == ["added"]
        ids.append((await dq.send("tick", {}, delay=0)).id)  # a client of before
        async with app.node():  # a node of the new version among the old ones
            ids.append((await dq.send("tick", {}, delay=0.2)).id)
            await versions()
            with pytest.raises(SchemaTooNew):  # the code alone was rolled back: it says so
                await app.node().start()
            ends = await all_ended(conn, ids)
    assert runs == Counter(dict.fromkeys(ids, 1))
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}


async def test_rows_of_before_a_migration_are_run_listed_cancelled_and_revived_after_it(
    empty_dsn: str,
) -> None:
    """C114. Written while the schema had but its tables: pending, in retry, and dead ones."""
    settings_of: dict[str, Any] = {"dsn": empty_dsn, "embedded": False, **SHORT}
    async with connected(empty_dsn) as conn:
        await migrate(conn, target=1)
        await conn.execute(
            "insert into delayq.tasks (kind, execute_at, attempt, leased_at)"
            " select 'tick', now() + case when i > 900 then interval '90 days' else '0' end,"
            "        i % 2, case i % 2 when 1 then now() else '-infinity' end"
            "   from generate_series(1, 1000) as i;"
            " insert into delayq.dead_tasks (id, kind, payload, headers, priority, due_at,"
            "   execute_at, created_at, attempt, interruptions, errors, lease_token, finished_at)"
            " select 5000 + i, 'tick', '{}', '{}', 0, now(), now(), now(), 5, 0, '[]', 1, now()"
            "   from generate_series(1, 10) as i"
        )
        await migrate(conn)
        app = Application(load_settings(**settings_of))

        @app.task
        async def tick() -> None:
            pass

        async with app.node(), DelayQ(settings=app.settings) as dq:

            async def run_out() -> bool:
                count = await conn.fetchval("select count(*) from delayq.task_history")
                return int(count) == 900

            await eventually(run_out, "what was due has run")
            late = await dq.list(limit=1_000)
            assert len(late) == 100
            assert await dq.cancel(late[0].id)
            assert len(await dq.list(state="dead")) == 10
            assert await dq.revive(5_001)
            assert (await ended(conn, 5_001)).state == "succeeded"
