"""Two at once, in both orders: the lock is held on purpose, and the other is seen to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg
import pytest

from delayq.statements import statement
from tests.helpers import connected, wait_until_blocked
from tests.leases import NODE, lease, ran, register, settle

if TYPE_CHECKING:
    from delayq.database import Connection

T = TypeVar("T")
HOUR = 3_600_000_000
Ended = pytest.mark.parametrize("end", ["commit", "rollback"])
Strict = pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])


@pytest.fixture
async def first(dsn: str) -> AsyncIterator[Connection]:
    """Who comes first, and holds the lock."""
    async with connected(dsn) as conn:
        yield conn


@pytest.fixture
async def second(dsn: str) -> AsyncIterator[Connection]:
    """Who has to wait."""
    async with connected(dsn) as conn:
        yield conn


@asynccontextmanager
async def held(conn: Connection, end: str = "commit") -> AsyncIterator[None]:
    """A transaction whose locks are held until the block ends, in this way."""
    transaction = conn.transaction(isolation="read_committed")
    await transaction.start()
    try:
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.commit() if end == "commit" else transaction.rollback())


async def blocked(conn: Connection, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts the work of the second, and returns once `conn` sees that it waits for a lock."""
    task = asyncio.create_task(work)
    await wait_until_blocked(conn)
    return task


async def schedule(
    conn: Connection, key: str | None = "order", on_conflict: str = "keep", again: str | None = None
) -> asyncpg.Record:
    row = await conn.fetchrow(
        statement("schedule_one"), "k", '{"n": 1}', HOUR, None, key, on_conflict, again,
        0, None, None, None, "{}", None,
    )  # fmt: skip
    assert row is not None
    return row


async def task_of(conn: Connection, **options: Any) -> int:
    return int((await schedule(conn, **options))["id"])


async def cancel(conn: Connection, task_id: int) -> str:
    return str(await conn.fetchval("select delayq.cancel($1)", task_id))


async def cancel_key(conn: Connection) -> str:
    return str(await conn.fetchval(statement("cancel_key"), "k", "order", None))


async def run_now(conn: Connection, task_id: int) -> str:
    return str(await conn.fetchval("select delayq.run_now($1)", task_id))


async def revive(conn: Connection, task_id: int) -> str:
    return str(await conn.fetchval("select delayq.revive($1)", task_id))


async def live(conn: Connection) -> list[int]:
    return [row["id"] for row in await conn.fetch("select id from delayq.tasks order by id")]


# --- keys -------------------------------------------------------------------------------------


@Ended
@pytest.mark.parametrize("on_conflict", ["keep", "replace", "error"])
async def test_a_schedule_waits_for_the_uncommitted_holder_of_its_key(
    conn: Connection, first: Connection, second: Connection, end: str, on_conflict: str
) -> None:
    async with held(first, end):
        holder = await task_of(first)
        work = schedule(second, on_conflict=on_conflict)
        loser = await blocked(conn, work)
    row = await loser
    if end == "rollback":
        assert row["outcome"] == "created"
    else:
        outcomes = {"keep": "kept", "replace": "replaced", "error": "conflict"}
        assert (row["outcome"], row["id"]) == (outcomes[on_conflict], holder)
    assert len(await live(conn)) == 1


@Ended
async def test_the_same_request_twice_at_once_is_one_task(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    async with held(first, end):
        task = await task_of(first, key=None, again="r-1")
        loser = await blocked(conn, schedule(second, key=None, again="r-1"))
    row = await loser
    if end == "commit":
        assert (row["outcome"], row["id"]) == ("repeated", task)
    else:
        assert row["outcome"] == "created"
    assert await live(conn) == [row["id"]]


async def schedule_keyed(
    conn: Connection, *wanted: tuple[str | None, str | None], on_conflict: str = "keep"
) -> list[asyncpg.Record]:
    """Requests by (key, idempotency key); their answers, in their order."""
    count = len(wanted)
    rows = await conn.fetch(
        statement("schedule_keyed"), ["k"] * count, ['{"n": 2}'] * count, [HOUR] * count,
        [None] * count, [0] * count, [None] * count, [None] * count, [None] * count,
        ["{}"] * count, [key for key, _ in wanted], [on_conflict] * count,
        [again for _, again in wanted], None,
    )  # fmt: skip
    return sorted(rows, key=lambda row: int(row["nr"]))


@Ended
@pytest.mark.parametrize("again", [None, "r-1"])
@pytest.mark.parametrize("on_conflict", ["keep", "replace", "error"])
async def test_many_schedules_wait_for_the_uncommitted_holder_of_one_of_their_keys(
    conn: Connection,
    first: Connection,
    second: Connection,
    end: str,
    on_conflict: str,
    again: str | None,
) -> None:
    async with held(first, end):
        holder = await task_of(first)
        work = schedule_keyed(
            second, ("a", None), ("order", again), ("z", "r-2"), on_conflict=on_conflict
        )
        loser = await blocked(conn, work)
    before, row, after = await loser
    assert (before["outcome"], after["outcome"]) == ("created", "created")
    if end == "rollback":
        assert row["outcome"] == "created"
    else:
        outcomes = {"keep": "kept", "replace": "replaced", "error": "conflict"}
        assert (row["outcome"], row["id"]) == (outcomes[on_conflict], holder)
    assert await live(conn) == sorted({before["id"], row["id"], after["id"]})
    # whatever the request became, its idempotency key names a task that is there, or nothing
    claims = await conn.fetch("select task_id, idempotency_key from delayq.idempotency")
    expected = {"r-2": after["id"]}
    if again is not None and row["outcome"] != "conflict":
        expected[again] = row["id"]
    assert {claim["idempotency_key"]: claim["task_id"] for claim in claims} == expected


@Ended
async def test_many_schedules_wait_for_the_same_request_in_flight(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    async with held(first, end):
        task = await task_of(first, key=None, again="r-1")
        work = schedule_keyed(second, (None, "r-0"), (None, "r-1"), (None, None))
        loser = await blocked(conn, work)
    before, row, after = await loser
    assert (before["outcome"], after["outcome"]) == ("created", "created")
    if end == "commit":
        assert (row["outcome"], row["id"]) == ("repeated", task)
    else:
        assert row["outcome"] == "created"
    assert await live(conn) == sorted([before["id"], row["id"], after["id"]])


async def test_many_schedules_take_their_keys_in_one_order_for_everybody(
    conn: Connection, first: Connection, second: Connection
) -> None:
    """Whoever waits for the first of them holds none of the others."""
    async with held(first):
        await task_of(first, key="a")
        work = schedule_keyed(second, ("c", None), ("b", None), ("a", None))
        loser = await blocked(conn, work)
        free = [await asyncio.wait_for(schedule(conn, key=key), 5) for key in ("b", "c")]
    assert [row["outcome"] for row in free] == ["created", "created"]
    assert [row["outcome"] for row in await loser] == ["kept", "kept", "kept"]


async def test_locks_are_taken_in_one_order_for_everybody(
    conn: Connection, first: Connection, second: Connection
) -> None:
    """By id, whether the tasks are named by ids or by keys, to move or to cancel them."""
    tasks = [await task_of(conn, key=key) for key in ("c", "b", "a")]
    for verb in (
        "cancel_keys('k', array['a', 'b', 'c'])",
        f"cancel_many(array{tasks[::-1]})",
        "reschedule_keys('k', array['a', 'b', 'c'], 0, null)",
        f"reschedule_many(array{tasks[::-1]}, array[0, 0, 0], array[null, null, null]::bigint[])",
    ):
        async with held(first, "rollback"):
            await first.execute("select from delayq.tasks where id = $1 for update", tasks[0])
            transaction = second.transaction()
            await transaction.start()
            waiting = await blocked(conn, second.fetch(f"select * from delayq.{verb}"))
            free = "select id from delayq.tasks where id = any($1::bigint[]) for update skip locked"
            assert [row["id"] for row in await conn.fetch(free, tasks)] == tasks[1:], verb
        assert len(await waiting) == 3
        await transaction.rollback()


@Strict
async def test_many_schedules_that_meet_a_key_from_after_their_snapshot_are_a_conflict(
    conn: Connection, first: Connection, isolation: Any
) -> None:
    async with first.transaction(isolation=isolation):
        await first.fetchval("select count(*) from delayq.tasks")
        await task_of(conn)
        with pytest.raises(asyncpg.SerializationError):
            await schedule_keyed(first, ("a", None), ("order", None))


@Ended
async def test_replace_waits_for_a_lease_in_flight_and_then_follows_it(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    task = await task_of(conn)
    async with held(first, end):
        await lease(first, task)
        loser = await blocked(conn, schedule(second, on_conflict="replace"))
    row = await loser
    assert row["id"] == task
    if end == "commit":
        assert row["outcome"] == "waiting"
        assert row["follow_up"] not in (None, task)
    else:
        assert (row["outcome"], row["follow_up"]) == ("replaced", None)


async def test_a_lease_passes_over_a_task_that_is_being_replaced(
    conn: Connection, first: Connection
) -> None:
    await register(conn)
    task = await task_of(conn)
    await conn.execute("update delayq.tasks set execute_at = delayq.clock()")
    async with held(first):
        assert (await schedule(first, on_conflict="replace"))["outcome"] == "replaced"
        rows = await conn.fetch(
            statement("lease"), f"{{{task}}}", NODE, 1, ["k"], [5], [None], [True], 0, 0, [],
            task, True,
        )  # fmt: skip
        assert rows == []
    assert await conn.fetchval("select state from delayq.tasks") == "pending"


async def test_a_schedule_takes_the_place_of_a_holder_that_is_just_settled(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    async with held(first):
        assert await settle(first, task, token) == "succeeded"
        loser = await blocked(conn, schedule(second, on_conflict="replace"))
    row = await loser
    assert row["outcome"] == "created"
    assert await live(conn) == [row["id"]]


# --- cancel -----------------------------------------------------------------------------------


@Ended
async def test_cancel_waits_for_a_settle_in_flight_and_tells_the_truth(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    async with held(first, end):
        assert await settle(first, task, token) == "succeeded"
        loser = await blocked(conn, cancel(second, task))
    assert await loser == ("already_finished" if end == "commit" else "cancel_requested")


async def test_a_settle_waits_for_the_cancel_and_obeys_it(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    async with held(first):
        assert await cancel(first, task) == "cancel_requested"
        loser = await blocked(conn, settle(second, task, token, "retry"))
    assert await loser == "cancelled"


async def test_cancel_takes_a_task_that_is_just_put_back_for_a_retry(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    async with held(first):
        assert await settle(first, task, token, "retry") == "retry"
        loser = await blocked(conn, cancel(second, task))
    assert await loser == "cancelled"
    assert await live(conn) == []


async def test_cancel_by_key_also_gets_the_successor_that_a_settle_in_flight_inserts(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    successor = (await schedule(conn, on_conflict="replace"))["follow_up"]
    async with held(first):
        assert await settle(first, task, token) == "succeeded"
        loser = await blocked(conn, cancel_key(second))
    assert await loser == "cancelled"
    assert await live(conn) == []
    sql = "select state from delayq.task_history where id = $1"
    assert await conn.fetchval(sql, successor) == "cancelled"


async def test_cancel_of_a_follow_up_gets_it_when_it_is_just_inserted(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    successor = (await schedule(conn, on_conflict="replace"))["follow_up"]
    async with held(first):
        assert await settle(first, task, token) == "succeeded"
        loser = await blocked(conn, cancel(second, successor))
    assert await loser == "cancelled"
    assert await live(conn) == []


async def test_of_two_cancels_at_once_one_cancelled_the_task(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    async with held(first):
        assert await cancel(first, task) == "cancelled"
        loser = await blocked(conn, cancel(second, task))
    assert await loser == "already_finished"


async def test_shared_cancels_and_moves_pass_over_what_a_stranger_holds_locked(
    conn: Connection, first: Connection
) -> None:
    locked, free = await task_of(conn), await task_of(conn, key=None)
    async with held(first):
        await first.execute("select from delayq.tasks where id = $1 for update", locked)
        moves = await conn.fetch(
            statement("reschedule_many"), [locked, free], [HOUR, HOUR], [None, None], False
        )
        cancels = await conn.fetch(statement("cancel_many"), [locked, free], False)
    assert {row["id"]: row["answer"] for row in moves} == {locked: "locked", free: "moved"}
    assert {row["id"]: row["answer"] for row in cancels} == {locked: "locked", free: "cancelled"}


async def test_shared_cancels_and_moves_pass_over_what_waits_behind_a_locked_task(
    conn: Connection, first: Connection
) -> None:
    waiting: list[int] = []
    for key in ("a", "b"):
        await lease(conn, await task_of(conn, key=key))
        row = await schedule(conn, key=key, on_conflict="replace")
        waiting.append(row["follow_up"])
    async with held(first):
        await first.execute("select from delayq.tasks where key = 'a' for update")
        moves = await conn.fetch(
            statement("reschedule_many"), waiting, [HOUR, HOUR], [None, None], False
        )
        cancels = await conn.fetch(statement("cancel_many"), waiting, False)
    locked, free = waiting
    assert {row["id"]: row["answer"] for row in moves} == {locked: "locked", free: "moved"}
    assert {row["id"]: row["answer"] for row in cancels} == {locked: "locked", free: "cancelled"}


# --- reschedule -------------------------------------------------------------------------------


@Ended
async def test_a_move_waits_for_a_lease_in_flight(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    task = await task_of(conn)
    async with held(first, end):
        await lease(first, task)
        loser = await blocked(conn, run_now(second, task))
    assert await loser == ("running" if end == "commit" else "moved")


async def test_a_move_by_key_waits_for_the_holder_that_takes_the_key_over(
    conn: Connection, first: Connection, second: Connection
) -> None:
    task = await task_of(conn)
    token = await lease(conn, task)
    successor = (await schedule(conn, on_conflict="replace"))["follow_up"]
    work = second.fetchrow(statement("reschedule_key"), "k", "order", 2 * HOUR, None, None)
    async with held(first):
        assert await settle(first, task, token) == "succeeded"
        loser = await blocked(conn, work)
    row = await loser
    assert row is not None
    assert (row["id"], row["answer"]) == (successor, "moved")


# --- revive -----------------------------------------------------------------------------------


@Ended
async def test_revive_waits_for_the_uncommitted_holder_of_its_key(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    task = await task_of(conn)
    await ran(conn, task, "dead")
    async with held(first, end):
        holder = await task_of(first)
        loser = await blocked(conn, revive(second, task))
    assert await loser == ("key_taken" if end == "commit" else "revived")
    assert await live(conn) == [holder if end == "commit" else task]


@Ended
async def test_a_schedule_waits_for_a_revive_with_the_same_key(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    task = await task_of(conn)
    await ran(conn, task, "dead")
    async with held(first, end):
        assert await revive(first, task) == "revived"
        loser = await blocked(conn, schedule(second))
    row = await loser
    assert row["outcome"] == ("kept" if end == "commit" else "created")
    assert await live(conn) == [row["id"]]


@Ended
async def test_revive_waits_for_a_discard(
    conn: Connection, first: Connection, second: Connection, end: str
) -> None:
    task = await task_of(conn)
    await ran(conn, task, "dead")
    async with held(first, end):
        assert await first.fetchval("select delayq.discard($1)", task) == "discarded"
        loser = await blocked(conn, revive(second, task))
    assert await loser == ("not_found" if end == "commit" else "revived")


# --- old snapshots ----------------------------------------------------------------------------


@asynccontextmanager
async def old_snapshot(conn: Connection, isolation: Any) -> AsyncIterator[None]:
    """A transaction of the caller's whose snapshot is taken now."""
    transaction = conn.transaction(isolation=isolation)
    await transaction.start()
    await conn.fetchval("select count(*) from delayq.tasks")
    try:
        yield
    finally:
        await transaction.rollback()


@Strict
@pytest.mark.parametrize("verb", ["cancel", "run_now", "revive", "discard"])
async def test_a_task_that_came_after_the_snapshot_is_a_conflict_and_not_unknown(
    conn: Connection, second: Connection, isolation: str, verb: str
) -> None:
    async with old_snapshot(second, isolation):
        task = await task_of(conn)
        with pytest.raises(asyncpg.SerializationError):
            await second.fetchval(f"select delayq.{verb}($1)", task)


@Strict
@pytest.mark.parametrize("verb", ["cancel", "run_now"])
async def test_a_key_that_was_taken_after_the_snapshot_is_a_conflict_and_not_free(
    conn: Connection, second: Connection, isolation: str, verb: str
) -> None:
    async with old_snapshot(second, isolation):
        await task_of(conn)
        with pytest.raises(asyncpg.SerializationError):
            await second.fetchval(f"select delayq.{verb}(kind => 'k', key => 'order')")


@Strict
@pytest.mark.parametrize("verb", ["cancel", "run_now", "revive", "discard"])
async def test_a_task_that_ended_after_the_snapshot_is_a_conflict_and_not_live(
    conn: Connection, second: Connection, isolation: str, verb: str
) -> None:
    task = await task_of(conn)
    async with old_snapshot(second, isolation):
        await ran(conn, task)
        with pytest.raises(asyncpg.SerializationError):
            await second.fetchval(f"select delayq.{verb}($1)", task)


@Strict
@pytest.mark.parametrize("verb", ["cancel", "run_now"])
async def test_a_task_that_was_revived_after_the_snapshot_is_a_conflict_and_not_dead(
    conn: Connection, second: Connection, isolation: str, verb: str
) -> None:
    task = await task_of(conn)
    await ran(conn, task, "dead")
    async with old_snapshot(second, isolation):
        assert await revive(conn, task) == "revived"
        with pytest.raises(asyncpg.SerializationError):
            await second.fetchval(f"select delayq.{verb}($1)", task)


@Strict
@pytest.mark.parametrize("on_conflict", ["keep", "replace", "error"])
async def test_a_key_that_changed_hands_after_the_snapshot_is_a_conflict(
    conn: Connection, second: Connection, isolation: str, on_conflict: str
) -> None:
    task = await task_of(conn)
    async with old_snapshot(second, isolation):
        await ran(conn, task)
        with pytest.raises(asyncpg.SerializationError):
            await schedule(second, on_conflict=on_conflict)


@Strict
async def test_what_did_not_change_is_answered_at_every_level(
    conn: Connection, second: Connection, isolation: str
) -> None:
    pending, finished = await task_of(conn), await task_of(conn, key=None)
    await ran(conn, finished)
    async with old_snapshot(second, isolation):
        for nobody in (10**15, 0, -1):
            assert await cancel(second, nobody) == "not_found"
        assert await cancel(second, finished) == "already_finished"
        assert (await schedule(second))["outcome"] == "kept"
        assert await run_now(second, pending) == "moved"
        assert await cancel(second, pending) == "cancelled"
        assert await cancel_key(second) == "not_found"
    assert await live(conn) == [pending]
    assert await conn.fetchval("select count(*) from delayq.tasks where kind = '?'") == 0
