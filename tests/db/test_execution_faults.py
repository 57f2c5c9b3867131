"""Trouble that is not the task's own is not charged to it: locks, deadlocks, roles, outages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq import outcomes, payload_reader
from delayq.context import Context
from delayq.errors import (
    AuthenticationFailed,
    DatabaseError,
    DatabaseUnavailable,
    Dead,
    PrivilegeMissing,
    SchemaMissing,
    TransactionConflict,
)
from tests.helpers import wait_for
from tests.nodes import (
    Application,
    all_ended,
    ended,
    eventually,
    life,
    no_live_tasks,
    row_of,
    schedule,
    stopped_at_once,
)
from tests.rooms import swap

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings

LONG = "x" * 50_000
INSERT = "insert into effects values ($1, $2)"
_REFUSE = """
    create function refuse() returns trigger language plpgsql as $$
    begin
        if new.priority = 7 and {condition} then raise exception 'not now'; end if;
        return new;
    end $$;
    create trigger refuse before insert or update on delayq.{table}
        for each row execute function refuse()
"""
_MEND = """
    create or replace function refuse() returns trigger language plpgsql as 'begin return new; end'
"""


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


@pytest.fixture
async def effects(conn: Connection) -> None:
    await conn.execute("create table effects (id bigint, attempt int)")


def refused(state: str, constraint: str = "") -> DatabaseError:
    """What the driver's error becomes when the server refuses a statement."""
    error = DatabaseError(f"refused (SQLSTATE {state})")
    error.sqlstate, error.constraint = state, constraint
    return error


def failing(owner: object, name: str, *errors: Exception) -> list[int]:
    """Let a statement fail with these errors, one a call; the sizes of its calls."""
    left, calls = list(errors), list[int]()

    async def call(*args: Any) -> Any:
        calls.append(len(args[0]))
        if left:
            raise left.pop(0)
        return await real(*args)

    real = swap(owner, name, call)
    return calls


# --- leases and settlements that are refused ---------------------------------------------------

NO_TASKS_FAULT = [
    AuthenticationFailed("the password was changed"),
    PrivilegeMissing("somebody revoked it"),
    SchemaMissing("a migration is under way"),
    DatabaseError("the session settings do not take"),
    refused("XX000"),
    refused("P0001"),
    refused("23514"),  # no constraint has a name: history has no partition for it
]


@pytest.mark.parametrize("error", NO_TASKS_FAULT, ids=str)
@pytest.mark.parametrize("statement", ["lease", "settle"])
async def test_one_refusal_of_a_lone_task_that_is_over_at_once_ends_it_as_dead_never(
    app: Application, conn: Connection, statement: str, error: Exception
) -> None:
    @app.task(max_attempts=1)
    async def lone() -> None:
        pass

    async with app.node() as node:
        store = life(node)._store
        if statement == "settle":
            failing(store, "settle_succeeded", error)
        failing(store, statement, error)
        end = await ended(conn, await schedule(conn, "lone"))
    assert (end.state, end.attempt) == ("succeeded", 1)


@pytest.mark.parametrize("error", [refused("22003"), refused("23514", "c")], ids=str)
@pytest.mark.parametrize("statement", ["lease", "settle"])
async def test_a_task_whose_data_are_refused_once_is_sent_once_more(
    app: Application, conn: Connection, statement: str, error: Exception
) -> None:
    @app.task(max_attempts=1)
    async def lone() -> None:
        pass

    async with app.node() as node:
        store = life(node)._store
        if statement == "settle":
            failing(store, "settle_succeeded", error)
        calls = failing(store, statement, error)
        end = await ended(conn, await schedule(conn, "lone"))
    assert (end.state, end.attempt, len(calls)) == ("succeeded", 1, 2)


@pytest.mark.parametrize(
    ("table", "condition"), [("tasks", "new.state = 'running'"), ("task_history", "true")]
)
async def test_a_row_that_something_else_refuses_waits_and_the_rest_of_its_batch_does_not(
    app: Application, conn: Connection, table: str, condition: str
) -> None:
    @app.task(max_attempts=1)
    async def many() -> None:
        pass

    async with app.node():
        await conn.execute(_REFUSE.format(condition=condition, table=table))
        rows = await conn.fetch(
            "insert into delayq.tasks (kind, priority, execute_at)"
            " select 'many', case i when 17 then 7 else 0 end, delayq.clock() + interval '0.3 s'"
            "   from generate_series(1, 40) i returning id, priority"
        )
        (odd,) = [row["id"] for row in rows if row["priority"] == 7]
        others = [row["id"] for row in rows if row["priority"] == 0]
        ends = await all_ended(conn, others)
        assert {end.state for end in ends.values()} == {"succeeded"}
        assert await row_of(conn, odd) is not None
        await conn.execute(_MEND)  # not: drop the trigger, which may deadlock with a settlement
        end = await ended(conn, odd)
    assert (end.state, end.attempt) == ("succeeded", 1)


# --- conflicts in effects ----------------------------------------------------------------------

LOCK = "select from delayq.tasks where id = $1 for update"


def _entangle(
    app: Application, asynchronous: bool, partners: dict[int, int], starts: list[int]
) -> None:
    """Two tasks that lock each other's row in the effects of their first runs."""
    both, both_threads = asyncio.Barrier(2), threading.Barrier(2)
    if asynchronous:

        @app.task(kind="entangled", max_attempts=1, give_up_on=Exception)
        async def coroutine(ctx: Context) -> None:
            starts.append(ctx.id)
            async with ctx.effect() as effect:
                await effect.execute(INSERT, ctx.id, ctx.attempt)
                if starts.count(ctx.id) == 1:
                    await both.wait()
                    await effect.execute(LOCK, partners[ctx.id])
                    await both.wait()
    else:

        @app.task(kind="entangled", max_attempts=1, give_up_on=Exception)
        def plain(ctx: Context) -> None:
            starts.append(ctx.id)
            with ctx.effect() as effect:
                effect.execute(INSERT, ctx.id, ctx.attempt)
                if starts.count(ctx.id) == 1:
                    both_threads.wait(10)
                    effect.execute(LOCK, partners[ctx.id])
                    both_threads.wait(10)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["coroutine", "thread"])
async def test_a_deadlock_of_the_settles_of_two_effects_costs_neither_an_attempt(
    app: Application, conn: Connection, effects: None, asynchronous: bool
) -> None:
    """C060."""
    partners: dict[int, int] = {}
    starts: list[int] = []
    _entangle(app, asynchronous, partners, starts)
    async with app.node() as node:
        first = await schedule(conn, "entangled", delay=timedelta(seconds=0.3))
        second = await schedule(conn, "entangled", delay=timedelta(seconds=0.3))
        partners.update({first: second, second: first})
        ends = await all_ended(conn, [first, second])
        assert node.counters is not None
        assert node.counters.released >= 1
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert len(starts) >= 3
    assert sum(end.interruptions for end in ends.values()) == len(starts) - 2
    assert await conn.fetchval("select array_agg(id order by id) from effects") == [first, second]


async def test_a_serialization_failure_at_the_commit_of_an_effect_costs_no_attempt(
    app: Application, conn: Connection, effects: None
) -> None:
    starts: list[int] = []
    both = asyncio.Barrier(2)

    @app.task(max_attempts=1, give_up_on=Exception)
    async def skewed(ctx: Context) -> None:
        starts.append(ctx.id)
        async with ctx.effect() as effect:
            await effect.execute("set transaction isolation level serializable")
            await effect.fetchval("select count(*) from effects")
            await effect.execute(INSERT, ctx.id, ctx.attempt)
            if starts.count(ctx.id) == 1:
                await both.wait()

    async with app.node():
        ids = [await schedule(conn, "skewed") for _ in range(2)]
        ends = await all_ended(conn, ids)
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert len(starts) >= 3
    assert await conn.fetchval("select array_agg(id order by id) from effects") == sorted(ids)


class Wrapped(Exception):
    pass


@pytest.mark.parametrize(
    ("chosen", "state", "attempt"), [(False, "succeeded", 1), (True, "dead", 1)]
)
async def test_a_handler_may_wrap_a_conflict_and_may_choose_otherwise(
    app: Application, conn: Connection, chosen: bool, state: str, attempt: int
) -> None:
    conflicts = [TransactionConflict("deadlock")]

    @app.task(max_attempts=1)
    async def wraps(ctx: Context) -> None:
        try:
            async with ctx.effect():
                pass
        except TransactionConflict as conflict:
            if chosen:
                raise Dead("no more") from conflict
            raise Wrapped from conflict

    async with app.node() as node:
        effects = life(node)._effects

        async def settle(*args: Any) -> None:
            if conflicts:
                raise conflicts.pop()
            await real(*args)

        real: Callable[..., Awaitable[None]] = swap(effects, "_settle", settle)
        end = await ended(conn, await schedule(conn, "wraps"))
    assert (end.state, end.attempt) == (state, attempt)


async def test_a_conflict_of_the_handlers_own_is_charged(
    app: Application, conn: Connection
) -> None:
    @app.task(max_attempts=2)
    async def own(ctx: Context) -> None:
        raise asyncpg.DeadlockDetectedError("in the handler's own tables")

    async with app.node():
        end = await ended(conn, await schedule(conn, "own"))
    assert (end.state, end.attempt) == ("dead", 2)


async def test_a_commit_whose_answer_is_lost_is_found_out_by_the_token(
    app: Application, conn: Connection, effects: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asyncpg.transaction.Transaction.commit

    async def lossy(transaction: Any) -> None:
        await real(transaction)
        raise ConnectionResetError("after the commit")

    monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", lossy)

    @app.task(max_attempts=1)
    async def writes(ctx: Context) -> None:
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt)

    async with app.node() as node:
        end = await ended(conn, await schedule(conn, "writes"))
        counters = node.counters
        assert counters is not None
        await wait_for(lambda: counters.succeeded, "the success is counted")
        assert (counters.retried, counters.dead, counters.leases_lost) == (0, 0, 0)
    assert end.state == "succeeded"
    assert await conn.fetchval("select count(*) from effects") == 1


# --- payloads that are read late ---------------------------------------------------------------


def picky(app: Application, starts: list[int]) -> None:
    """A handler that gives up at whatever it is told of."""

    @app.task(kind="picky", max_attempts=1, give_up_on=Exception)
    async def handler(ctx: Context, text: str) -> None:
        assert text == LONG
        starts.append(ctx.attempt)


@pytest.mark.parametrize(
    "error", [DatabaseUnavailable("cut"), PrivilegeMissing("revoked")], ids=str
)
async def test_a_payload_is_read_again_while_the_database_is_in_trouble(
    app: Application, conn: Connection, error: Exception
) -> None:
    starts: list[int] = []
    picky(app, starts)
    async with app.node() as node:
        calls = failing(life(node)._store, "payloads", error, error)
        end = await ended(conn, await schedule(conn, "picky", {"text": LONG}))
        assert node.counters is not None
        assert node.counters.released == 0
    assert (end.state, end.attempt, starts, len(calls)) == ("succeeded", 1, [1], 3)


@pytest.mark.parametrize("error", [DatabaseUnavailable("cut"), refused("XX001")], ids=str)
async def test_an_attempt_whose_payload_cannot_be_read_is_given_back(
    app: Application, conn: Connection, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(payload_reader, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(outcomes, "_UNREAD_US", (10_000, 20_000))
    starts: list[int] = []
    picky(app, starts)
    async with app.node() as node:
        failing(life(node)._store, "payloads", *[error] * 8)
        counters = node.counters
        assert counters is not None
        task_id = await schedule(conn, "picky", {"text": LONG})
        await wait_for(lambda: counters.released, "it is given back")
        end = await ended(conn, task_id)
    assert (end.state, end.attempt, end.interruptions, end.errors) == ("succeeded", 1, 0, [])
    assert starts == [1]


async def test_a_lease_that_was_lost_before_its_payload_came_writes_nothing(
    app: Application, conn: Connection
) -> None:
    starts: list[int] = []
    picky(app, starts)
    async with app.node() as node:

        async def lost(*_: Any) -> dict[int, str | None]:
            return {}

        swap(life(node)._store, "payloads", lost)
        task_id = await schedule(conn, "picky", {"text": LONG})
        counters = node.counters
        assert counters is not None
        await wait_for(lambda: counters.leases_lost, "the lease is lost")
        row = await row_of(conn, task_id)
        assert row is not None
        assert (row["state"], starts) == ("running", [])


async def test_whoever_leaves_while_payloads_are_read_gives_the_attempts_back(
    app: Application, conn: Connection
) -> None:
    starts: list[int] = []
    picky(app, starts)
    asked = asyncio.Event()

    async def hangs(*_: Any) -> Any:
        asked.set()
        await asyncio.sleep(3600)

    before = asyncio.all_tasks()
    async with stopped_at_once(app.node()) as node:
        swap(life(node)._store, "payloads", hangs)
        task_id = await schedule(conn, "picky", {"text": LONG})
        await asked.wait()
    row = await row_of(conn, task_id)
    assert row is not None
    assert (row["state"], row["attempt"], row["interruptions"]) == ("pending", 0, 0)
    assert starts == []

    async def nothing_left() -> bool:
        return asyncio.all_tasks() <= before

    await eventually(nothing_left, "no read goes on", 2)


async def test_a_burst_of_payloads_that_did_not_come_along_is_read_in_few_round_trips(
    app: Application, conn: Connection
) -> None:
    """Too long for any lease; in large batches 3 kB are."""
    lengths: list[int] = []

    @app.task
    async def medium(text: str) -> None:
        lengths.append(len(text))

    async with app.node(max_workers=600) as node:
        calls = failing(life(node)._store, "payloads")
        await conn.execute(
            "insert into delayq.tasks (kind, payload, execute_at)"
            " select 'medium', jsonb_build_object('text', repeat('x', 17000 + i)),"
            "  delayq.clock() + interval '0.8 s' from generate_series(1, 500) i"
        )
        await no_live_tasks(conn)
    assert sorted(lengths) == [17_000 + i for i in range(1, 501)]
    assert 0 < len(calls) < 50, calls


async def test_a_page_of_payloads_is_bounded_in_bytes_and_what_is_left_comes_later(
    app: Application, conn: Connection
) -> None:
    lengths: list[int] = []

    @app.task
    async def large(text: str) -> None:
        lengths.append(len(text))

    answers: list[int] = []
    async with app.node() as node:

        async def measured(*args: Any) -> dict[int, str | None]:
            found: dict[int, str | None] = await real(*args)
            answers.append(sum(len(text or "") for text in found.values()))
            return found

        real = swap(life(node)._store, "payloads", measured)
        await conn.execute(
            "insert into delayq.tasks (kind, payload, execute_at)"
            " select 'large', jsonb_build_object('text', repeat('x', 400000)),"
            "  delayq.clock() + interval '0.3 s' from generate_series(1, 12)"
        )
        await no_live_tasks(conn)
    assert lengths == [400_000] * 12
    assert max(answers) < 1024 * 1024 + 401_000


# --- time-outs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("swallowed", ["cancel", "fence"])
async def test_a_handler_that_ignores_an_interruption_still_has_its_timeout(
    app: Application, conn: Connection, swallowed: str
) -> None:
    started = asyncio.Event()
    interruptions: list[str] = []

    @app.task(timeout=1.0, max_attempts=1)
    async def stubborn() -> None:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        interruptions.append("swallowed")
        try:
            await asyncio.sleep(3600)
        finally:
            interruptions.append("timeout")

    async with app.node() as node:
        task_id = await schedule(conn, "stubborn")
        await started.wait()
        if swallowed == "cancel":
            assert await conn.fetchval("select delayq.cancel($1)", task_id) == "cancel_requested"
        else:
            life(node)._fence()
        end = await ended(conn, task_id, 5)
    assert interruptions == ["swallowed", "timeout"]
    assert end.state == ("cancelled" if swallowed == "cancel" else "dead")
    assert end.errors[-1]["error"] == "TimeoutError"


async def test_a_timeout_strikes_once_although_a_cancel_comes_after_it(
    app: Application, conn: Connection
) -> None:
    cancelled: list[str] = []
    timed_out = asyncio.Event()

    @app.task(timeout=0.1)
    async def tidy() -> None:
        for step in ("work", "tidy up", "and more"):
            try:
                await asyncio.sleep(3600 if step != "and more" else 0.3)
            except asyncio.CancelledError:
                cancelled.append(step)
                timed_out.set()
        raise ValueError("over")

    async with app.node():
        task_id = await schedule(conn, "tidy")
        await timed_out.wait()
        await conn.fetchval("select delayq.cancel($1)", task_id)
        end = await ended(conn, task_id)
    assert cancelled == ["work", "tidy up"]
    assert end.state == "cancelled"
