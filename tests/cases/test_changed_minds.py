"""Callers who change their minds, at the worst moments, about tasks and about keys."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayq import Cancel, Context, DelayQ, OnConflict
from tests.helpers import advance_clock, connected, wait_until_blocked
from tests.leases import lease, ran, settle
from tests.nodes import Application, ended, no_live_tasks, schedule
from tests.process.crew import crew, spread

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings

HOUR = timedelta(hours=1)


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


# --- cancel -----------------------------------------------------------------------------------


async def test_what_was_cancelled_while_nobody_was_there_never_runs(
    app: Application, conn: Connection
) -> None:
    """C025. The first half: no node is up."""
    runs: list[int] = []

    @app.task
    async def tick(ctx: Context) -> None:
        runs.append(ctx.id)

    task_id = await schedule(conn, "tick", delay=timedelta(seconds=3))
    assert await conn.fetchval("select delayq.cancel($1)", task_id) == "cancelled"
    await advance_clock(conn, 10)
    async with app.node():
        await ended(conn, await schedule(conn, "tick"))
    assert len(runs) == 1
    assert task_id not in runs
    assert (await ended(conn, task_id)).state == "cancelled"


@pytest.mark.slow
async def test_a_cancel_outlives_the_crash_of_every_node_that_held_the_timer(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C025. The second half: cancelled while it was armed, then kill -9 of all."""
    async with crew(conn, dsn, tmp_path) as them:
        nodes = await them.start_many(2)
        ids = await spread(conn, "brief", 20, first_s=8, every_ms=1, payload='{"ms": 1}')
        for task_id in ids[::2]:
            assert await conn.fetchval("select delayq.cancel($1)", task_id) == "cancelled"
        for node in nodes:
            node.signal(signal.SIGKILL)
        for node in nodes:
            await node.exit_status()
        await advance_clock(conn, 10)
        await them.start()
        await no_live_tasks(conn)
        assert {line.task_id for line in them.starts()} == set(ids[1::2])
        rows = await conn.fetch("select id, state from delayq.task_history order by id")
        wanted = ["cancelled", "succeeded"] * 10
        assert [tuple(row) for row in rows] == list(zip(ids, wanted, strict=True))


async def test_what_waits_behind_a_busy_worker_can_still_be_cancelled(
    app: Application, conn: Connection
) -> None:
    """C026. By id and by key, from somewhere else, while both are overdue."""
    runs: list[str] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def works(name: str) -> None:
        runs.append(name)
        started.set()
        await go_on.wait()

    async with app.node(min_workers=1, max_workers=1), DelayQ(settings=app.settings) as elsewhere:
        first = await schedule(conn, "works", {"name": "a"})
        await started.wait()
        by_id = await schedule(conn, "works", {"name": "b"})
        by_key = await schedule(conn, "works", {"name": "c"}, key="c")
        last = await schedule(conn, "works", {"name": "d"})
        assert await elsewhere.cancel(by_id) is Cancel.CANCELLED
        assert await elsewhere.cancel(kind="works", key="c") is Cancel.CANCELLED
        go_on.set()
        assert (await ended(conn, first)).state == "succeeded"
        assert (await ended(conn, last)).state == "succeeded"
    assert runs == ["a", "d"]
    for task_id in (by_id, by_key):
        end = await ended(conn, task_id)
        assert (end.state, end.attempt) == ("cancelled", 0)


@pytest.mark.parametrize(
    ("how", "wanted"), [("ends", "cancelled"), ("raises", "cancelled"), ("ignores", "succeeded")]
)
async def test_a_cancel_in_the_middle_of_an_effect_leaves_state_and_effect_agreeing(
    app: Application, conn: Connection, how: str, wanted: str
) -> None:
    """C028. It is asked to end: the effect is there if, and only if, it succeeded."""
    await conn.execute("create table effects (task_id bigint, attempt integer)")
    started = asyncio.Event()

    @app.task
    async def writes(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute("insert into effects values ($1, $2)", ctx.id, ctx.attempt)
            started.set()
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                if how == "raises":
                    raise ValueError("on the way out") from None
                if how == "ends":
                    raise

    async with app.node():
        task_id = await schedule(conn, "writes")
        await started.wait()
        assert await conn.fetchval("select delayq.cancel($1)", task_id) == "cancel_requested"
        end = await ended(conn, task_id)
    effects = await conn.fetch("select * from effects")
    assert (end.state, end.attempt) == (wanted, 1)
    assert [tuple(row) for row in effects] == ([(task_id, 1)] if wanted == "succeeded" else [])


async def test_a_cancelled_task_that_fails_after_its_effect_was_committed_has_succeeded(
    app: Application, conn: Connection
) -> None:
    """C028. The effect is the completion: there is nothing left to cancel."""
    await conn.execute("create table effects (task_id bigint)")
    committed, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def writes(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute("insert into effects values ($1)", ctx.id)
        committed.set()
        with contextlib.suppress(asyncio.CancelledError):
            await go_on.wait()
        raise ValueError("too late")

    async with app.node():
        task_id = await schedule(conn, "writes")
        await committed.wait()
        assert await conn.fetchval("select delayq.cancel($1)", task_id) == "already_finished"
        go_on.set()
        end = await ended(conn, task_id)
    assert (end.state, end.attempt, end.errors) == ("succeeded", 1, [])
    assert await conn.fetchval("select count(*) from effects") == 1


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_fifty_callers_of_one_key_get_one_task_whatever_becomes_of_its_first_holder(
    settings: Settings, conn: Connection, dsn: str, end: str
) -> None:
    """C078. The first holder's transaction is open while all the others ask."""
    async with DelayQ(settings=settings) as dq, connected(dsn) as holder:
        transaction = holder.transaction()
        await transaction.start()
        first = await dq.send("k", {"n": 0}, delay=HOUR, key="order", conn=holder)
        calls = [
            asyncio.create_task(dq.send("k", {"n": n}, delay=HOUR, key="order"))
            for n in range(1, 50)
        ]
        await wait_until_blocked(conn)
        await (transaction.commit() if end == "commit" else transaction.rollback())
        tasks = await asyncio.gather(*calls)
    live = await conn.fetch("select id from delayq.tasks where key = 'order'")
    assert len(live) == 1
    assert {task.id for task in tasks} == {live[0]["id"]}
    assert sum(task.created for task in tasks) == (0 if end == "commit" else 1)
    assert (first.id == live[0]["id"]) is (end == "commit")


async def test_a_holder_that_vanishes_between_two_looks_costs_no_answer(
    settings: Settings, conn: Connection, dsn: str
) -> None:
    """C078. Cancelled and discarded as fast as callers ask for it: never an error, never None."""
    done = False

    async def vanish() -> None:
        async with connected(dsn) as canceller:
            while not done:
                await canceller.execute("select delayq.cancel(kind => 'k', key => 'order')")

    async with DelayQ(settings=settings) as dq:
        vanishing = asyncio.create_task(vanish())
        tasks = []
        for _ in range(40):
            tasks += await asyncio.gather(*(dq.send("k", {}, delay=HOUR, key="order")
                                            for _ in range(5)))  # fmt: skip
        done = True
        await vanishing
    assert all(task.id for task in tasks)
    created = [task.id for task in tasks if task.created]
    assert len(created) == len(set(created))
    assert {task.id for task in tasks} == set(created)
    assert await conn.fetchval("select count(*) from delayq.tasks where key = 'order'") <= 1


@pytest.mark.parametrize("end", ["succeeded", "dead", "missed", "cancelled"])
async def test_a_key_is_free_at_once_after_any_end(conn: Connection, end: str) -> None:
    """C079."""
    first = await schedule(conn, "k", key="order", delay=HOUR)
    if end == "cancelled":
        await conn.execute("select delayq.cancel($1)", first)
    else:
        await ran(conn, first, end)
    row = await conn.fetchrow(
        "select * from delayq.schedule('k', key => 'order', delay => '1 hour')"
    )
    assert row is not None
    assert row["created"] is True
    assert row["id"] != first
    await ran(conn, row["id"])  # and the second one runs


@pytest.mark.parametrize("on_conflict", list(OnConflict))
async def test_a_handler_that_schedules_its_own_key_is_answered_and_never_silently_refused(
    settings: Settings, conn: Connection, on_conflict: OnConflict
) -> None:
    """C079. While it runs it holds the key: `keep` says so, `replace` queues a successor."""
    answers: list[Any] = []
    dq = DelayQ(settings=settings)

    @dq.task
    async def again(left: int) -> None:
        if left:
            try:
                bound = again.options(key="order", on_conflict=on_conflict)
                answers.append(await bound.after(0, left=left - 1))
            except Exception as error:  # noqa: BLE001 - which one is the question
                answers.append(type(error).__name__)

    async with dq.node():
        first = await again.options(key="order").after(0, left=1)
        await ended(conn, first.id)
        await no_live_tasks(conn)
    (answer,) = answers
    rows = await conn.fetch("select id, state from delayq.task_history order by id")
    assert {row["state"] for row in rows} == {"succeeded"}
    if on_conflict is OnConflict.REPLACE:
        assert [row["id"] for row in rows] == [first.id, answer.follow_up]
    else:
        assert [row["id"] for row in rows] == [first.id]
        if on_conflict is OnConflict.KEEP:
            assert (answer.id, answer.created) == (first.id, False)
        else:
            assert answer == "KeyTaken"


async def test_a_debounce_runs_the_last_payload_once_the_calls_end(
    settings: Settings, conn: Connection
) -> None:
    """C081. It has no upper bound, and README.md says so: nothing runs while the calls go on."""
    seen: list[int] = []
    async with AsyncExitStack() as stack:
        apps = [DelayQ(settings=settings) for _ in range(3)]

        for dq in apps:

            @dq.task(kind="note")
            async def note(n: int) -> None:
                seen.append(n)

        await stack.enter_async_context(apps[0].node())
        for dq in apps[1:]:
            await stack.enter_async_context(dq)
        ids = set()
        for n in range(30):
            task = await apps[n % 3].send("note", {"n": n}, delay=0.7, key="k",
                                          on_conflict="replace")  # fmt: skip
            ids.add(task.id)
            assert await conn.fetchval("select count(*) from delayq.tasks") == 1
            await advance_clock(conn, 0.3)  # time goes by, and it is put off again
        assert seen == []
        assert len(ids) == 1
        end = await ended(conn, ids.pop())
    assert (end.state, seen) == ("succeeded", [29])
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert 'The debounce (`on_conflict="replace"`) has no upper bound.' in readme


async def test_the_same_request_again_changes_nothing_and_a_replacement_begins_anew(
    conn: Connection,
) -> None:
    """C082. The id stays the same, so that whoever holds it can still ask and cancel."""

    async def look() -> dict[str, Any]:
        row = await conn.fetchrow("select * from delayq.tasks")
        assert row is not None
        return dict(row)

    async def again(**options: Any) -> Any:
        return await conn.fetchrow(
            "select * from delayq.schedule('k', $1, key => 'order', delay => '1 hour',"
            " on_conflict => $2, idempotency_key => $3)",
            options.get("payload", "{}"), options.get("mode", "keep"), options.get("request"),
        )  # fmt: skip

    task = (await again(request="r"))["id"]
    for _ in range(4):  # it fails, and waits for its retry
        token = await lease(conn, task)
        assert await settle(conn, task, token, "retry", 3_600_000_000) == "retry"
    before = await look()
    assert before["attempt"] == 4
    for request in ("r", "r", None):
        row = await again(request=request)
        assert (row["id"], row["created"]) == (task, False)
    assert await look() == before
    row = await again(mode="replace", payload='{"new": 1}')
    assert (row["id"], row["created"]) == (task, True)
    after = await look()
    assert (after["attempt"], after["payload"]) == (0, '{"new": 1}')
    assert after["execute_at"] > before["execute_at"]
    assert await conn.fetchval("select delayq.cancel($1)", task) == "cancelled"


async def test_a_key_that_is_asked_for_again_and_again_uses_up_no_ids(
    settings: Settings, conn: Connection, app: Application
) -> None:
    """C084. Nor do beats and restarts of nodes; and every identity is a bigint."""

    @app.task
    async def other() -> None:
        pass

    async with DelayQ(settings=settings) as dq:
        first = await dq.send("k", {}, delay=HOUR, key="order")
        for _ in range(10):
            await asyncio.gather(*(dq.send("k", {}, delay=HOUR, key="order") for _ in range(50)))
    await conn.execute(
        "do $$ begin for n in 1 .. 500 loop"
        " perform delayq.schedule('k', key => 'order', idempotency_key => (n % 100)::text);"
        " end loop; end $$"
    )
    for _ in range(3):
        async with app.node():
            pass
    rows = await conn.fetch(
        "select sequencename, data_type::text as type, last_value from pg_sequences"
        " where schemaname = 'delayq'"
    )
    assert [tuple(row) for row in rows] == [("tasks_id_seq", "bigint", first.id)]
    narrow = await conn.fetch(
        "select table_name, column_name from information_schema.columns"
        " where table_schema = 'delayq' and data_type <> 'bigint'"
        " and column_name in ('id', 'task_id', 'successor', 'node', 'lease_owner', 'lease_token')"
    )
    assert narrow == []
