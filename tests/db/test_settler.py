"""Settlements are kept until they are durable, whatever happens to the statement or the row."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from delayq.errors import (
    AuthenticationFailed,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    PrivilegeMissing,
    SchemaMissing,
)
from delayq.lease import Lease, Outcome, Settlement
from delayq.settler import Settler
from delayq.store import Settled
from tests.helpers import connected, wait_for
from tests.rooms import ME, add_node, add_tasks, lease, make_commons, swap

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.database import Connection, Database
    from delayq.settings import Settings
    from tests.conftest import Logged


@dataclass
class Office:
    """A settler at work, and which leases it said are over, with what verdict."""

    commons: Commons
    settler: Settler
    over: dict[int, str | None] = field(default_factory=dict)

    async def flushed(self) -> None:
        async with asyncio.timeout(10):
            await self.settler.flushed()

    async def ends(self, *ids: int) -> None:
        await wait_for(lambda: self.over.keys() >= set(ids), f"{ids} are over")


@asynccontextmanager
async def office(conn: Connection, database: Database, settings: Settings) -> AsyncIterator[Office]:
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    over: dict[int, str | None] = {}

    def note(ends: Sequence[tuple[Lease, Settled | None]]) -> None:
        for one, answer in ends:
            assert one.id not in over, "it was over already"
            over[one.id] = None if answer is None else answer.verdict

    settler = Settler(commons, note)
    task = asyncio.create_task(settler.run())
    yield Office(commons, settler, over)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await commons.store.aclose()


async def leased(conn: Connection, at: Office, count: int = 3) -> list[Lease]:
    """Running tasks 1, 2, … of this node."""
    ids = await add_tasks(conn, range(1, count + 1), after_s=-1)
    leases = sorted(await lease(at.commons, ids), key=lambda one: one.id)
    assert [one.id for one in leases] == ids
    return leases


async def finals(conn: Connection) -> dict[int, str]:
    found = await conn.fetch(
        "select id, state from delayq.task_history"
        " union all select id, 'dead' from delayq.dead_tasks"
    )
    return {row["id"]: row["state"] for row in found}


def failing(at: Office, name: str, *errors: Exception, after: bool = False) -> list[int]:
    """Let a statement fail with these errors, one a call; `after` it took effect."""
    calls, left = list[int](), list(errors)

    async def call(*args: Any) -> Any:
        calls.append(1)
        if not left:
            return await real(*args)
        if after:
            await real(*args)
        raise left.pop(0)

    real = swap(at.commons.store, name, call)
    return calls


def sizes_of(at: Office, name: str) -> list[int]:
    """How many tasks each statement of this name is about, from now on."""
    sizes = list[int]()

    async def call(ids: list[int], *others: Any) -> Any:
        sizes.append(len(ids))
        return await real(ids, *others)

    real = swap(at.commons.store, name, call)
    return sizes


# --- the ordinary ends ------------------------------------------------------------------------


async def test_successes_are_settled_and_told(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        sizes = sizes_of(at, "settle_succeeded")
        for one in await leased(conn, at, 4_200):
            one.lateness_us = 5
            at.settler.succeeded(one)
        await at.flushed()
        assert set(at.over.values()) == {"succeeded"}
        assert len(at.over) == 4_200
        assert at.commons.counters.succeeded == 4_200
        count = "select count(*) from delayq.task_history where lateness_us = 5 and node = $1"
        assert await conn.fetchval(count, ME) == 4_200
        assert sizes == [2_000, 2_000, 200]  # what has gathered, in bounded statements
        assert len(at.settler) == 0


async def test_other_ends_are_told_with_what_really_happened(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 7)
        await conn.execute("update delayq.tasks set cancel_requested = true where id = 6")
        outcomes = [
            Outcome.RETRY, Outcome.SNOOZE, Outcome.DEAD, Outcome.MISSED, Outcome.RELEASE,
            Outcome.RETRY, Outcome.UNSTARTED,
        ]  # fmt: skip
        for one, outcome in zip(leases, outcomes, strict=True):
            at.settler.settle(Settlement(one, outcome, 60_000_000, '{"error": "E"}'))
        await at.flushed()
        assert at.over == {
            1: "retry", 2: "snooze", 3: "dead", 4: "missed", 5: "release", 6: "cancelled",
            7: "unstarted",
        }  # fmt: skip
        attempts = "select array_agg(attempt order by id) from delayq.tasks"
        assert await conn.fetchval(attempts) == [1, 0, 0, 0]
        counters = at.commons.counters
        assert (counters.retried, counters.cancelled, counters.released) == (1, 1, 2)


# How an attempt ended, and what becomes of its task: if a cancel was requested meanwhile, if a
# successor waits, and if neither.
WAYS_OUT = {
    Outcome.SUCCEEDED: ("succeeded", "succeeded", "succeeded"),
    Outcome.MISSED: ("cancelled", "missed", "missed"),
    Outcome.DEAD: ("cancelled", "dead", "dead"),
    Outcome.RETRY: ("cancelled", "cancelled", "retry"),
    Outcome.SNOOZE: ("cancelled", "cancelled", "snooze"),
    Outcome.RELEASE: ("cancelled", "cancelled", "release"),
    Outcome.UNSTARTED: ("cancelled", "cancelled", "unstarted"),
}


def test_every_outcome_is_among_the_ways_out() -> None:
    assert set(WAYS_OUT) == set(Outcome)


@pytest.mark.parametrize("outcome", WAYS_OUT)
async def test_a_requested_cancel_survives_every_way_out(
    conn: Connection, database: Database, settings: Settings, outcome: Outcome
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 2)
        assert await conn.fetchval("select delayq.cancel(1)") == "cancel_requested"
        for one in leases:
            at.settler.settle(Settlement(one, outcome, 60_000_000))
        await at.flushed()
        assert at.over == {1: WAYS_OUT[outcome][0], 2: WAYS_OUT[outcome][2]}
        assert await conn.fetchval("select count(*) from delayq.tasks where id = 1") == 0


@pytest.mark.parametrize("outcome", WAYS_OUT)
async def test_a_waiting_successor_starts_at_every_way_out_under_the_id_that_was_told(
    conn: Connection, database: Database, settings: Settings, outcome: Outcome
) -> None:
    async with office(conn, database, settings) as at:
        first = await conn.fetchval("select id from delayq.schedule('mail', key => 'k')")
        (one,) = await lease(at.commons, [first])
        follow_up = await conn.fetchval(
            "select follow_up from delayq.schedule("
            " 'mail', '{\"n\": 7}', delay => '1 hour', key => 'k', on_conflict => 'replace')"
        )
        at.settler.settle(Settlement(one, outcome, 60_000_000))
        await at.flushed()
        assert at.over == {first: WAYS_OUT[outcome][1]}
        row = await conn.fetchrow("select id, state, key, payload::text from delayq.tasks")
        assert row is not None
        assert tuple(row) == (follow_up, "pending", "k", '{"n": 7}')
        assert (await finals(conn))[first] == WAYS_OUT[outcome][1]
        successor = (
            "select successor from (select id, successor from delayq.task_history"
            " union all select id, successor from delayq.dead_tasks) as ended where id = $1"
        )
        assert await conn.fetchval(successor, first) == follow_up


# --- rows that a stranger holds locked --------------------------------------------------------


@asynccontextmanager
async def locked(dsn: str, *ids: int) -> AsyncIterator[None]:
    async with connected(dsn) as stranger, stranger.transaction():
        await stranger.execute("select from delayq.tasks where id = any($1) for update", ids)
        yield


async def test_a_locked_row_is_tried_again_and_holds_up_nobody(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 20)
        async with locked(dsn, 7):
            for one in leases:
                at.settler.succeeded(one)
            await at.ends(*(i for i in range(1, 21) if i != 7))
            assert 7 not in at.over
            assert len(at.settler) == 1
        await at.flushed()
        assert at.over[7] == "succeeded"
        assert at.commons.counters.leases_lost == 0
        assert (await finals(conn))[7] == "succeeded"


async def test_a_locked_row_among_thousands_costs_no_statement_about_thousands(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 2_000)
        sizes = sizes_of(at, "settle")
        async with locked(dsn, 700):
            for one in leases:
                at.settler.succeeded(one)
            await at.ends(*(i for i in range(1, 2_001) if i != 700))
            # by those of the general way, which tells the rows apart
            assert sum(sizes) >= 2_000
            assert max(sizes) <= 500
        await at.flushed()
        assert set(at.over.values()) == {"succeeded"}
        assert len(await finals(conn)) == len(at.over) == 2_000


async def test_a_row_that_is_locked_for_long_does_not_delay_one_that_was_locked_for_a_moment(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        long, brief = (await leased(conn, at))[:2]
        at.settler._waits[long.id] = 10**6  # it has waited before: a second until the next try
        async with locked(dsn, long.id):
            async with locked(dsn, brief.id):
                at.settler.succeeded(long)
                await wait_for(lambda: at.settler._locked, "the first is set aside")
                at.settler.succeeded(brief)
                await wait_for(lambda: len(at.settler._locked) == 2, "so is the second")
            began = time.monotonic()
            await at.ends(brief.id)
            assert time.monotonic() - began < 0.5
        await at.flushed()


async def test_a_lock_that_stays_is_looked_at_ever_more_seldom(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        (one, *_) = await leased(conn, at)
        tries = failing(at, "settle")
        async with locked(dsn, one.id):
            at.settler.succeeded(one)
            await asyncio.sleep(1.0)
        assert 2 <= len(tries) <= 10  # 10 ms, doubling
        await at.flushed()


# --- lost, settled already, sent twice --------------------------------------------------------


async def test_a_lease_that_somebody_else_has_by_now_is_lost_and_nothing_is_written(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        for one in await leased(conn, at):
            at.settler.succeeded(one)
            if one.id == 2:
                await conn.execute("update delayq.tasks set lease_token = 5 where id = 2")
        await at.flushed()
        assert at.over == {1: "succeeded", 2: None, 3: "succeeded"}
        assert at.commons.counters.leases_lost == 1
        assert await conn.fetchval("select state from delayq.tasks where id = 2") == "running"


async def test_a_task_that_was_settled_under_this_very_token_is_no_lost_lease(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """The effect of its attempt committed, and the answer to that was lost."""
    async with office(conn, database, settings) as at:
        one, other = (await leased(conn, at))[:2]
        for settled in (one, other):
            answer = "select delayq.settle($1, $2)"
            assert await conn.fetchval(answer, settled.id, settled.token) == "settled"
        at.settler.succeeded(one)
        at.settler.settle(Settlement(other, Outcome.RETRY, 0, '{"error": "lost answer"}'))
        await at.flushed()
        assert at.over.keys() == {1, 2}
        assert at.commons.counters.leases_lost == 0
        assert await finals(conn) == {1: "succeeded", 2: "succeeded"}


async def test_a_settlement_whose_answer_was_lost_is_sent_again_and_is_no_lost_lease(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        first, second, third = await leased(conn, at)
        failing(at, "settle_succeeded", DatabaseTimeout("no answer"), after=True)
        failing(at, "settle", DatabaseUnavailable("cut"), after=True)
        at.settler.succeeded(first)
        await at.ends(1)
        at.settler.settle(Settlement(second, Outcome.RETRY, 60_000_000, '{"error": "E"}'))
        at.settler.settle(Settlement(third, Outcome.DEAD, None, '{"error": "E"}'))
        await at.flushed()
        assert at.over.keys() == {1, 2, 3}
        assert at.commons.counters.leases_lost == 0
        row = await conn.fetchrow(
            "select state, attempt, jsonb_array_length(errors) as errors from delayq.tasks"
        )
        assert row is not None
        assert tuple(row) == ("pending", 1, 1)
        assert await finals(conn) == {1: "succeeded", 3: "dead"}


async def test_settlements_are_kept_through_an_outage(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        outage = [DatabaseUnavailable("away")] * 3
        failing(at, "settle_succeeded", *outage)
        failing(at, "settle", *outage)
        one, other, _ = await leased(conn, at)
        at.settler.succeeded(one)
        at.settler.settle(Settlement(other, Outcome.RETRY, 0, '{"error": "E"}'))
        await at.flushed()
        assert at.over == {1: "succeeded", 2: "retry"}


# --- refusals ---------------------------------------------------------------------------------


async def test_one_odd_settlement_does_not_fail_the_batch(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        for one in await leased(conn, at, 40):
            error = "no JSON at all" if one.id == 17 else '{"error": "E"}'
            at.settler.settle(Settlement(one, Outcome.RETRY, 60_000_000, error))
        await at.flushed()
        assert {i for i, verdict in at.over.items() if verdict != "retry"} == {17}
        assert at.over[17] == "dead"
        errors = json.loads(
            await conn.fetchval("select errors::text from delayq.dead_tasks where id = 17")
        )
        assert "could not be stored" in errors[-1]["message"]


async def test_a_success_that_is_refused_for_its_row_is_dead_and_the_others_succeed(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 40)
        await conn.execute("alter table delayq.task_history add check (id <> 17)")
        for one in leases:
            at.settler.succeeded(one)
        await at.flushed()
        assert {i for i, verdict in at.over.items() if verdict != "succeeded"} == {17}
        assert (await finals(conn))[17] == "dead"


def refused(state: str, constraint: str = "") -> DatabaseError:
    error = DatabaseError(f"refused (SQLSTATE {state})")
    error.sqlstate, error.constraint = state, constraint
    return error


async def test_a_settlement_that_something_else_refuses_is_kept_and_holds_up_nobody(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 40)
        mended = asyncio.Event()

        async def settle(ids: list[int], *args: Any) -> Any:
            if 17 in ids and not mended.is_set():
                raise refused("XX001")
            return await real(ids, *args)

        real = swap(at.commons.store, "settle", settle)
        for one in leases:
            at.settler.settle(Settlement(one, Outcome.DEAD, None, '{"error": "E"}'))
        await at.ends(*(i for i in range(1, 41) if i != 17))
        assert 17 not in at.over
        mended.set()
        await at.flushed()
        assert at.over[17] == "dead"
        assert not at.settler._waits
        assert not at.settler._refused


@pytest.mark.parametrize("always", [True, False])
async def test_what_cannot_be_told_apart_is_kept_and_sent_again(
    conn: Connection, database: Database, settings: Settings, always: bool
) -> None:
    """Three leases are lost; of one of them history cannot be read (for a while)."""
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 3)
        await conn.execute("update delayq.tasks set lease_token = 5")
        looks: list[int] = []

        async def tell_apart(ids: list[int], *args: Any) -> Any:
            looks.append(len(ids))
            if 2 in ids and (always or len(looks) < 8):
                raise refused("XX001")
            return await real(ids, *args)

        real = swap(at.commons.store, "tell_apart", tell_apart)
        for one in leases:
            at.settler.succeeded(one)
        await at.ends(1, 3)
        await wait_for(lambda: len(looks) > 6, "it is looked at again")
        assert len(at.settler) == 1 or not always
        if not always:
            await at.flushed()
            assert at.over == {1: None, 2: None, 3: None}


async def test_a_last_retry_whose_answer_was_lost_is_told_as_dead(
    conn: Connection, database: Database, settings: Settings, logged: list[Logged]
) -> None:
    async with office(conn, database, settings) as at:
        (one, *_) = await leased(conn, at)
        await conn.execute("update delayq.tasks set attempt_limit = 1")
        failing(at, "settle", DatabaseTimeout("no answer"), after=True)
        at.settler.settle(Settlement(one, Outcome.RETRY, 0, '{"error": "E"}'))
        await at.flushed()
        assert at.over == {1: "dead"}
        assert (at.commons.counters.dead, at.commons.counters.retried) == (1, 0)
    assert [event.level for event in logged if event.event == "task.dead"] == ["WARNING"]


async def test_if_even_the_plainest_end_is_refused_the_settler_lets_go_and_goes_on(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 5)
        await conn.execute("alter table delayq.task_history add check (id <> 2)")
        await conn.execute("alter table delayq.dead_tasks add check (id <> 2)")
        for one in leases:
            at.settler.succeeded(one)
        await at.flushed()
        assert at.over[2] is None
        # it is found as owned and not held later on
        assert await conn.fetchval("select state from delayq.tasks") == "running"


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationFailed("the password was changed"),
        PrivilegeMissing("somebody revoked it"),
        SchemaMissing("a migration is under way"),
        DatabaseError("the session settings do not take"),
    ],
)
async def test_a_refusal_that_is_no_rows_fault_ends_no_task_as_dead(
    conn: Connection, database: Database, settings: Settings, error: Exception
) -> None:
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 5)
        calls = failing(at, "settle_succeeded", *[error] * 4)
        failing(at, "settle", *[error] * 4)
        for one in leases:
            at.settler.succeeded(one)
        await at.flushed()
        assert len(calls) == 5  # all at once: halving them would find nobody to blame
        assert set(at.over.values()) == {"succeeded"}
        assert set((await finals(conn)).values()) == {"succeeded"}


# --- bounded ----------------------------------------------------------------------------------


async def test_callers_are_held_back_while_too_much_waits(
    conn: Connection, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.settler._QUEUE_LIMIT", 20)
    async with office(conn, database, settings) as at:
        leases = await leased(conn, at, 60)
        hold = asyncio.Event()

        async def held(*args: Any) -> Any:
            await hold.wait()
            return await real(*args)

        real = swap(at.commons.store, "settle_succeeded", held)
        at.settler.succeeded(leases[0])
        await asyncio.sleep(0.02)  # the first batch is on its way
        for one in leases[1:]:
            at.settler.succeeded(one)
        full = at.settler.full
        assert full
        waiting = asyncio.ensure_future(at.settler.room())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        hold.set()
        async with asyncio.timeout(5):
            await waiting
        await at.flushed()
        assert not at.settler.full
        assert len(at.over) == 60


async def test_what_waits_to_be_settled_pins_no_payload(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        await add_tasks(conn, [1, 2], after_s=-1)
        await conn.execute(
            "update delayq.tasks set priority = 3,"
            " payload = jsonb_build_object('text', repeat('x', 9000))"
        )
        one, other = await lease(at.commons, [1, 2])
        assert len(one.payload or "") > 9_000
        at.settler.succeeded(one)
        at.settler.settle(Settlement(other, Outcome.RETRY, 60_000_000, '{"error": "E"}'))
        for waiting in (one, other):
            held = gc.get_referents(waiting, waiting._row)
            assert not [part for part in held if isinstance(part, str) and len(part) > 1_000]
            assert (waiting.attempt, waiting.priority, waiting.idempotency_key) == (1, 3, None)
            assert (waiting.timeout_ms, waiting.misfire_grace_ms) == (None, None)
            assert waiting.due_us == waiting.execute_us
        await at.flushed()


async def test_flushing_waits_for_what_is_in_flight_and_for_what_is_locked(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with office(conn, database, settings) as at:
        await at.flushed()
        one, other, _ = await leased(conn, at)
        async with locked(dsn, other.id):
            at.settler.succeeded(one)
            at.settler.succeeded(other)
            flushing = asyncio.ensure_future(at.settler.flushed())
            await at.ends(1)
            await asyncio.sleep(0.05)
            assert not flushing.done()
        async with asyncio.timeout(5):
            await flushing
