"""Retries, backlogs, memory, and what is said of it all."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import resource
import time
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayq import DelayQ
from delayq.cli.main import run
from delayq.context import Context
from delayq.control import ControlConnection
from delayq.database import Database, parse_dsn
from delayq.model import TaskState
from delayq.settings import Settings, load_settings
from tests.helpers import connected, wait_for
from tests.nodes import (
    Application,
    all_ended,
    ended,
    eventually,
    no_live_tasks,
    row_of,
    schedule,
)
from tests.process.crew import spread

if TYPE_CHECKING:
    from delayq.database import Connection
    from tests.conftest import Logged

HOUR = timedelta(hours=1)
NOISE_S = 2.0


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


# --- retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [1.0, 86_400.0])
async def test_however_often_it_has_failed_the_next_try_is_within_the_longest_wait(
    settings: Settings, conn: Connection, base: float
) -> None:
    """C093. Also where two to the power of the attempts is more than a double holds."""
    longest = max(base, 3_600.0)
    dq = DelayQ(settings=settings)

    @dq.task(max_attempts=10_000, backoff_base=base, backoff_max=longest)
    async def fails() -> None:
        raise ValueError("no")

    attempts = [0, 1, 30, 31, 32, 63, 64, 1_023, 1_024, 1_100, 9_998]
    ids = []
    for attempt in attempts:
        ids.append(await schedule(conn, "fails"))
        await conn.execute("update delayq.tasks set attempt = $2 where id = $1", ids[-1], attempt)
    async with dq.node():

        async def all_wait() -> bool:
            count = await conn.fetchval(
                "select count(*) from delayq.tasks where state = 'pending' and errors <> '[]'"
            )
            return int(count) == len(attempts)

        await eventually(all_wait, "each has failed once")
    rows = await conn.fetch(
        "select attempt, extract(epoch from execute_at - leased_at)::float8 as wait_s"
        "  from delayq.tasks order by id"
    )
    assert [row["attempt"] for row in rows] == [attempt + 1 for attempt in attempts]
    for row in rows:
        assert 0 < row["wait_s"] <= longest + NOISE_S, row
        if row["attempt"] > 30:
            assert row["wait_s"] >= longest / 2


async def test_tasks_that_fail_for_ever_do_not_keep_the_front_of_the_queue(
    settings: Settings, conn: Connection
) -> None:
    """C097. Twenty that fail at once and come back at once, and then two hundred fresh ones."""
    failed: Counter[int] = Counter()
    dq = DelayQ(settings=settings.model_copy(update={"max_workers": 5}))

    @dq.task(max_attempts=1_000, backoff_base=0.001, backoff_max=0.001)
    async def fails(ctx: Context) -> None:
        failed[ctx.id] += 1
        raise ValueError("no")

    @dq.task
    async def fresh() -> None:
        await asyncio.sleep(0.001)

    async with dq.node() as node:
        poison = await spread(conn, "fails", 20, first_s=0, every_ms=0, payload="{}")
        await wait_for(lambda: len(failed) == 20, "all of them fail")
        started = time.monotonic()
        ids = await spread(conn, "fresh", 200, first_s=0, every_ms=0, payload="{}")
        ends = await all_ended(conn, ids)
        took_s = time.monotonic() - started
        assert took_s < 10  # alone they take a twentieth of it
        assert {end.state for end in ends.values()} == {"succeeded"}
        # there is a least wait between two tries: nobody spins
        assert failed.total() < 20 * (2 + took_s / 0.01) + 100
        node.request_stop()
        await conn.execute("delete from delayq.tasks where id = any($1::bigint[])", poison)


async def test_a_dead_task_that_is_put_back_by_hand_runs_once_more_and_is_never_in_limbo(
    app: Application, conn: Connection
) -> None:
    """C098. Its attempts are used up; by `revive` it has all of them again."""
    runs: Counter[int] = Counter()

    @app.task(max_attempts=3)
    async def fails(ctx: Context) -> None:
        runs[ctx.id] += 1
        raise ValueError("no")

    async with app.node():
        by_hand, revived = await schedule(conn, "fails"), await schedule(conn, "fails")
        await all_ended(conn, [by_hand, revived])
        assert runs == {by_hand: 3, revived: 3}
        await conn.execute(
            "with back as (delete from delayq.dead_tasks where id = $1 returning *)"
            " insert into delayq.tasks (id, kind, payload, attempt, attempt_limit, errors)"
            " overriding system value select id, kind, payload, attempt, 3, errors from back",
            by_hand,
        )
        assert await conn.fetchval("select delayq.revive($1)", revived) == "revived"
        await all_ended(conn, [by_hand, revived])
    assert runs == {by_hand: 4, revived: 6}
    assert (await ended(conn, by_hand)).attempt == 4
    assert (await ended(conn, revived)).attempt == 3


# --- backlogs -----------------------------------------------------------------------------------


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first lines of the statements that nodes send to find and to take work."""
    sent: list[str] = []
    fetch = ControlConnection.fetch

    async def noted(self: ControlConnection, sql: str, *args: object) -> Any:
        sent.append(sql.partition("\n")[0])
        return await fetch(self, sql, *args)

    monkeypatch.setattr(ControlConnection, "fetch", noted)
    return sent


@pytest.mark.parametrize("held_up_by", ["workers", "pause", "kind"])
async def test_a_backlog_that_nothing_can_be_taken_from_is_not_asked_for_again_and_again(
    app: Application, conn: Connection, leases: list[str], held_up_by: str
) -> None:
    """C105. No worker is free, or the kind is paused, or nobody serves it."""
    release, started = asyncio.Event(), list[int]()

    @app.task
    async def long(ctx: Context) -> None:
        started.append(ctx.id)
        await release.wait()

    @app.task
    async def halted() -> None:
        pass

    backlog = {"workers": "long", "pause": "halted", "kind": "unknown"}[held_up_by]
    await conn.execute("insert into delayq.kinds (kind, paused) values ('halted', true)")
    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        " select $1, delayq.clock() - interval '1 min' from generate_series(1, 5000)", backlog,
    )  # fmt: skip
    async with app.node(max_workers=5, sweep_interval_s=1.0) as node:
        if held_up_by == "workers":
            await wait_for(lambda: len(started) == 5, "all workers are busy")
        await asyncio.sleep(0.3)  # what the start reads
        leases.clear()
        await asyncio.sleep(1.5)  # a rate takes its time
        sent = Counter(leases)
        node.request_stop()
        release.set()
    asked = sum(n for sql, n in sent.items() if "Lease" in sql or "Overdue" in sql)
    assert asked <= 4, sent  # one look a sweep
    assert sum(sent.values()) < 40, sent


async def test_a_slow_task_holds_up_nobody_who_was_leased_with_it(
    app: Application, conn: Connection
) -> None:
    """C120. Four of five workers go on with the short ones, and nothing waits under a lease."""
    release = asyncio.Event()

    @app.task
    async def slow() -> None:
        await release.wait()

    @app.task
    async def short() -> None:
        await asyncio.sleep(0.02)

    @app.task
    def plain() -> None:
        time.sleep(0.02)

    async with app.node(min_workers=5, max_workers=5, threads=2):
        at = await conn.fetchval("select delayq.clock() + interval '0.3 s'")
        slow_id = await schedule(conn, "slow", at=at)
        ids = [await schedule(conn, "short", at=at) for _ in range(100)]
        ids += [await schedule(conn, "plain", at=at) for _ in range(20)]
        first = await ended(conn, ids[0])
        waits: list[int] = []

        async def over() -> bool:
            waits.append(await conn.fetchval(
                "select count(*) from delayq.tasks where state = 'running'"))  # fmt: skip
            rows = await conn.fetch(
                "select id from delayq.task_history where id = any($1::bigint[])", ids
            )
            return len(rows) == len(ids)

        await eventually(over, "the short ones are over", 5)
        row = await row_of(conn, slow_id)
        release.set()
        # a lease is asked for a little ahead of need, and lives as long as its node beats
        assert max(waits) < 30
        assert row is not None
        assert row["state"] == "running"
        ends = await all_ended(conn, [slow_id, *ids])
    assert first.attempt == 1
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.timeout(400)
async def test_half_a_million_tasks_ahead_cost_a_node_neither_memory_nor_time(
    app: Application, conn: Connection
) -> None:
    """C099. What is held is bounded by the window, whatever lies beyond it."""
    await conn.execute("set delayq.hints = off")
    await conn.execute(
        "insert into delayq.tasks (kind, payload, execute_at)"
        " select 'tick', jsonb_build_object('x', repeat('y', 100)),"
        "        delayq.clock() + interval '10 min' + i * interval '5 s'"
        "   from generate_series(1, 500000) as i",
        timeout=300,
    )

    @app.task
    async def tick() -> None:
        pass

    gc.collect()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    async with app.node() as node:
        assert time.monotonic() - started < 5
        await ended(conn, await schedule(conn, "tick"))
        await ended(conn, await schedule(conn, "tick", delay=timedelta(seconds=1)))
        assert node.counters is not None
        assert node.counters.fired == 2
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    assert grown_mib < 50


HEAVY: contextvars.ContextVar[object] = contextvars.ContextVar("HEAVY")


class Heavy:
    """Something large that a caller has at hand."""

    def __init__(self) -> None:
        self.bytes = bytearray(20_000_000)


async def test_neither_cancelled_timers_nor_what_their_callers_held_stay_in_memory(
    settings: Settings, conn: Connection
) -> None:
    """C100. Scheduled, moved and cancelled within the horizon, thousands of times."""
    dq = DelayQ(settings=settings)

    @dq.task
    async def tick() -> None:
        pass

    async def call(n: int) -> weakref.ref[Heavy]:
        heavy = Heavy() if n % 200 == 0 else None
        HEAVY.set(heavy)
        task = await tick.after(8)
        assert await dq.reschedule(task.id, delay=9)
        assert await dq.cancel(task.id)
        return weakref.ref(heavy) if heavy is not None else weakref.ref(tick)  # type: ignore[arg-type]  # any object

    async with dq.node():
        await ended(conn, (await tick.after(0)).id)
        loop: Any = asyncio.get_running_loop()
        armed = len(loop._scheduled)
        seen: list[weakref.ref[Heavy]] = []
        for start in range(0, 1_000, 50):
            seen += await asyncio.gather(*(call(n) for n in range(start, start + 50)))
        await ended(conn, (await tick.after(0.1)).id)
        gc.collect()
        left = [ref() for ref in seen if isinstance(ref(), Heavy)]
        assert left == []
        assert len(loop._scheduled) <= armed + 30  # one for each heap, not one for each task
    await no_live_tasks(conn)


# --- what is said -------------------------------------------------------------------------------

SECRET, KEY = "Payload-4410-secret", "Key-4411-secret"


async def test_nothing_that_happens_to_a_task_tells_its_payload(
    app: Application, conn: Connection, dsn: str, logged: list[Logged]
) -> None:
    """C107. Every end that there is, down to DEBUG; keys are not told either."""
    release = asyncio.Event()

    @app.task(max_attempts=2)
    async def does(ctx: Context, what: str, token: str) -> None:
        if what == "fails":
            raise ValueError(f"refused {token}")
        if what == "waits":
            await release.wait()
        if what == "loses":
            async with connected(dsn) as thief:
                await thief.execute("update delayq.tasks set lease_token = 5 where id = $1", ctx.id)
        if what == "sql":
            async with ctx.effect() as effect:
                await effect.execute("select $1::int", token)

    await conn.execute("select 1")
    async with app.node():
        given = {"token": SECRET}
        ids = [await schedule(conn, "does", {"what": what, **given}, key=f"{KEY}-{what}")
               for what in ("works", "fails", "sql")]  # fmt: skip
        ids.append(await schedule(conn, "does", {"nonsense": SECRET}, key=f"{KEY}-odd"))
        waits = await schedule(conn, "does", {"what": "waits", **given}, key=f"{KEY}-waits")
        loses = await schedule(conn, "does", {"what": "loses", **given}, key=f"{KEY}-loses")
        await wait_for(lambda: [e for e in logged if e.event == "lease.lost"], "a lease is lost")
        await conn.execute("select delayq.cancel($1)", waits)
        ends = await all_ended(conn, [*ids, waits])
        # and adopted, once its owner is nobody
        await conn.execute("update delayq.tasks set lease_owner = 5 where id = $1", loses)
        await life_orphans(app, conn, loses)
    assert {end.state for end in ends.values()} == {"succeeded", "dead", "cancelled"}
    told = json.dumps([end.errors for end in ends.values()])
    assert SECRET not in told
    assert KEY not in told
    assert not [e for e in logged if SECRET in e.text or KEY in e.text]


async def life_orphans(app: Application, conn: Connection, task_id: int) -> None:
    """A second node looks for orphans when it starts."""
    async with app.node():

        async def adopted() -> bool:
            row = await row_of(conn, task_id)
            return row is None or row["lease_owner"] != 5

        await eventually(adopted, "it is adopted")


PASSWORD, DECODED = "S3cr%2Ft!", "S3cr/t!"
DSNS = {
    "wrong host": f"postgresql://app:{PASSWORD}@nowhere.invalid/shop",
    "closed port": f"postgresql://app:{PASSWORD}@127.0.0.1:1/shop",
    "bad port": f"postgresql://app:{PASSWORD}@127.0.0.1:port/shop",
    "no scheme": f"app:{PASSWORD}@127.0.0.1/shop",
    "bad option": f"postgresql://app:{PASSWORD}@127.0.0.1:1/shop?sslmode=maybe",
    "in the query": f"postgresql://127.0.0.1:1/shop?user=app&password={PASSWORD}",
}


@pytest.mark.parametrize("given", ["by flag", "by variable", "by file"])
@pytest.mark.parametrize("dsn", DSNS.values(), ids=DSNS)
def test_a_password_is_in_no_answer_and_no_log_however_the_dsn_is_given(
    dsn: str,
    given: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """C106. The flag can be read in the process list, and its help says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYQ_LOG_LEVEL", "TRACE")
    monkeypatch.setenv("DELAYQ_CONNECT_TIMEOUT_S", "3")
    flags: list[str] = []
    if given == "by flag":
        flags = ["--dsn", dsn]
    elif given == "by variable":
        monkeypatch.setenv("DELAYQ_DSN", dsn)
    else:
        (tmp_path / ".env").write_text(f"DELAYQ_DSN={dsn}\n")
        monkeypatch.setitem(Settings.model_config, "env_file", ".env")
    said = ""
    for command in (["list"], ["migrate"], ["doctor"], ["stats", "--json"], ["--help"]):
        code = run([*flags, *command]) if command != ["--help"] else run(command)
        said = "".join(capfd.readouterr())
        assert code in (0, 2, 3)
        assert PASSWORD not in said
        assert DECODED not in said
        if code == 3 and "127.0.0.1" in dsn:
            assert "127.0.0.1:1" in said
    assert "process list" in said


async def test_a_password_is_in_no_name_of_a_session_and_in_no_text_form(
    dsn: str, conn: Connection, logged: list[Logged]
) -> None:
    """C106. While a node runs, and while its database goes away."""
    secret = dsn.replace("postgres@", f"postgres:{PASSWORD}@", 1)
    assert PASSWORD in secret
    settings = load_settings(dsn=secret, embedded=False, beat_interval_s=0.75, lease_ttl_s=3.0)
    dq = DelayQ(settings=settings)

    @dq.task
    async def tick() -> None:
        pass

    async with dq.node() as node:
        await ended(conn, (await tick.after(0)).id)
        names = await conn.fetch(
            "select application_name || query as said from pg_stat_activity"
            " where datname = current_database()"
        )
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'delayq/' || $1::bigint", node.id,
        )  # fmt: skip
        await ended(conn, await schedule(conn, "tick"))
        database = Database(parse_dsn(secret), settings)
        texts = [repr(x) + str(x) for x in (dq, node, settings, database, parse_dsn(secret))]
        texts += [row["said"] for row in names] + [event.text for event in logged]
        texts += [settings.model_dump_json()]
    assert not [text for text in texts if PASSWORD in text or DECODED in text]


# --- looking at odd rows --------------------------------------------------------------------------

ODD_END = """
    insert into delayq.{table} (
        id, kind, {state} payload, headers, key, priority, due_at, execute_at, created_at, attempt,
        interruptions, errors, lease_token, started_at, finished_at, lateness_us)
    values ($1, $2, {value} $3::text::jsonb, $4::text::jsonb, $2, -32768, $5::text::timestamptz,
            $5::text::timestamptz, $5::text::timestamptz, 2147483647, -1, $4::text::jsonb,
            -9223372036854775808, $5::text::timestamptz, $5::text::timestamptz,
            9223372036854775807)
"""
ODD_JSONS = ["null", "7", '"x"', "[[]]", "[1e400]", '{"a": [null]}', "[" * 2_000 + "]" * 2_000,
             json.dumps("x" * 20_000), "9" * 5_000, '[{"message": null, "error": 5}]']  # fmt: skip
ODD_INSTANTS = ["infinity", "-infinity", "12000-01-01 00:00+00", "4713-01-01 00:00+00 BC",
                "1970-01-01 00:00+00", "294276-12-31 23:59:59.999999+00", "2026-01-01 00:00+00",
                "0001-01-01 00:00+00", "9999-12-31 23:59:59.999999+00",
                "1999-01-01 00:00+00"]  # fmt: skip


@pytest.mark.parametrize("table", ["dead_tasks", "task_history"])
async def test_one_odd_row_hides_no_other_from_any_list(
    settings: Settings, conn: Connection, dsn: str, table: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """C126. Live rows are in tests/process/test_cli_verbs.py; a bulk revive passes over these."""
    history = table == "task_history"
    sql = ODD_END.format(table=table, state="state," if history else "",
                         value="'succeeded'," if history else "")  # fmt: skip
    for n, (text, at) in enumerate(zip(ODD_JSONS, ODD_INSTANTS, strict=True), start=1):
        await conn.execute(sql, n, f"odd\n{n}", text, ODD_JSONS[-n], at)
    state = TaskState.SUCCEEDED if history else TaskState.DEAD
    async with DelayQ(settings=settings) as dq:
        tasks = await dq.list(state=state)
        assert sorted(task.id for task in tasks) == list(range(1, len(ODD_JSONS) + 1))
        for task in tasks:
            assert await dq.get(task.id) == task
    monkeypatch.setenv("DELAYQ_DSN", dsn)
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)
    commands = [["list", "--state", state.value], ["stats"], ["show", "3"]]
    commands += [] if history else [["dead", "list"]]
    for command in commands:
        for flag in ([], ["--json"]):
            assert await asyncio.to_thread(run, [*command, *flag]) == 0, command
            said = capsys.readouterr().out
            if flag:
                json.loads(said)
            assert all(line.isprintable() for line in said.splitlines())


async def test_a_bulk_revive_brings_back_the_sound_rows_and_names_the_odd_ones(
    settings: Settings, conn: Connection, dsn: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """C126."""
    sql = ODD_END.format(table="dead_tasks", state="", value="")
    for n, at in enumerate(ODD_INSTANTS, start=1):
        await conn.execute(sql, n, f"odd{n}", "{}", "[]", at)
    await conn.execute("update delayq.dead_tasks set kind = 'odd', key = null")
    await conn.execute("update delayq.dead_tasks set priority = 0 where id % 2 = 0")
    monkeypatch.setenv("DELAYQ_DSN", dsn)
    monkeypatch.setattr("delayq.log.configure", lambda *_: None)
    code = await asyncio.to_thread(run, ["dead", "revive", "--kind", "odd", "--all", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 1
    assert document["answers"] == {"revived": 5}
    assert sorted(int(one["id"]) for one in document["refused"]) == [1, 3, 5, 7, 9]
