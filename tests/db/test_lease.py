"""The lease: the only right to run a task. What may be refused, lost, odd, large, or too early."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq.context import Context
from delayq.errors import (
    AuthenticationFailed,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    PrivilegeMissing,
)
from tests.helpers import connected, wait_for
from tests.nodes import Application, all_ended, ended, life, no_live_tasks, schedule
from tests.rooms import ME, PEER, TERMS, add_node, add_tasks, lease, make_commons, swap

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq.commons import Commons
    from delayq.database import Connection, Database
    from delayq.settings import Settings
    from tests.conftest import Logged

MARKER = "Marker-0d9b7c1e"
BATCH = """
    insert into delayq.tasks (kind, execute_at)
    select 'mail', delayq.clock() + $2 * interval '1 s' from generate_series(1, $1) returning id
"""


@pytest.fixture
async def commons(
    conn: Connection, database: Database, settings: Settings
) -> AsyncIterator[Commons]:
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    yield commons
    await commons.store.aclose()


async def batch(conn: Connection, count: int, after_s: float) -> list[int]:
    """So many tasks of kind mail, all due at one instant."""
    return [row["id"] for row in await conn.fetch(BATCH, count, after_s)]


async def pending(conn: Connection) -> set[int]:
    return {row["id"] for row in await conn.fetch(
        "select id from delayq.tasks where state = 'pending'")}  # fmt: skip


# --- what a lease takes, and what it leaves ---------------------------------------------------


async def test_a_lease_takes_what_is_due_pending_and_served_and_nothing_else(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, [1, 2], after_s=-1)
    await add_tasks(conn, [3], after_s=5)
    await add_tasks(conn, [4], after_s=-1, kind="other")
    assert sorted(one.id for one in await lease(commons, [1, 2, 3, 4, 5])) == [1, 2]
    assert await lease(commons, [1, 2]) == []
    row = await conn.fetchrow("select * from delayq.tasks where id = 1")
    assert row is not None
    assert (row["state"], row["lease_owner"], row["attempt"]) == ("running", ME, 1)


async def test_every_lease_has_a_token_of_its_own(conn: Connection, commons: Commons) -> None:
    await add_tasks(conn, range(1, 101), after_s=-1)
    first = {one.id: one.token for one in await lease(commons, range(1, 101), nonce=5)}
    await conn.execute(
        "update delayq.tasks set state = 'pending', lease_owner = 0, lease_token = 0"
    )
    second = {one.id: one.token for one in await lease(commons, range(1, 101), nonce=6)}
    assert len({*first.values(), *second.values()}) == 200


async def test_a_locked_task_is_left_and_the_rest_of_the_batch_is_leased(
    conn: Connection, dsn: str, commons: Commons
) -> None:
    await add_tasks(conn, range(1, 51), after_s=-1)
    async with connected(dsn) as stranger, stranger.transaction():
        await stranger.execute("select from delayq.tasks where id = 7 for update")
        async with asyncio.timeout(5):
            leases = await lease(commons, range(1, 51))
    assert {one.id for one in leases} == set(range(1, 51)) - {7}


@pytest.mark.parametrize("state", ["dead", "draining", None])
async def test_a_lease_is_refused_once_the_node_is_buried_gone_or_leaving(
    conn: Connection, commons: Commons, state: str | None
) -> None:
    """A node that slept through its burial wakes with a lease statement in its hand."""
    await add_tasks(conn, [1], after_s=-1)
    if state is None:
        await conn.execute("delete from delayq.nodes")
    else:
        await conn.execute("update delayq.nodes set state = $1", state)
    assert await lease(commons, [1]) == []
    assert await pending(conn) == {1}


async def test_a_lease_that_waits_for_nobody_finds_the_burial_that_committed_before_it(
    conn: Connection, dsn: str, commons: Commons
) -> None:
    """Of a burial that has not committed it cannot know; the token fences it then."""
    await add_tasks(conn, [1], after_s=-1)
    async with connected(dsn) as judge:
        transaction = judge.transaction()
        await transaction.start()
        await judge.execute("update delayq.nodes set state = 'dead'")
        (one,) = await lease(commons, [1])
        await transaction.commit()
    adopted = await conn.fetch("select id from delayq.adopt(array[1]::bigint[], 0)")
    assert [row["id"] for row in adopted] == [1]
    settled = await commons.store.settle_succeeded([1], [one.token], [0])
    assert settled == 0


# --- an answer that was lost ------------------------------------------------------------------


async def test_what_a_nonce_holds_can_be_found_and_what_others_hold_is_not_among_it(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, range(1, 7), after_s=-1)
    mine = {one.id: one.token for one in await lease(commons, [1, 2, 3], nonce=-5)}
    await lease(commons, [4], nonce=6)
    assert dict(await commons.store.holds([1, 2, 3, 4, 5, 9], -5)) == mine
    assert await commons.store.holds([1, 2, 3, 4], 7) == []


@pytest.mark.parametrize("took_effect", [True, False])
@pytest.mark.parametrize("error", [DatabaseTimeout("no answer"), DatabaseUnavailable("cut")])
async def test_a_lease_whose_answer_is_lost_costs_neither_the_task_nor_an_attempt(
    conn: Connection, settings: Settings, took_effect: bool, error: Exception
) -> None:
    application, attempts = Application(settings), list[int]()

    @application.task
    async def mail(ctx: Context) -> None:
        attempts.append(ctx.attempt)

    async with application.node() as node:
        store = life(node)._store
        calls: list[int] = []

        async def lossy(*args: Any) -> Any:
            calls.append(1)
            if len(calls) > 1:
                return await real(*args)
            if took_effect:
                await real(*args)
            raise error

        real = swap(store, "lease", lossy)
        ids = await batch(conn, 20, 0.1)
        over = await all_ended(conn, ids, limit_s=5)  # not: when somebody looks once a minute
        assert {one.attempt for one in over.values()} == {1}
        assert attempts == [1] * 20
        await wait_for(lambda: not life(node)._holdings.ids(), "the node lets go of them")


# --- odd rows ---------------------------------------------------------------------------------


async def test_one_odd_row_is_set_aside_as_dead_with_the_reason_and_the_batch_goes_on(
    conn: Connection, settings: Settings, logged: list[Logged]
) -> None:
    """By hand: a counter that cannot be counted up. Every lease of it fails."""
    application = Application(settings)

    @application.task
    async def mail(text: str = "") -> None:
        return None

    async with application.node():
        ids = await batch(conn, 60, 0.6)
        odd = ids[17]
        await conn.execute(
            "update delayq.tasks set attempt = 2147483647, payload = $2 where id = $1",
            odd,
            json.dumps({"text": MARKER}),
        )
        over = await all_ended(conn, ids)
        assert {one.state for one in over.values() if one.id != odd} == {"succeeded"}
        assert over[odd].state == "dead"
        assert "lease was refused" in over[odd].errors[-1]["message"]
        kept = "select payload ->> 'text' from delayq.dead_tasks where id = $1"
        assert await conn.fetchval(kept, odd) == MARKER
        # and the next one is not held up either
        assert (await ended(conn, await schedule(conn, "mail"))).state == "succeeded"
    assert [event for event in logged if event.event == "task.set_aside"]
    assert not [event for event in logged if MARKER in event.text]
    assert MARKER not in json.dumps(over[odd].errors)


async def test_a_lone_odd_row_is_set_aside_too(conn: Connection, settings: Settings) -> None:
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    async with application.node():
        (odd,) = await batch(conn, 1, 0.3)
        await conn.execute("update delayq.tasks set attempt = 2147483647")
        assert (await ended(conn, odd)).state == "dead"


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationFailed("the password was changed"),
        PrivilegeMissing("somebody revoked it"),
        DatabaseError("the session settings do not take"),
    ],
)
async def test_a_refusal_that_is_no_rows_fault_sets_nothing_aside(
    conn: Connection, settings: Settings, error: Exception
) -> None:
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    async with application.node() as node:
        store = life(node)._store
        refusals: list[int] = []

        async def refused(*args: Any) -> Any:
            if len(refusals) < 6:
                refusals.append(1)
                raise error
            return await real(*args)

        real = swap(store, "lease", refused)
        ids = await batch(conn, 5, 0.1)
        over = await all_ended(conn, ids)
        assert {one.state for one in over.values()} == {"succeeded"}
        assert {one.attempt for one in over.values()} == {1}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_stricter_isolation_level_by_default_fails_no_batch(
    conn: Connection, dsn: str, settings: Settings, logged: list[Logged], level: str
) -> None:
    """One row that moved meanwhile would be a serialization failure for all of them."""
    name = await conn.fetchval("select current_database()")
    await conn.execute(f"alter database \"{name}\" set default_transaction_isolation = '{level}'")
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    async with application.node(), connected(dsn) as stranger:
        assert await stranger.fetchval("show transaction_isolation") == level
        ids = await batch(conn, 100, 0.5)
        for _ in range(20):  # moved again and again, until after they are due
            with suppress(asyncpg.SerializationError):  # the stranger's, who came second
                async with stranger.transaction():
                    await stranger.execute(
                        "update delayq.tasks set priority = priority where id = any($1)", ids[::10]
                    )
                    await asyncio.sleep(0.05)
        over = await all_ended(conn, ids)
        assert {one.state for one in over.values()} == {"succeeded"}
        assert {one.attempt for one in over.values()} == {1}
    assert not [event for event in logged if event.level in ("ERROR", "CRITICAL")]


# --- large payloads ---------------------------------------------------------------------------


async def test_a_long_payload_is_not_sent_along_with_the_lease_and_can_be_read_under_the_token(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, [1, 2], after_s=-1)
    long = json.dumps({"text": "x" * 100_000})
    await conn.execute("update delayq.tasks set payload = $1 where id = 2", long)
    leases = {one.id: one for one in await lease(commons, [1, 2])}
    assert leases[1].payload == "{}"
    assert leases[2].payload is None
    payloads = await commons.store.payloads([2], [leases[2].token], 1)
    assert json.loads(payloads[2] or "") == json.loads(long)
    assert await commons.store.payloads([2], [leases[2].token + 1], 1) == {}


async def test_the_answer_of_a_large_batch_is_bounded_in_bytes(
    conn: Connection, settings: Settings
) -> None:
    """500 payloads of 12 kB each would be more than a frozen client's sockets take."""
    application, lengths = Application(settings), list[int]()

    @application.task
    async def mail(text: str) -> None:
        lengths.append(len(text))

    answers: list[int] = []
    async with application.node(max_workers=600) as node:
        store = life(node)._store

        async def measured(*args: Any) -> Any:
            rows = await real(*args)
            answers.append(sum(len(row["payload"] or "") for row in rows))
            return rows

        real = swap(store, "lease", measured)
        await conn.execute(
            "insert into delayq.tasks (kind, payload, execute_at)"
            " select 'mail', jsonb_build_object('text', repeat('x', 12000)),"
            "  delayq.clock() + interval '0.8 s' from generate_series(1, 500)"
        )
        await no_live_tasks(conn)
        assert lengths == [12_000] * 500
        assert max(answers) <= 1024 * 1024 + 16 * 1024


async def test_history_keeps_short_payloads_and_the_dead_tasks_all_of_them(
    conn: Connection, settings: Settings
) -> None:
    application = Application(settings)

    @application.task(max_attempts=1)
    async def mail(text: str, fail: bool) -> None:
        if fail:
            raise ValueError("boom")

    async with application.node():
        short, long, dead = [
            await schedule(conn, "mail", {"text": "x" * size, "fail": fail})
            for size, fail in ((4_000, False), (5_000, False), (500_000, True))
        ]
        await all_ended(conn, [short, long, dead])
    kept = "select length(payload ->> 'text') from delayq.{} where id = $1"
    assert await conn.fetchval(kept.format("task_history"), short) == 4_000
    assert await conn.fetchval(kept.format("task_history"), long) is None
    assert await conn.fetchval(kept.format("dead_tasks"), dead) == 500_000


# --- never early ------------------------------------------------------------------------------


async def test_a_lease_that_is_sent_ahead_never_starts_its_handler_early(
    conn: Connection, settings: Settings
) -> None:
    """The allowance is set to its limit of 5 ms; without the gate handlers would start early."""
    application, started = Application(settings), dict[int, int]()

    @application.task
    async def mail(ctx: Context) -> None:
        started[int(ctx.id)] = time.monotonic_ns() // 1_000

    async with application.node() as node:
        swap(life(node)._dispatcher._pace, "leased", lambda *_args: None)
        life(node)._dispatcher._pace.trip_us = 5_000
        await conn.execute(
            "insert into delayq.tasks (kind, execute_at)"
            " select 'mail', delayq.clock() + interval '0.3 s' + i * interval '3 ms'"
            "   from generate_series(1, 300) as i"
        )
        due_us = {row["id"]: row["us"] for row in await conn.fetch(
            "select id, delayq.micros(execute_at) as us from delayq.tasks")}  # fmt: skip
        sent_us = time.monotonic_ns() // 1_000
        database_us = await conn.fetchval("select delayq.micros(delayq.clock())")
        await wait_for(lambda: len(started) == 300, "all of them start")
        counters = life(node).counters
        assert counters.missed_leases < 30  # and the leases did find them
    for task_id, at_us in started.items():
        # the database's clock at that moment cannot have been later than this
        assert database_us + (at_us - sent_us) >= due_us[task_id]


async def test_the_lease_statement_itself_takes_nothing_beyond_its_allowance(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, [1], after_s=0.5)
    assert await commons.store.lease([1], 7, TERMS, 5_000, 0) == []
    assert len(await commons.store.lease([1], 7, TERMS, 600_000, 0)) == 1


# --- policy -----------------------------------------------------------------------------------


async def test_what_a_plain_insert_leaves_open_is_the_handlers_and_written_by_the_lease(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, [1, 2], after_s=-1)
    await conn.execute("update delayq.tasks set max_attempts = 9, timeout_ms = 1000 where id = 2")
    await lease(commons, [1, 2], max_attempts=[4], timeouts_ms=[60_000])
    limits = await conn.fetch(
        "select attempt_limit, extract(epoch from deadline_at - leased_at)::float8 as timeout_s"
        " from delayq.tasks order by id"
    )
    assert [row["attempt_limit"] for row in limits] == [4, 9]
    assert [row["timeout_s"] for row in limits] == [
        pytest.approx(60, abs=0.1),
        pytest.approx(1, abs=0.1),
    ]


async def test_a_kind_that_runs_in_threads_has_no_deadline_that_others_could_act_on(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, [1], after_s=-1)
    await lease(commons, [1], timeouts_ms=[1_000], deadlines=[False])
    assert await conn.fetchval("select deadline_at = 'infinity' from delayq.tasks")


async def test_a_task_leased_by_another_node_is_not_given_away(
    conn: Connection, database: Database, settings: Settings, commons: Commons
) -> None:
    await add_node(conn, PEER)
    other = await make_commons(database, settings, PEER)
    await add_tasks(conn, range(1, 301), after_s=-1)
    mine, theirs = await asyncio.gather(
        lease(commons, range(1, 301), nonce=1), lease(other, range(1, 301), nonce=2)
    )
    ids = [one.id for one in [*mine, *theirs]]
    assert len(ids) == len(set(ids))
    await other.store.aclose()


async def test_a_task_that_was_once_leased_is_no_misfire_afterwards(
    conn: Connection, commons: Commons
) -> None:
    await add_tasks(conn, [1], after_s=-100)
    await conn.execute("update delayq.tasks set misfire_grace_ms = 1000")
    (first,) = await lease(commons, [1])
    assert first.never_leased
    settled = await commons.store.settle([1], [first.token], [0], ["release"], [None], [None], 5)
    assert settled[0].verdict == "release"
    (second,) = await lease(commons, [1], nonce=8)
    assert not second.never_leased
    assert second.due_us == first.due_us
    assert timedelta(microseconds=second.due_us) > timedelta(0)
