"""The verbs as any client in any language calls them: plain SQL, every answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq.statements import statement
from tests.helpers import connected
from tests.leases import lease, ran, settle

if TYPE_CHECKING:
    from delayq.database import Connection

HINTS = "delayq"
NOBODY = 10**15  # an id that no task has

Hints = asyncio.Queue[str]


@pytest.fixture
async def hints(dsn: str) -> AsyncIterator[Hints]:
    """What is sent on the channel, as it arrives."""
    heard: Hints = asyncio.Queue()
    async with connected(dsn) as listener:
        await listener.add_listener(HINTS, lambda *a: heard.put_nowait(str(a[3])))
        yield heard


async def heard(hints: Hints) -> str:
    return await asyncio.wait_for(hints.get(), 5)


async def heard_nothing(conn: Connection, hints: Hints) -> bool:
    """A message of our own comes first: whatever was sent before it would be there by now."""
    await conn.execute("select pg_notify('delayq', 'marker')")
    return await heard(hints) == "marker"


async def schedule(conn: Connection, kind: str = "k", **options: Any) -> asyncpg.Record:
    named = "".join(f", {name} => ${nr}" for nr, name in enumerate(options, 2))
    row = await conn.fetchrow(f"select * from delayq.schedule($1{named})", kind, *options.values())
    assert row is not None
    return row


async def later(conn: Connection, **options: Any) -> int:
    """A task an hour ahead."""
    sql = "select delayq.micros(delayq.clock() + interval '1 hour')"
    at = await conn.fetchval(f"select delayq.instant(({sql}))")
    return int((await schedule(conn, at=at, **options))["id"])


async def say(conn: Connection, sql: str, *arguments: object) -> Any:
    return await conn.fetchval(f"select delayq.{sql}", *arguments)


async def follow_up(conn: Connection) -> tuple[int, int, int]:
    """A running task and the one that waits behind it: (id, token, follow-up)."""
    running = await later(conn, key="order")
    token = await lease(conn, running)
    row = await schedule(conn, key="order", on_conflict="replace", payload='{"n": 2}')
    assert (row["id"], row["state"]) == (running, "running")
    return running, token, row["follow_up"]


async def live_ids(conn: Connection) -> list[int]:
    return [row["id"] for row in await conn.fetch("select id from delayq.tasks order by id")]


async def history(conn: Connection, task_id: int) -> str | None:
    sql = "select state from delayq.task_history where id = $1"
    state: str | None = await conn.fetchval(sql, task_id)
    return state


# --- a plain INSERT ---------------------------------------------------------------------------


async def test_a_plain_insert_schedules_a_task_for_now_and_hints_it(
    conn: Connection, hints: Hints
) -> None:
    row = await conn.fetchrow(
        "insert into delayq.tasks (kind) values ('k') returning id, delayq.micros(execute_at) as at"
    )
    assert row is not None
    assert await heard(hints) == f"due\n{row['id']}:{row['at']}:0:k"


async def test_a_plain_insert_for_the_far_future_hints_nothing(
    conn: Connection, hints: Hints
) -> None:
    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        " values ('k', delayq.clock() + interval '1 hour')"
    )
    assert await heard_nothing(conn, hints)


async def test_many_inserts_at_once_are_hinted_as_one_scan(conn: Connection, hints: Hints) -> None:
    await conn.execute("insert into delayq.tasks (kind) select 'k' from generate_series(1, 500)")
    first = await conn.fetchval("select delayq.micros(min(execute_at)) from delayq.tasks")
    assert await heard(hints) == f"scan {first}"


async def test_hints_can_be_muted_for_a_transaction_that_must_not_notify(
    conn: Connection, hints: Hints
) -> None:
    async with conn.transaction():
        await conn.execute("set local delayq.hints = off")
        await conn.execute("insert into delayq.tasks (kind) values ('k')")
    assert await heard_nothing(conn, hints)


# --- schedule ---------------------------------------------------------------------------------


async def test_schedule_without_an_instant_means_now(conn: Connection) -> None:
    row = await schedule(conn)
    assert (row["created"], row["state"], row["follow_up"]) == (True, "pending", None)
    assert await conn.fetchval("select $1 <= delayq.clock()", row["execute_at"])


async def test_a_delay_counts_from_the_clock_of_the_database(conn: Connection) -> None:
    before = await conn.fetchval("select delayq.clock()")
    row = await conn.fetchrow("select * from delayq.schedule('k', delay => interval '90 seconds')")
    after = await conn.fetchval("select delayq.clock()")
    assert row is not None
    assert before <= row["execute_at"] - timedelta(seconds=90) <= after


@pytest.mark.parametrize(
    ("arguments", "state"),
    [
        ("delay => interval '1 second', at => now()", "22023"),
        ("delay => interval '-1 second'", "22023"),
        ("on_conflict => 'maybe'", "22023"),
        ("on_conflict => null", "22023"),
        ("priority => 101", "23514"),
        ("max_attempts => 0", "23514"),
        ("timeout => interval '0'", "23514"),
        ("timeout => interval '8000 years'", "23514"),
        ("at => timestamptz '1999-12-31 00:00+00'", "23514"),
        ("at => timestamptz '9000-01-01 00:00+00'", "23514"),
        ("at => 'infinity'", "23514"),
        ("payload => null", "23502"),
        ("key => ''", "23514"),
        ("key => repeat('x', 501)", "23514"),
    ],
)
async def test_nonsense_is_refused_and_leaves_no_row(
    conn: Connection, arguments: str, state: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.fetch(f"select * from delayq.schedule('k', {arguments})")
    assert refused.value.sqlstate in (state, "0A000")
    assert await live_ids(conn) == []


async def test_keep_returns_the_live_task_and_burns_no_id(conn: Connection) -> None:
    first = await later(conn, key="order")
    for _ in range(5):
        row = await schedule(conn, key="order", payload='{"n": 2}')
        assert (row["id"], row["created"], row["state"]) == (first, False, "pending")
    assert await later(conn) == first + 1
    assert await conn.fetchval("select payload from delayq.tasks where id = $1", first) == "{}"


async def test_a_key_is_free_again_after_any_end(conn: Connection) -> None:
    seen = set()
    for end in ("cancel", "succeeded", "dead"):
        task = await later(conn, key="order")
        if end == "cancel":
            assert await say(conn, "cancel($1)", task) == "cancelled"
        else:
            await ran(conn, task, end)
        seen.add(task)
    assert len(seen) == 3


async def test_the_same_key_of_another_kind_is_another_key(conn: Connection) -> None:
    one = await schedule(conn, "k", key="order")
    two = await schedule(conn, "other", key="order")
    assert (one["created"], two["created"]) == (True, True)


async def test_error_names_the_holder_and_writes_nothing(conn: Connection) -> None:
    first = await later(conn, key="order")
    with pytest.raises(asyncpg.UniqueViolationError, match=f"task {first}"):
        await schedule(conn, key="order", on_conflict="error")
    assert await live_ids(conn) == [first]


async def test_replace_gives_a_pending_task_a_new_life_under_its_id(
    conn: Connection, hints: Hints
) -> None:
    task = await later(conn, key="order", max_attempts=7)
    await settle(conn, task, await lease(conn, task), "retry", 3_600_000_000)
    row = await schedule(conn, key="order", on_conflict="replace", payload='{"n": 2}', priority=3)
    assert (row["id"], row["created"], row["state"]) == (task, True, "pending")
    found = await conn.fetchrow("select * from delayq.tasks where id = $1", task)
    assert found is not None
    assert json.loads(found["payload"]) == {"n": 2}
    assert (found["attempt"], found["priority"], found["max_attempts"]) == (0, 3, None)
    assert found["due_at"] == found["execute_at"] == row["execute_at"]
    assert await conn.fetchval("select leased_at = '-infinity' from delayq.tasks")
    while f"{task}:" not in await heard(hints):  # the retry's hint, and the lease's instant
        pass


async def test_replace_of_a_running_task_waits_as_its_follow_up(conn: Connection) -> None:
    running, token, waiting = await follow_up(conn)
    again = await schedule(conn, key="order", on_conflict="replace", payload='{"n": 3}')
    assert again["follow_up"] == waiting
    assert await settle(conn, running, token) == "succeeded"
    assert await live_ids(conn) == [waiting]
    row = await conn.fetchrow("select key, payload, state from delayq.tasks")
    assert row is not None
    assert (row["key"], json.loads(row["payload"]), row["state"]) == ("order", {"n": 3}, "pending")
    sql = "select successor from delayq.task_history where id = $1"
    assert await conn.fetchval(sql, running) == waiting


async def test_keep_tells_of_the_follow_up(conn: Connection) -> None:
    running, _, waiting = await follow_up(conn)
    row = await schedule(conn, key="order")
    assert (row["id"], row["created"], row["follow_up"]) == (running, False, waiting)


# --- idempotency ------------------------------------------------------------------------------


async def test_the_same_request_twice_is_one_task_also_after_it_finished(conn: Connection) -> None:
    first = await schedule(conn, idempotency_key="r-1")
    again = await schedule(conn, idempotency_key="r-1", payload='{"n": 2}')
    assert (again["id"], again["created"], again["state"]) == (first["id"], False, "pending")
    await ran(conn, first["id"])
    again = await schedule(conn, idempotency_key="r-1")
    assert (again["id"], again["created"], again["state"]) == (first["id"], False, "succeeded")


async def test_an_idempotency_key_belongs_to_its_kind(conn: Connection) -> None:
    one = await schedule(conn, "k", idempotency_key="r-1")
    two = await schedule(conn, "other", idempotency_key="r-1")
    assert (one["created"], two["created"]) == (True, True)


async def test_a_request_that_met_a_taken_key_stands_for_the_task_it_found(
    conn: Connection,
) -> None:
    holder = await later(conn, key="order")
    kept = await schedule(conn, key="order", idempotency_key="r-1")
    assert (kept["id"], kept["created"]) == (holder, False)
    await ran(conn, holder)
    again = await schedule(conn, key="order", idempotency_key="r-1")
    assert (again["id"], again["state"]) == (holder, "succeeded")


async def test_replace_keeps_the_idempotency_key_unless_it_brings_its_own(
    conn: Connection,
) -> None:
    task = await later(conn, key="order", idempotency_key="r-1")
    await schedule(conn, key="order", on_conflict="replace")
    sql = "select idempotency_key from delayq.tasks where id = $1"
    assert await conn.fetchval(sql, task) == "r-1"
    await schedule(conn, key="order", on_conflict="replace", idempotency_key="r-2")
    assert await conn.fetchval(sql, task) == "r-2"
    assert (await schedule(conn, key="order", idempotency_key="r-1"))["id"] == task


async def test_a_follow_up_keeps_its_idempotency_key_when_it_is_replaced(conn: Connection) -> None:
    running = await later(conn, key="order")
    token = await lease(conn, running)
    row = await schedule(conn, key="order", on_conflict="replace", idempotency_key="r-1")
    await schedule(conn, key="order", on_conflict="replace", payload='{"n": 3}')
    await settle(conn, running, token)
    sql = "select idempotency_key from delayq.tasks where id = $1"
    assert await conn.fetchval(sql, row["follow_up"]) == "r-1"
    again = await schedule(conn, key="order", idempotency_key="r-1")
    assert (again["id"], again["created"]) == (row["follow_up"], False)


# --- cancel -----------------------------------------------------------------------------------


async def test_cancel_of_a_pending_task_moves_it_to_history(conn: Connection) -> None:
    task = await later(conn, key="order", payload='{"n": 1}')
    assert await say(conn, "cancel($1)", task) == "cancelled"
    row = await conn.fetchrow("select * from delayq.task_history where id = $1", task)
    assert row is not None
    assert (row["state"], row["key"], row["attempt"]) == ("cancelled", "order", 0)
    assert row["node"] is None
    assert json.loads(row["payload"]) == {"n": 1}
    assert await say(conn, "cancel($1)", task) == "already_finished"


async def test_cancel_of_a_running_task_asks_it_to_end_and_hints(
    conn: Connection, hints: Hints
) -> None:
    task = await later(conn)
    token = await lease(conn, task)
    assert await say(conn, "cancel($1)", task) == "cancel_requested"
    assert await heard(hints) == f"cancel {task}"
    assert await settle(conn, task, token, "retry") == "cancelled"


async def test_cancel_of_what_is_dead_or_unknown_says_so(conn: Connection) -> None:
    task = await later(conn)
    await ran(conn, task, "dead")
    assert await say(conn, "cancel($1)", task) == "already_finished"
    assert await say(conn, "cancel($1)", NOBODY) == "not_found"
    assert await say(conn, "cancel(kind => 'k', key => 'none')") == "not_found"


async def test_cancel_of_a_follow_up_leaves_the_running_task_alone(conn: Connection) -> None:
    running, token, waiting = await follow_up(conn)
    assert await say(conn, "cancel($1)", waiting) == "cancelled"
    assert await history(conn, waiting) == "cancelled"
    assert await settle(conn, running, token) == "succeeded"
    assert await live_ids(conn) == []


async def test_cancel_by_key_also_removes_the_follow_up(conn: Connection) -> None:
    running, token, waiting = await follow_up(conn)
    assert await say(conn, "cancel(kind => 'k', key => 'order')") == "cancel_requested"
    assert await history(conn, waiting) == "cancelled"
    await settle(conn, running, token)
    assert await live_ids(conn) == []


@pytest.mark.parametrize(
    "arguments", ["", "kind => 'k'", "key => 'x'", "1, kind => 'k', key => 'x'"]
)
async def test_a_task_is_named_by_id_or_by_kind_and_key(conn: Connection, arguments: str) -> None:
    for verb in ("cancel", "run_now"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="by id, or by kind and key"):
            await say(conn, f"{verb}({arguments})")


async def test_cancel_by_keys_answers_each_key_once(conn: Connection) -> None:
    running, token, waiting = await follow_up(conn)
    pending, other = await later(conn, key="a%"), await later(conn, key="other", kind="j")
    rows = await conn.fetch(
        "select * from delayq.cancel_keys('k', array['order', 'a%', 'other', 'none', 'a%'])"
    )
    assert {row["key"]: (row["id"], row["answer"]) for row in rows} == {
        "order": (running, "cancel_requested"),
        "a%": (pending, "cancelled"),
        "other": (None, "not_found"),
        "none": (None, "not_found"),
    }
    assert len(rows) == 4
    assert await history(conn, waiting) == "cancelled"
    assert await settle(conn, running, token, "retry") == "cancelled"
    assert await live_ids(conn) == [other]
    assert await conn.fetch("select * from delayq.cancel_keys('k', '{}')") == []


async def test_cancel_many_answers_each_id_once(conn: Connection) -> None:
    pending, finished = await later(conn), await later(conn)
    await ran(conn, finished)
    running, _, waiting = await follow_up(conn)
    ids = [NOBODY, running, waiting, pending, finished, pending]
    rows = await conn.fetch(statement("cancel_many"), ids, True)
    assert {row["id"]: row["answer"] for row in rows} == {
        pending: "cancelled",
        finished: "already_finished",
        running: "cancel_requested",
        waiting: "cancelled",
        NOBODY: "not_found",
    }
    assert len(rows) == 5


# --- reschedule and run_now -------------------------------------------------------------------


async def test_reschedule_moves_a_pending_task_and_its_due_instant(
    conn: Connection, hints: Hints
) -> None:
    task = await later(conn)
    moved = "reschedule($1, delay => interval '10 seconds')"
    assert await say(conn, moved, task) == "moved"
    row = await conn.fetchrow("select due_at, execute_at from delayq.tasks where id = $1", task)
    assert row is not None
    assert row["due_at"] == row["execute_at"]
    assert (await heard(hints)).startswith(f"due\n{task}:")


async def test_run_now_makes_a_task_due_by_id_and_by_key(conn: Connection) -> None:
    by_id, by_key = await later(conn), await later(conn, key="order")
    assert await say(conn, "run_now($1)", by_id) == "moved"
    assert await say(conn, "run_now(kind => 'k', key => 'order')") == "moved"
    due = "select count(*) from delayq.tasks where execute_at <= delayq.clock()"
    assert await conn.fetchval(due) == 2
    assert by_key != by_id


async def test_reschedule_names_every_other_state(conn: Connection) -> None:
    retrying, finished, dead = await later(conn), await later(conn), await later(conn)
    await settle(conn, retrying, await lease(conn, retrying), "retry", 3_600_000_000)
    await ran(conn, finished)
    await ran(conn, dead, "dead")
    running, _, waiting = await follow_up(conn)
    answers = {
        retrying: "retry_moved",
        finished: "already_finished",
        dead: "dead",
        running: "running",
        waiting: "moved",
        NOBODY: "not_found",
    }
    for task, answer in answers.items():
        assert await say(conn, "reschedule($1, delay => interval '1 day')", task) == answer
    attempts = "select attempt from delayq.tasks where id = $1"
    assert await conn.fetchval(attempts, retrying) == 1


async def test_a_moved_follow_up_fires_at_its_new_instant(conn: Connection) -> None:
    running, token, waiting = await follow_up(conn)
    assert await say(conn, "reschedule($1, delay => interval '1 day')", waiting) == "moved"
    await settle(conn, running, token)
    sql = "select execute_at > delayq.clock() + interval '23 hours' from delayq.tasks where id = $1"
    assert await conn.fetchval(sql, waiting)


@pytest.mark.parametrize(
    "arguments", ["", "delay => interval '1 s', at => now()", "delay => interval '-1 s'"]
)
async def test_reschedule_needs_one_sensible_instant(conn: Connection, arguments: str) -> None:
    task = await later(conn)
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await say(conn, f"reschedule($1{arguments and ', ' + arguments})", task)


async def test_reschedule_by_keys_answers_each_key_once(conn: Connection) -> None:
    running, _, waiting = await follow_up(conn)
    pending, retried = await later(conn, key="a"), await later(conn, key="b")
    await conn.execute("update delayq.tasks set attempt = 1 where id = $1", retried)
    at = 4_000_000_000_000_000
    rows = await conn.fetch(
        statement("reschedule_keys"), "k", ["order", "a", "b", "none", "a"], None, at, True
    )
    assert {row["key"]: (row["id"], row["answer"]) for row in rows} == {
        "order": (running, "running"),
        "a": (pending, "moved"),
        "b": (retried, "retry_moved"),
        "none": (None, "not_found"),
    }
    assert len(rows) == 4
    moved = "select id from delayq.tasks where execute_at = delayq.instant($1) order by id"
    assert [row["id"] for row in await conn.fetch(moved, at)] == [pending, retried]
    assert waiting not in [pending, retried]


async def test_of_two_moves_of_one_task_the_later_counts(conn: Connection) -> None:
    one, two = await later(conn), await later(conn)
    at = 4_000_000_000_000_000
    rows = await conn.fetch(
        statement("reschedule_many"), [two, one, two, None], [None, 0, None, 0],
        [at + 1, None, at, None], True,
    )  # fmt: skip
    assert {row["id"]: row["answer"] for row in rows} == {one: "moved", two: "moved"}
    sql = "select delayq.micros(execute_at) from delayq.tasks where id = $1"
    assert await conn.fetchval(sql, two) == at
    assert await conn.fetchval(sql, one) < at


async def test_reschedule_many_takes_delays_and_instants_together(conn: Connection) -> None:
    one, two = await later(conn), await later(conn)
    at = 4_000_000_000_000_000
    rows = await conn.fetch(
        statement("reschedule_many"), [one, two, NOBODY], [0, None, 0], [None, at, None], True
    )
    found = {row["id"]: (row["answer"], row["execute_at_us"]) for row in rows}
    assert found[two] == ("moved", at)
    assert found[one][0] == "moved"
    assert found[NOBODY] == ("not_found", None)


# --- revive and discard -----------------------------------------------------------------------


async def test_revive_brings_a_task_back_under_its_id_with_all_its_attempts(
    conn: Connection,
) -> None:
    task = await later(conn, key="order", payload='{"n": 1}', max_attempts=1)
    await ran(conn, task, "dead")
    assert await say(conn, "revive($1)", task) == "revived"
    row = await conn.fetchrow("select * from delayq.tasks where id = $1", task)
    assert row is not None
    assert (row["attempt"], row["key"], row["state"]) == (0, "order", "pending")
    assert row["due_at"] == row["execute_at"]
    assert await say(conn, "revive($1)", task) == "live"


async def test_revive_is_refused_while_the_key_is_taken(conn: Connection) -> None:
    task = await later(conn, key="order")
    await ran(conn, task, "dead")
    holder = await later(conn, key="order")
    assert await say(conn, "revive($1)", task) == "key_taken"
    assert await live_ids(conn) == [holder]
    assert await conn.fetchval("select count(*) from delayq.dead_tasks") == 1


async def test_revive_and_discard_name_every_other_state(conn: Connection) -> None:
    pending, finished = await later(conn), await later(conn)
    await ran(conn, finished)
    _, _, waiting = await follow_up(conn)
    answers = {
        pending: "live", waiting: "live", finished: "already_finished", NOBODY: "not_found",
    }  # fmt: skip
    for task, answer in answers.items():
        assert await say(conn, "revive($1)", task) == answer
        assert await say(conn, "discard($1)", task) == answer


async def test_discard_removes_a_dead_task_for_good(conn: Connection) -> None:
    task = await later(conn)
    await ran(conn, task, "dead")
    assert await say(conn, "discard($1)", task) == "discarded"
    assert await say(conn, "discard($1)", task) == "not_found"


async def test_many_revived_tasks_are_spread(conn: Connection) -> None:
    tasks = [await later(conn) for _ in range(20)]
    for task in tasks:
        await ran(conn, task, "dead")
    rows = await conn.fetch(statement("revive_many"), tasks, 3_600_000_000)
    assert {row["answer"] for row in rows} == {"revived"}
    sql = "select extract(epoch from max(execute_at) - min(execute_at)) from delayq.tasks"
    assert 600 < await conn.fetchval(sql) <= 3600


# --- the array form of schedule ---------------------------------------------------------------


async def test_schedule_many_answers_in_the_order_of_its_arrays(conn: Connection) -> None:
    count = 2_000
    at = [4_000_000_000_000_000 + (nr * 7919) % count for nr in range(count)]
    rows = await conn.fetch(
        statement("schedule_many"), ["k"] * count, ["{}"] * count, [None] * count, at,
        [0] * count, [None] * count, [None] * count, [None] * count, ["{}"] * count,
    )  # fmt: skip
    assert [row["execute_at_us"] for row in rows] == at
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)


async def test_instants_and_ids_beyond_what_a_double_holds_are_exact(conn: Connection) -> None:
    await conn.execute(f"alter sequence delayq.tasks_id_seq restart with {2**53 + 1}")
    at = 221_000_000_000_000_001  # in the year 8973
    rows = await conn.fetch(
        statement("schedule_many"), ["k"] * 3, ["{}"] * 3, [None] * 3, [at, at + 2, at + 1],
        [0] * 3, [None] * 3, [None] * 3, [None] * 3, ["{}"] * 3,
    )  # fmt: skip
    assert [row["execute_at_us"] for row in rows] == [at, at + 2, at + 1]
    assert [row["id"] for row in rows] == [2**53 + 1, 2**53 + 2, 2**53 + 3]
    assert await say(conn, "cancel($1)", 2**53 + 2) == "cancelled"


async def test_instants_are_converted_without_a_call_for_each_row(conn: Connection) -> None:
    """Under the plan settings of a node such a call is planned anew each time, on newer servers:
    20 microseconds, which is more than an insert."""
    lines = await conn.fetch(
        "explain (verbose, costs off) select delayq.micros(at), delayq.instant(us) from"
        " (select '2026-05-01'::timestamptz as at, i as us from generate_series(1::bigint, 2) as i"
        "  offset 0) as x"
    )
    assert "delayq." not in "".join(line[0] for line in lines)


# --- plans on a table that ran empty ----------------------------------------------------------


async def test_no_verb_reads_the_whole_table_after_it_ran_empty_and_filled(
    conn: Connection, dsn: str
) -> None:
    """On a session that cached its plans while the table was empty, and without an ANALYZE."""
    await conn.execute("alter table delayq.tasks set (autovacuum_enabled = off)")
    async with connected(dsn) as busy:
        for nr in range(8):
            await _use_every_verb(busy, NOBODY + nr, f"none-{nr}")
        await conn.execute("delete from delayq.tasks")
        await conn.execute("vacuum delayq.tasks")
        await conn.execute(
            "insert into delayq.tasks (kind, key, execute_at)"
            " select 'k', 'key-' || i, delayq.clock() + interval '1 hour'"
            "   from generate_series(1, 100000) as i"
        )
        first = await conn.fetchval("select min(id) from delayq.tasks")
        before = await _blocks_touched(busy)
        await _use_every_verb(busy, first, "key-500")
        assert await _blocks_touched(busy) - before < 1_000


async def _use_every_verb(conn: Connection, task_id: int, key: str) -> None:
    await conn.fetch(statement("reschedule_many"), [task_id], [10**9], [None], True)
    await conn.fetch(statement("reschedule_many"), [task_id], [10**9], [None], False)
    await conn.fetch(statement("reschedule_key"), "k", key, 10**9, None, None)
    for on_conflict in ("keep", "replace"):
        await conn.fetch(
            statement("schedule_one"), "k", "{}", 10**9, None, key, on_conflict,
            None, 0, None, None, None, "{}", None,
        )  # fmt: skip
    await conn.fetch(
        statement("schedule_keyed"), ["k"] * 2, ["{}"] * 2, [10**9] * 2, [None] * 2, [0] * 2,
        [None] * 2, [None] * 2, [None] * 2, ["{}"] * 2, [key, f"{key}-new"], ["keep"] * 2,
        [None] * 2, None,
    )  # fmt: skip
    await conn.fetch(statement("keys_page"), "k", key, "", 10)
    await conn.fetch(statement("keys_page"), "k", key, f"{key}a", 10)
    await conn.fetch(statement("reschedule_keys"), "k", [key, f"{key}1"], 10**9, None, False)
    await conn.fetch(statement("cancel_keys"), "k", [f"{key}1", f"{key}2"], False)
    await conn.fetch(statement("cancel_key"), "k", key, None)
    await conn.fetch(statement("cancel_many"), [task_id], False)
    await conn.fetch(statement("cancel_many"), [task_id + 1], True)
    await conn.fetch(statement("revive_many"), [task_id], 0)


async def _blocks_touched(conn: Connection) -> int:
    """Blocks of the table and its indexes that this session has visited so far."""
    if conn.get_server_version().major >= 15:
        await conn.execute("select pg_stat_force_next_flush()")
    else:
        await asyncio.sleep(1)  # as often as these versions report
    sql = """
        select heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit
          from pg_statio_user_tables where relid = 'delayq.tasks'::regclass
    """
    return int(await conn.fetchval(sql))
