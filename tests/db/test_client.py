"""The client: shared statements, the caller's own connection, and errors that keep secrets."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq.client import Client
from delayq.database import Database, parse_dsn
from delayq.errors import (
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    DelayQError,
    InvalidArgument,
    KeyTaken,
    SchemaMissing,
    TransactionConflict,
)
from delayq.model import (
    Cancel,
    Discard,
    NodeState,
    OnConflict,
    Reschedule,
    Revive,
    TaskRequest,
    TaskState,
)
from delayq.request import build_request
from delayq.settings import Settings, load_settings
from delayq.task_store import TaskStore
from tests.helpers import connected, wait_until_blocked
from tests.leases import NODE, lease, ran, register, settle

if TYPE_CHECKING:
    from delayq.database import Connection

HOUR = timedelta(hours=1)
SOON = 2.0  # seconds: far less than the patience for a lock, far more than a statement needs
MARKER = "s3cr3t-marker"
Sent = list[str]


@pytest.fixture
async def client(database: Database, settings: Settings) -> AsyncIterator[Client]:
    async with Client(database, settings) as client:
        yield client


def request(kind: str = "k", n: int = 0, **options: Any) -> TaskRequest:
    return build_request(kind, json.dumps({"n": n}), delay=HOUR, **options)


async def count(conn: Connection, table: str = "tasks") -> int:
    return int(await conn.fetchval(f"select count(*) from delayq.{table}"))


async def soon(work: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(work, SOON)


# --- life -------------------------------------------------------------------------------------


async def test_a_client_is_of_no_use_before_it_is_opened_and_after_it_was_closed(
    database: Database, settings: Settings
) -> None:
    client = Client(database, settings)
    with pytest.raises(DelayQError, match="not open"):
        await client.schedule(request())
    async with client:
        await client.schedule(request())
        with pytest.raises(DelayQError, match="open already"):
            await client.open()
    with pytest.raises(DelayQError, match="not open"):
        await client.cancel(1)
    await client.close()


async def test_opening_checks_the_schema(empty_dsn: str) -> None:
    settings = load_settings(dsn=empty_dsn, embedded=False)
    client = Client(Database(parse_dsn(empty_dsn), settings), settings)
    with pytest.raises(SchemaMissing):
        await client.open()
    with pytest.raises(DelayQError, match="not open"):
        await client.nodes()


async def test_a_given_pool_is_used_and_left_open(dsn: str, settings: Settings) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        async with Client(None, settings, pool=pool) as client:
            tasks = await asyncio.gather(
                *(client.schedule(request(n=n)) for n in range(20)),
                *(client.schedule(request(key=f"key-{n}")) for n in range(5)),
            )
            assert len({task.id for task in tasks}) == 25
        assert await pool.fetchval("select count(*) from delayq.tasks") == 25


async def test_without_database_and_pool_there_is_nothing_to_open(settings: Settings) -> None:
    with pytest.raises(InvalidArgument, match="dsn"):
        await Client(None, settings).open()


async def test_closing_waits_for_the_calls_in_flight(
    conn: Connection, database: Database, settings: Settings, stranger: Connection
) -> None:
    client = Client(database, settings)
    await client.open()
    async with stranger.transaction():
        await stranger.execute("lock table delayq.tasks in share mode")
        call = asyncio.create_task(client.schedule(request()))
        await wait_until_blocked(conn)
        closing = asyncio.create_task(client.close())
    await closing
    assert (await call).created


# --- shared statements ------------------------------------------------------------------------


async def test_concurrent_schedules_share_statements_and_each_gets_its_own_task(
    conn: Connection, client: Client, sent: Sent
) -> None:
    tasks = await asyncio.gather(*(client.schedule(request(n=n)) for n in range(300)))
    assert len(sent) <= 5
    rows = await conn.fetch("select id, (payload ->> 'n')::int as n from delayq.tasks")
    assert {row["id"]: row["n"] for row in rows} == {task.id: n for n, task in enumerate(tasks)}
    assert {(task.created, task.state) for task in tasks} == {(True, TaskState.PENDING)}


async def test_concurrent_cancels_and_moves_share_statements(client: Client, sent: Sent) -> None:
    tasks = await client.schedule_many([request(n=n) for n in range(200)])
    sent.clear()
    moved = await asyncio.gather(*(client.run_now(task.id) for task in tasks[:100]))
    cancelled = await asyncio.gather(*(client.cancel(task.id) for task in tasks))
    assert len(sent) <= 8
    assert set(moved) == {Reschedule.MOVED}
    assert set(cancelled) == {Cancel.CANCELLED}


async def test_one_bad_row_fails_alone(conn: Connection, client: Client) -> None:
    wanted = [request(n=n) for n in range(50)]
    wanted[17] = TaskRequest("k", delay_us=0, priority=1_000)  # past the checks, on purpose
    answers = await asyncio.gather(*map(client.schedule, wanted), return_exceptions=True)
    failed = [nr for nr, answer in enumerate(answers) if isinstance(answer, BaseException)]
    assert failed == [17]
    assert isinstance(answers[17], DatabaseError)
    assert "priority_is_sane" in str(answers[17])
    assert await count(conn) == 49


async def test_of_many_who_cancel_one_task_at_once_one_cancelled_it(client: Client) -> None:
    task = await client.schedule(request())
    answers = await asyncio.gather(*(client.cancel(task.id) for _ in range(10)))
    assert sorted(answers) == [Cancel.ALREADY_FINISHED] * 9 + [Cancel.CANCELLED]


async def test_a_single_call_is_one_statement(client: Client, sent: Sent) -> None:
    task = await client.schedule(request())
    await client.cancel(task.id)
    assert sent == ["schedule_plain", "cancel_many"]


# --- strangers' locks -------------------------------------------------------------------------


async def test_a_key_held_by_a_stranger_delays_nobody_else(
    conn: Connection, client: Client, stranger: Connection
) -> None:
    async with stranger.transaction():
        await client.schedule(request(key="order"), conn=stranger)
        stuck = [
            asyncio.create_task(client.schedule(request(key="order", on_conflict="replace")))
            for _ in range(40)
        ]
        await wait_until_blocked(conn)
        for nr in range(5):
            await soon(client.schedule(request(n=nr)))
            await soon(client.schedule(request(key=f"other-{nr}")))
            await soon(client.cancel(kind="k", key=f"other-{nr}"))
            await soon(client.get(kind="k", key=f"other-{nr}"))
            await soon(client.list(state="cancelled"))
            await soon(client.schedule_many([request()] * 3))
        assert not any(task.done() for task in stuck)
    answers = await asyncio.gather(*stuck)
    assert len({task.id for task in answers}) == 1


async def test_a_task_locked_by_a_stranger_is_waited_for_without_delaying_the_others(
    conn: Connection, client: Client, stranger: Connection
) -> None:
    locked, free = await client.schedule(request()), await client.schedule(request())
    async with stranger.transaction():
        await stranger.execute("select from delayq.tasks where id = $1 for update", locked.id)
        both = asyncio.gather(client.cancel(locked.id), client.run_now(locked.id))
        await wait_until_blocked(conn)
        assert await soon(client.run_now(free.id)) is Reschedule.MOVED
        assert await soon(client.cancel(free.id)) is Cancel.CANCELLED
        assert not both.done()
    cancelled, moved = await both
    assert cancelled is Cancel.CANCELLED
    assert moved in (Reschedule.MOVED, Reschedule.ALREADY_FINISHED)


async def test_a_wait_for_a_lock_has_a_limit_and_then_nothing_was_done(
    database: Database, settings: Settings, stranger: Connection, conn: Connection
) -> None:
    hasty = settings.model_copy(update={"lock_timeout_s": 0.2})
    async with Client(database, hasty) as client, stranger.transaction():
        await client.schedule(request(key="order"), conn=stranger)
        with pytest.raises(DatabaseTimeout, match="nothing was done"):
            await client.schedule(request(key="order"))
    assert await count(conn) == 1


async def test_a_caller_who_gives_up_leaves_the_client_in_order(
    conn: Connection, client: Client, stranger: Connection
) -> None:
    async with stranger.transaction():
        await client.schedule(request(key="order"), conn=stranger)
        stuck = [asyncio.create_task(client.schedule(request(key="order"))) for _ in range(30)]
        await wait_until_blocked(conn)
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck, timeout=SOON)
        assert all(task.cancelled() for task in stuck)
    for nr in range(30):
        assert (await soon(client.schedule(request(key=f"key-{nr}")))).created


# --- keys and idempotency ---------------------------------------------------------------------


async def test_the_surviving_task_comes_back(client: Client) -> None:
    first = await client.schedule(request(key="order"))
    kept = await client.schedule(request(key="order"))
    assert (kept.id, kept.created, kept.state) == (first.id, False, TaskState.PENDING)
    assert kept.execute_at == first.execute_at
    replaced = await client.schedule(request(key="order", on_conflict=OnConflict.REPLACE))
    assert (replaced.id, replaced.created) == (first.id, True)
    with pytest.raises(KeyTaken) as taken:
        await client.schedule(request(key="order", on_conflict="error"))
    assert taken.value.task_id == first.id


async def test_concurrent_requests_with_one_idempotency_key_make_one_task(
    conn: Connection, client: Client
) -> None:
    again = [client.schedule(request(n=n, idempotency_key="r-1")) for n in range(20)]
    answers = await asyncio.gather(*again)
    assert len({task.id for task in answers}) == 1
    assert sum(task.created for task in answers) == 1
    assert await count(conn) == 1


async def test_a_replaced_running_task_has_a_follow_up(conn: Connection, client: Client) -> None:
    task = await client.schedule(request(key="order"))
    token = await lease(conn, task.id)
    waiting = await client.schedule(request(n=2, key="order", on_conflict="replace"))
    assert (waiting.id, waiting.state) == (task.id, TaskState.RUNNING)
    assert waiting.follow_up is not None
    found = await client.get(waiting.follow_up)
    assert found is not None
    assert (found.state, found.payload) == (TaskState.PENDING, {"n": 2})
    await settle(conn, task.id, token)
    assert await client.cancel(waiting.follow_up) is Cancel.CANCELLED


# --- the caller's own connection --------------------------------------------------------------


async def test_what_is_scheduled_in_a_transaction_vanishes_with_it(
    conn: Connection, client: Client
) -> None:
    kept = await client.schedule(request(key="kept"))
    transaction = conn.transaction()
    await transaction.start()
    await client.schedule(request(), conn=conn)
    await client.schedule(request(key="order", idempotency_key="r-1"), conn=conn)
    await client.schedule_many([request(n=1), request(key="many")], conn=conn)
    await client.send("elsewhere", {"n": 1}, delay=HOUR, conn=conn)
    assert await client.reschedule(kept.id, delay=1, conn=conn)
    assert await client.run_now(kind="k", key="kept", conn=conn)
    assert await client.cancel(kept.id, conn=conn)
    assert await count(conn) == 5
    await transaction.rollback()
    assert await count(conn) == 1
    assert await count(conn, "idempotency") == 0
    found = await client.get(kept.id)
    assert found is not None
    assert found.execute_at == kept.execute_at


async def test_what_is_done_in_a_transaction_is_there_after_its_commit(
    conn: Connection, client: Client
) -> None:
    async with conn.transaction():
        task = await client.schedule(request(key="order"), conn=conn)
        assert await client.cancel(kind="k", key="order", conn=conn)
        assert await client.cancel_many([task.id], conn=conn) == {task.id: Cancel.ALREADY_FINISHED}
        other = await client.schedule(request(), conn=conn)
    assert await client.get(other.id) is not None


Prepare = Callable[[Any], Awaitable[None]]


async def _jsonb_codec(conn: Connection) -> None:
    for name in ("json", "jsonb"):
        await conn.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


async def _binary_jsonb_codec(conn: Connection) -> None:
    await conn.set_type_codec(
        "jsonb",
        encoder=lambda value: b"\x01" + json.dumps(value).encode(),
        decoder=lambda value: json.loads(value[1:]),
        schema="pg_catalog",
        format="binary",
    )


async def _own_instants(conn: Connection) -> None:
    for name in ("timestamptz", "interval"):
        await conn.set_type_codec(
            name, encoder=str, decoder=str, schema="pg_catalog", format="text"
        )


async def _odd_settings(conn: Connection) -> None:
    await conn.execute(
        "set search_path = ''; set timezone = 'Asia/Kathmandu'; set datestyle = 'SQL, DMY';"
        " set intervalstyle = 'iso_8601'; set standard_conforming_strings = off;"
        " set plan_cache_mode = force_generic_plan; set lock_timeout = '3s'"
    )


async def _nothing(_conn: Connection) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "options"),
    [
        (_jsonb_codec, {}),
        (_binary_jsonb_codec, {}),
        (_own_instants, {}),
        (_odd_settings, {}),
        (_nothing, {"statement_cache_size": 0}),
    ],
)
async def test_any_connection_of_the_callers_will_do(
    dsn: str, client: Client, prepare: Prepare, options: dict[str, Any]
) -> None:
    at = datetime(8_000, 1, 1, 12, 30, 15, 123_457, tzinfo=UTC)
    wanted = build_request("k", '{"text": "\\u00e9\\\\"}', at=at, key="order", headers={"a": 1})
    async with connected(dsn, **options) as conn:
        await prepare(conn)
        task = await client.schedule(wanted, conn=conn)
        assert task.execute_at == at
        plain = await client.schedule(request(), conn=conn)
        await client.schedule_many([request(), request(key="x")], conn=conn)
        found = await client.get(task.id, conn=conn)
        assert found is not None
        assert (found.payload, found.headers, found.execute_at) == ({"text": "é\\"}, {"a": 1}, at)
        assert len(await client.list(conn=conn)) == 4
        assert await client.reschedule(plain.id, at=at, conn=conn)
        assert await client.run_now(kind="k", key="order", conn=conn)
        assert await client.cancel(task.id, conn=conn)
        assert await client.cancel(kind="k", key="x", conn=conn)
        assert await client.revive(task.id, conn=conn) is Revive.ALREADY_FINISHED
        assert await client.discard(task.id, conn=conn) is Discard.ALREADY_FINISHED


async def test_the_callers_own_lock_timeout_is_left_as_it_was(
    conn: Connection, client: Client
) -> None:
    async with conn.transaction():
        await conn.execute("set local lock_timeout = '1234ms'")
        await client.schedule(request(key="order"), conn=conn)
        await client.cancel(kind="k", key="order", conn=conn)
        assert await conn.fetchval("show lock_timeout") == "1234ms"
    assert await conn.fetchval("show lock_timeout") == "0"


async def test_a_conflict_in_the_callers_transaction_names_itself(
    conn: Connection, client: Client
) -> None:
    task = await client.schedule(request())
    transaction = conn.transaction(isolation="repeatable_read")
    await transaction.start()
    await conn.fetchval("select count(*) from delayq.tasks")
    assert await client.cancel(task.id)
    with pytest.raises(TransactionConflict):
        await client.cancel(task.id, conn=conn)
    await transaction.rollback()


async def test_a_taken_key_leaves_the_callers_transaction_usable(
    conn: Connection, client: Client
) -> None:
    await client.schedule(request(key="order"))
    async with conn.transaction():
        await client.schedule(request(), conn=conn)
        with pytest.raises(KeyTaken):
            await client.schedule(request(key="order", on_conflict="error"), conn=conn)
        with pytest.raises(KeyTaken):
            await client.schedule_many(
                [request(), request(key="order", on_conflict="error")], conn=conn
            )
    assert await count(conn) == 2


# --- many at once -----------------------------------------------------------------------------


async def test_schedule_many_answers_in_order_whatever_has_keys(
    conn: Connection, client: Client
) -> None:
    wanted = [
        request(n=n, key=f"key-{1_500 - n}" if n % 3 == 0 else None, priority=n % 7)
        for n in range(1_200)
    ]
    tasks = await client.schedule_many(wanted)
    rows = await conn.fetch("select id, (payload ->> 'n')::int as n from delayq.tasks")
    assert {row["id"]: row["n"] for row in rows} == {task.id: n for n, task in enumerate(tasks)}


async def test_a_statement_of_schedule_many_is_all_or_nothing(
    conn: Connection, client: Client
) -> None:
    await client.schedule(request(key="order"))
    with pytest.raises(KeyTaken):
        await client.schedule_many([request(), request(key="order", on_conflict="error")])
    with pytest.raises(DatabaseError):
        await client.schedule_many([request(), TaskRequest("k", delay_us=0, priority=1_000)])
    assert await count(conn) == 1
    assert await client.schedule_many([]) == []


async def test_cancel_many_answers_for_each_id(conn: Connection, client: Client) -> None:
    tasks = await client.schedule_many([request(n=n) for n in range(1_200)])
    await ran(conn, tasks[0].id)
    ids = [task.id for task in tasks]
    answers = await client.cancel_many([*ids, 10**15, ids[5]])
    assert answers.pop(ids[0]) is Cancel.ALREADY_FINISHED
    assert answers.pop(10**15) is Cancel.NOT_FOUND
    assert answers.pop(ids[5]) in (Cancel.CANCELLED, Cancel.ALREADY_FINISHED)
    assert set(answers.values()) == {Cancel.CANCELLED}
    assert len(answers) == 1_198


async def test_ids_beyond_what_a_double_holds_are_exact(conn: Connection, client: Client) -> None:
    await conn.execute(f"alter sequence delayq.tasks_id_seq restart with {2**53 + 1}")
    one, two = await client.schedule(request()), await client.schedule(request(key="order"))
    assert (one.id, two.id) == (2**53 + 1, 2**53 + 2)
    assert await client.run_now(two.id) is Reschedule.MOVED
    assert await client.cancel_many([one.id]) == {one.id: Cancel.CANCELLED}
    found = await client.get(kind="k", key="order")
    assert found is not None
    assert found.id == 2**53 + 2


# --- looking, and the rest --------------------------------------------------------------------


async def test_a_task_can_be_looked_at_wherever_it_is(conn: Connection, client: Client) -> None:
    task = await client.schedule(request(n=1, key="order", headers={"trace": "x"}, priority=4))
    pending = await client.get(task.id)
    assert pending is not None
    assert pending == await client.get(kind="k", key="order")
    assert (pending.state, pending.payload, pending.headers) == (
        "pending",
        {"n": 1},
        {"trace": "x"},
    )
    assert (pending.priority, pending.attempt, pending.node) == (4, 0, None)
    assert pending.created_at.tzinfo is UTC
    token = await lease(conn, task.id)
    running = await client.get(task.id)
    assert running is not None
    assert (running.state, running.node, running.attempt) == (TaskState.RUNNING, NODE, 1)
    assert running.leased_at is not None
    await settle(conn, task.id, token, "dead")
    dead = await client.get(task.id)
    assert dead is not None
    assert dead.state is TaskState.DEAD
    assert await client.get(kind="k", key="order") is None
    assert await client.revive(task.id) is Revive.REVIVED
    await ran(conn, task.id)
    done = await client.get(task.id)
    assert done is not None
    assert (done.state, done.lateness_us) == (TaskState.SUCCEEDED, 0)
    assert done.finished_at is not None
    assert await client.get(10**15) is None


async def test_lists_go_through_every_state_a_page_at_a_time(
    conn: Connection, client: Client
) -> None:
    """C123."""
    tasks = await client.schedule_many([request(n=n) for n in range(10)])
    other = await client.schedule(request("other", key="order"))
    ids = [task.id for task in tasks]
    running = ids.pop(0)
    await lease(conn, running)
    done, dead = [ids.pop() for _ in range(3)], [ids.pop() for _ in range(3)]
    for task in done:
        await ran(conn, task)
    for task in dead:
        await ran(conn, task, "dead")

    async def listed(**filters: Any) -> list[int]:
        return [task.id for task in await client.list(**filters)]

    assert await listed(state="running") == [running]
    assert await listed(state=TaskState.PENDING, kind="k") == ids
    assert await listed() == [running, *ids, other.id]
    assert await listed(limit=2, after_id=running) == ids[:2]
    assert await listed(kind="other") == await listed(kind="other", key="order") == [other.id]
    assert await listed(state="dead") == sorted(dead)
    assert await listed(state="dead", limit=1, after_id=min(dead)) == [sorted(dead)[1]]
    newest = sorted(done, reverse=True)
    assert await listed(state="succeeded") == newest
    assert await listed(state="succeeded", limit=5, after_id=newest[0]) == newest[1:]
    assert await listed(state="cancelled") == []


@pytest.mark.parametrize(
    "filters", [{"state": "lost"}, {"limit": 0}, {"limit": 1_001}, {"limit": "9"}, {"after_id": -1}]
)
async def test_a_list_of_nonsense_is_refused(client: Client, filters: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        await client.list(**filters)


async def test_dead_tasks_are_revived_and_discarded(conn: Connection, client: Client) -> None:
    tasks = [task.id for task in await client.schedule_many([request()] * 3)]
    for task in tasks:
        await ran(conn, task, "dead")
    assert await client.revive_many(tasks[:2], spread=HOUR) == dict.fromkeys(
        tasks[:2], Revive.REVIVED
    )
    assert await client.discard_many(tasks[1:]) == {
        tasks[1]: Discard.LIVE, tasks[2]: Discard.DISCARDED,
    }  # fmt: skip


async def test_kinds_are_paused_and_nodes_are_asked_to_drain(
    conn: Connection, client: Client
) -> None:
    await register(conn)
    await client.pause("k")
    assert await conn.fetchval("select paused from delayq.kinds where kind = 'k'")
    await client.resume("k")
    assert not await conn.fetchval("select paused from delayq.kinds where kind = 'k'")
    (node,) = await client.nodes()
    assert (node.id, node.state, node.kinds, node.counters) == (NODE, NodeState.JOINING, ["k"], {})
    assert await client.drain_node(NODE) is True
    assert await client.drain_node(NODE) is False
    (node,) = await client.nodes()
    assert node.state is NodeState.DRAINING


async def test_what_no_handler_here_knows_can_be_sent(conn: Connection, client: Client) -> None:
    at = datetime(2_100, 1, 1, tzinfo=UTC)
    task = await client.send("elsewhere", {"order_id": 42}, at=at, key="order")
    found = await client.get(task.id)
    assert found is not None
    assert (found.kind, found.payload, found.due_at) == ("elsewhere", {"order_id": 42}, at)


@pytest.mark.parametrize("bad", [0, -1, True, "1", 1.0, 2**63])
async def test_an_id_that_is_none_is_refused_before_anything_is_sent(
    client: Client, sent: Sent, bad: Any
) -> None:
    for verb in (client.cancel, client.run_now, client.get, client.revive, client.discard):
        with pytest.raises(InvalidArgument, match="id"):
            await verb(bad)
    assert sent == []


# --- errors -----------------------------------------------------------------------------------


async def test_a_deadlock_of_our_own_statement_is_retried_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, failures = TaskStore.schedule_plain, 3

    async def unlucky(*arguments: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise asyncpg.DeadlockDetectedError
        return await whole(*arguments)

    monkeypatch.setattr(TaskStore, "schedule_plain", unlucky)
    assert (await client.schedule(request())).created
    failures = 99
    with pytest.raises(TransactionConflict):
        await client.schedule(request())
    assert failures == 95


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the task may have been scheduled; with an idempotency_key"),
        ({"key": "order"}, "the task may have been scheduled; with an idempotency_key"),
        ({"idempotency_key": "r-1"}, "schedule again: the idempotency_key makes that safe"),
    ],
)
async def test_a_connection_lost_on_the_way_says_that_the_outcome_is_unknown(
    conn: Connection, client: Client, stranger: Connection, options: dict[str, Any], said: str
) -> None:
    async with stranger.transaction():
        await stranger.execute("lock table delayq.tasks, delayq.idempotency in exclusive mode")
        call = asyncio.create_task(client.schedule(request(**options)))
        await wait_until_blocked(conn)
        if options:  # given up briefly, then waited for in earnest
            await _wait_for_patience(conn)
        pid = await wait_until_blocked(conn)
        await conn.execute("select pg_terminate_backend($1)", pid)
        with pytest.raises(DatabaseUnavailable, match=f"outcome is unknown.*{said}"):
            await call
    assert (await client.schedule(request(**options))).created


async def _wait_for_patience(conn: Connection) -> None:
    sql = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        " and datname = current_database() and clock_timestamp() - query_start > '200 ms'"
    )
    async with asyncio.timeout(10):
        while not await conn.fetchval(sql):  # noqa: ASYNC110 - the server gives no event
            await asyncio.sleep(0.01)


async def test_a_database_that_is_not_there_is_told_without_doubt(
    unused_tcp_port: int, settings: Settings
) -> None:
    dsn = f"postgresql://nobody:pa55word@127.0.0.1:{unused_tcp_port}/none"
    client = Client(Database(parse_dsn(dsn), settings), settings)
    with pytest.raises(DatabaseUnavailable) as error:
        await client.open()
    assert "unknown" not in str(error.value)
    assert "pa55word" not in "".join(traceback.format_exception(error.value))


async def test_what_is_in_a_payload_never_appears_in_an_error(
    conn: Connection, client: Client, logged: list[Any]
) -> None:
    secret = json.dumps({"card": MARKER})
    key = f"{MARKER}-key"
    bad: dict[str, Any] = {"priority": 1_000, "delay_us": 0}
    holder = await client.schedule(build_request("k", secret, delay=HOUR, key=key))
    assert holder.created
    failing: list[Callable[[], Awaitable[Any]]] = [
        lambda: client.schedule(TaskRequest("k", secret, **bad)),
        lambda: client.schedule(TaskRequest("k", secret, key=f"{key}2", **bad)),
        lambda: client.schedule_many([TaskRequest("k", secret, **bad)]),
        lambda: client.schedule(TaskRequest("k", secret, **bad), conn=conn),
        lambda: client.schedule(TaskRequest("k", f'"{MARKER}', delay_us=0)),
        lambda: client.schedule(TaskRequest("k", f'"{MARKER}\\u0000"', delay_us=0)),
        lambda: client.schedule(TaskRequest("k", secret, delay_us=2**70)),
        lambda: client.schedule(
            build_request("k", secret, delay=HOUR, key=key, on_conflict="error")
        ),
    ]
    for call in failing:
        with pytest.raises(DelayQError) as error:
            await call()
        text = "".join(traceback.format_exception(error.value))
        lines = [line for line in text.splitlines() if "client.schedule" not in line]
        assert MARKER not in "\n".join(lines)
        assert MARKER not in repr(error.value)
        assert error.value.__cause__ is None
    assert MARKER not in "".join(event.text for event in logged)


async def test_a_connection_that_breaks_after_the_answer_does_not_take_it_away(
    conn: Connection, dsn: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TaskStore.schedule_plain

    async def killed_after(store: TaskStore, own: Any, *arguments: Any) -> Any:
        answer = await whole(store, own, *arguments)
        await conn.execute("select pg_terminate_backend($1)", own.get_server_pid())
        return answer

    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool,  # it resets at each release
        Client(None, settings, pool=pool) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(TaskStore, "schedule_plain", killed_after)
            assert (await client.schedule(request())).created
        assert (await client.schedule(request())).created
    assert await count(conn) == 2
