"""Rows that somebody wrote by hand, with odd values in every column.

Each is refused by the table, runs like any other, or is set aside as dead with a reason. None of
them stops a node, and what falls due in the same batch fires on time.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq.statements import statement
from tests.helpers import wait_for
from tests.nodes import (
    Application,
    all_ended,
    ended,
    eventually,
    life,
    schedule,
    stopped_at_once,
)
from tests.process.crew import bare_timer
from tests.rooms import PEER, add_node

if TYPE_CHECKING:
    from delayq.context import Context
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

MARKER = "Odd-77c2"
LATE_S = 2.0
"""For a noisy machine, after what its timers are late by; in calm it is milliseconds."""

INSTANTS = [
    "infinity", "-infinity", "1999-12-31 23:59:59.999999+00", "2000-01-01 00:00+00",
    "8999-12-31 23:59:59.999999+00", "9000-01-01 00:00+00", "12000-01-01 00:00+00",
    "294276-12-31 23:59:59.999999+00", "4713-01-01 00:00+00 BC", "0001-01-01 00:00+00",
]  # fmt: skip
BIGINTS = [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]
INTEGERS = [0, 1, -1, 9_999, 10_001, 2**31 - 2, 2**31 - 1, -(2**31)]
SMALLINTS = [0, -100, 100, -101, 101, 2**15 - 1, -(2**15)]
NAMES = ["", " ", "a:b", "x" * 500, "x" * 501, "\n", "\x1b[31m", "é" * 250, "é" * 251, "\ufffe",
         "{}", "null", "\\u0000"]  # fmt: skip
JSONS = [
    "null", "0", "1e400", "1e-300", "-0", '""', '"x"', "[]", "{}", "[null]", '{"a": 1}', "true",
    '{"": ""}', "[" * 2_000 + "]" * 2_000, "9" * 5_000, json.dumps("x" * 70_000),
    json.dumps({"n": MARKER}), '{"id": 1}', '{"id": "x"}', '{"id": null}', '{"id": 1e30}',
    '{"message": 5}', '[{"attempt": [], "error": {}, "message": null}]', "[1e400]",
    json.dumps([{"message": "x" * 260_000}]),
]  # fmt: skip
ODD: dict[str, list[Any]] = {
    "id": [n for n in BIGINTS if n >= 0],  # the others have a test of their own
    "payload": JSONS,
    "headers": JSONS,
    "errors": JSONS,
    "key": NAMES,
    "idempotency_key": NAMES,
    "priority": SMALLINTS,
    "due_at": INSTANTS,
    "execute_at": INSTANTS,
    "leased_at": INSTANTS,
    "deadline_at": INSTANTS,
    "created_at": INSTANTS,
    "misfire_grace_ms": [*BIGINTS, 31_622_400_000, 31_622_400_001],
    "timeout_ms": [*BIGINTS, 31_622_400_000, 31_622_400_001],
    "max_attempts": [n for n in INTEGERS if n != 9_999],  # would be tried as often
    "attempt": INTEGERS,
    "interruptions": INTEGERS,
    "attempt_limit": INTEGERS,
    "cancel_requested": [True],
    "state": ["running", "dead", "", "PENDING", "held by a newer version"],
    "lease_owner": BIGINTS,
    "lease_token": BIGINTS,
}
TYPES = {
    **dict.fromkeys(
        ("id", "misfire_grace_ms", "timeout_ms", "lease_owner", "lease_token"), "bigint"),
    **dict.fromkeys(("max_attempts", "attempt", "interruptions", "attempt_limit"), "integer"),
    **dict.fromkeys(("payload", "headers", "errors", "next"), "jsonb"),
    **dict.fromkeys(("due_at", "execute_at", "leased_at", "deadline_at", "created_at"),
                    "timestamptz"),
    "priority": "smallint",
    "cancel_requested": "boolean",
}  # fmt: skip
REFUSED = (
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.DataError,
    asyncpg.ProgramLimitExceededError,  # of an index: a key that is too long for it
)
FAR = "8999-12-31 23:59:59.999999+00"
"""The only odd instant that is neither refused nor due."""


@pytest.fixture
def app(settings: Settings) -> Application:
    app = Application(settings)

    @app.task(max_attempts=2)
    async def odd(ctx: Context) -> None:
        """Reads everything that a handler may read."""
        _ = (ctx.headers, ctx.due_at, ctx.execute_at, ctx.deadline, ctx.idempotency_key,
             ctx.lease_token, ctx.attempt)  # fmt: skip

    @app.task
    async def healthy() -> None:
        pass

    return app


async def by_hand(conn: Connection, **columns: Any) -> int | None:
    """Insert a row; None if the table refuses it."""
    names = ", ".join(columns)
    casts = ", ".join(
        f"${n}::text::{TYPES.get(name, 'text')}" for n, name in enumerate(columns, start=1)
    )
    try:
        found = await conn.fetchval(
            f"insert into delayq.tasks ({names}) overriding system value values ({casts})"
            " returning id",
            *(str(value) for value in columns.values()),
        )
    except REFUSED:
        return None
    return int(found)


LATER = "2900-01-01 00:00+00"


async def come_due(conn: Connection, seconds: float) -> str:
    """Those that wait for LATER are due in a while: writing many takes longer than that."""
    at = await due_in(conn, seconds)
    await conn.execute(
        "update delayq.tasks set execute_at = $1::text::timestamptz"
        " where execute_at = $2::text::timestamptz",
        at,
        LATER,
    )
    return at


async def due_in(conn: Connection, seconds: float) -> str:
    sql = "select (delayq.clock() + $1::float8 * interval '1 s')::text"
    return str(await conn.fetchval(sql, seconds))


async def healthy(conn: Connection, count: int, at: str) -> list[int]:
    rows = await conn.fetch(
        "insert into delayq.tasks (kind, execute_at) select 'healthy', $1::text::timestamptz"
        " from generate_series(1, $2::int) returning id",
        at,
        count,
    )
    return [row["id"] for row in rows]


async def none_left(conn: Connection) -> bool:
    left = await conn.fetchval(
        "select count(*) from delayq.tasks where execute_at <> $1::text::timestamptz", FAR
    )
    return not left


async def each_has_an_end(conn: Connection, ids: set[int]) -> None:
    """Every one is in exactly one place, and the dead ones say why."""
    rows = await conn.fetch(
        """
        select id, state, true as told from delayq.task_history where id = any($1::bigint[])
        union all select id, 'dead', jsonb_path_exists(errors, '$[last].message')
          from delayq.dead_tasks where id = any($1::bigint[])
        union all select id, 'far', true from delayq.tasks where id = any($1::bigint[])
        """,
        list(ids),
    )
    assert sorted(row["id"] for row in rows) == sorted(ids)
    assert all(row["told"] for row in rows)


def nothing_broke(logged: list[Logged]) -> None:
    broken = ("job.crashed", "job.failed", "worker.crashed", "task.set_aside_failed")
    assert not [event for event in logged if event.event in broken or event.level == "CRITICAL"]
    assert not [event for event in logged if MARKER in event.text]


async def runs_and_ends(
    app: Application, conn: Connection, taken: set[int], said: str = ""
) -> None:
    """The healthy ones on time, all the others somehow, and the node is what it was."""
    others = await healthy(conn, 300, await come_due(conn, 0.9))
    async with app.node() as node, bare_timer() as bare:
        before, active_us = node.id, await conn.fetchval("select delayq.micros(delayq.clock())")
        ends = await all_ended(conn, others)
        await eventually(lambda: none_left(conn), f"no odd row is left {said}")
        await each_has_an_end(conn, taken)
        assert node.id == before
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    late_us = [(end.started_us or 0) - max(end.execute_us, active_us) for end in ends.values()]
    assert max(late_us) < LATE_S * 1e6 + max(bare), said


# --- live tasks -------------------------------------------------------------------------------


async def test_every_odd_value_is_refused_or_ends_and_the_others_fire_on_time(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    """C014."""
    taken = set()
    for column, values in ODD.items():
        for value in values:
            made = await by_hand(conn, **({"kind": "odd", "execute_at": LATER} | {column: value}))
            taken |= {made} if made is not None else set()
    assert len(taken) > 100
    await runs_and_ends(app, conn, taken)
    nothing_broke(logged)


async def test_rows_that_are_odd_in_many_ways_at_once_stop_nothing(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    taken = set()
    for _ in range(700):
        columns = {"kind": "odd", "execute_at": LATER}
        columns |= {name: dice.choice(ODD[name]) for name in dice.sample(sorted(ODD), 3)}
        made = await by_hand(conn, **columns)
        taken |= {made} if made is not None else set()
    assert len(taken) > 30, f"seed {seed}"
    await runs_and_ends(app, conn, taken, f"seed {seed}")
    nothing_broke(logged)


LEASED: dict[str, list[Any]] = {
    "lease_owner": BIGINTS[1:],
    "lease_token": BIGINTS[1:],
    "attempt": [1, 9_999, 2**31 - 1],
    **{name: ODD[name] for name in ("leased_at", "deadline_at", "attempt_limit", "interruptions",
                                    "cancel_requested", "errors", "headers")},
}  # fmt: skip


async def test_rows_that_say_they_run_are_taken_in_whatever_they_say(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    await add_node(conn, PEER, "dead")
    running = {"state": "running", "attempt": 1, "lease_token": 7}
    taken = set()
    for column, values in LEASED.items():
        for value in values:
            odd = {"lease_owner": dice.choice([PEER, 404]), column: value}
            made = await by_hand(conn, kind="odd", execute_at=LATER, **(running | odd))
            taken |= {made} if made is not None else set()
    assert len(taken) > 50
    await runs_and_ends(app, conn, taken, f"seed {seed}")
    nothing_broke(logged)


async def test_a_row_that_names_this_very_node_as_its_owner_is_let_go_and_runs(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    async with app.node() as node:
        await conn.execute("set delayq.hints = off")
        rows = [
            await by_hand(conn, kind="odd", state="running", attempt=1, lease_token=token,
                          lease_owner=node.id, attempt_limit=5)
            for token in BIGINTS[1:]
        ]  # fmt: skip
        for _ in range(2):
            await life(node)._orphans.check()
        ends = await all_ended(conn, [row for row in rows if row is not None])
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    nothing_broke(logged)


async def test_a_counter_at_its_end_keeps_no_node_from_leaving(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    """The shutdown counts an interruption more, and the column has no room for it."""
    started = asyncio.Event()

    @app.task
    async def long() -> None:
        started.set()
        await asyncio.sleep(3600)

    full = await by_hand(conn, kind="long", interruptions=2**31 - 1)
    plain = await by_hand(conn, kind="long")
    assert full is not None
    async with stopped_at_once(app.node()) as node:
        await wait_for(lambda: len(life(node)._executor.running) == 2, "both run")
    end = await ended(conn, full)
    assert (end.state, len(end.errors)) == ("dead", 1)
    assert "out of range" in end.errors[0]["message"]
    rows = await conn.fetch("select id, state, interruptions from delayq.tasks")
    assert [tuple(row) for row in rows] == [(plain, "pending", 1)]
    nothing_broke(logged)


@pytest.mark.parametrize("when", ["before it starts", "while it runs"])
async def test_an_id_below_zero_stops_no_node(
    app: Application, conn: Connection, logged: list[Logged], when: str
) -> None:
    at = await due_in(conn, 1)
    if when == "before it starts":
        await by_hand(conn, id=-5, kind="odd", execute_at=at)
    async with app.node():
        if when == "while it runs":
            await conn.execute("set delayq.hints = off")
            await by_hand(conn, id=-5, kind="odd", execute_at=at)
        ends = await all_ended(conn, await healthy(conn, 20, at), 5)
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    nothing_broke(logged)


# Everything but an order for a successor: its id, payload, headers, instant and priority.
NO_ORDERS = [
    "null", "[]", "{}", "7", '{"id": 1}', '{"id": null}',
    json.dumps({"id": 5, "payload": {}, "headers": {}, "priority": 0, "execute_at_us": 0,
                "created_at_us": 0}),
]  # fmt: skip


async def test_a_task_whose_successor_is_nonsense_is_refused_or_ends_as_dead_with_a_reason(
    app: Application, conn: Connection
) -> None:
    at = await due_in(conn, 1)
    taken = [await by_hand(conn, kind="odd", execute_at=at, next=text) for text in NO_ORDERS]
    async with app.node() as node:
        await all_ended(conn, await healthy(conn, 20, at))
        for _ in range(2):
            await life(node)._orphans.check()
        ends = await all_ended(conn, [made for made in taken if made is not None], 3)
    assert all(end.errors for end in ends.values() if end.state == "dead")


async def test_a_crashed_task_whose_successor_is_nonsense_does_not_stay_running_for_ever(
    app: Application, conn: Connection
) -> None:
    await add_node(conn, PEER, "dead")
    taken = [
        await by_hand(conn, kind="odd", state="running", attempt=1, lease_token=7,
                      lease_owner=PEER, attempt_limit=5, next=text)
        for text in NO_ORDERS
    ]  # fmt: skip
    plain = await by_hand(conn, kind="odd", state="running", attempt=1, lease_token=7,
                          lease_owner=PEER, attempt_limit=5)  # fmt: skip
    assert plain is not None
    async with app.node() as node:
        assert (await ended(conn, plain)).state == "succeeded"
        await all_ended(conn, [made for made in taken if made is not None], 3)
        await life(node)._orphans.check()  # finds nothing of it any more
        assert not await conn.fetchval("select count(*) from delayq.nodes where state = 'dead'")


# --- the other tables ---------------------------------------------------------------------------

NODES: dict[str, list[str]] = {
    "id": ["1", "-1", str(2**63 - 1), str(-(2**63))],
    "name": ["", "\x1b[31m", "x" * 10_000, MARKER],
    "host": [""],
    "pid": ["-1", str(2**31 - 1)],
    "version": ["", "99.0"],
    "kinds": ["{}", "{NULL}", '{""}', "{odd,NULL,healthy}", "{" + "x" * 1_000 + "}"],
    "state": ["joining", "active", "draining", "dead"],
    "started_at": INSTANTS,
    "expires_at": INSTANTS,
    "ttl_ms": ["0", "-1", str(2**63 - 1), str(-(2**63))],
    "counters": ["null", "[]", '{"succeeded": "x"}', '{"succeeded": -1e400}'],
}
NODE = {"id": "12345", "name": "n", "host": "h", "pid": "1", "version": "1", "kinds": "{other}",
        "state": "active", "expires_at": "2030-01-01 00:00+00"}  # fmt: skip
NODE_TYPES = {"id": "bigint", "pid": "integer", "kinds": "text[]", "started_at": "timestamptz",
              "expires_at": "timestamptz", "ttl_ms": "bigint", "counters": "jsonb"}  # fmt: skip


async def node_by_hand(conn: Connection, **columns: str) -> None:
    row = NODE | columns
    values = ", ".join(
        f"${n}::text::{NODE_TYPES.get(name, 'text')}" for n, name in enumerate(row, start=1)
    )
    names = ", ".join(row)
    await conn.execute(f"insert into delayq.nodes ({names}) values ({values})", *row.values())


async def _beats_on(conn: Connection, node: int | None) -> None:
    seen = await conn.fetchval("select expires_at from delayq.nodes where id = $1", node)

    async def again() -> bool:
        sql = "select expires_at > $2 from delayq.nodes where id = $1"
        return bool(await conn.fetchval(sql, node, seen))

    await eventually(again, "it beats", 4)


async def test_odd_rows_of_nodes_stop_no_beat_and_no_task(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    async with app.node() as node:
        for column, values in NODES.items():
            for n, value in enumerate(values):
                own_id = {} if column == "id" else {"id": str(hash((column, n)) or 1)}
                await node_by_hand(conn, **own_id, **{column: value})
        await _beats_on(conn, node.id)
        await _beats_on(conn, node.id)
        # some of them seem to serve it: this node stands by for those, or steals from them
        ends = await all_ended(conn, await healthy(conn, 50, await due_in(conn, 0.2)))
        assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert not [event for event in logged if event.event in ("beat.failed", "beat.ended")]
    nothing_broke(logged)


async def test_a_node_whose_kinds_are_a_table_is_refused(conn: Connection) -> None:
    """Every beat of every node reads it."""
    with pytest.raises(asyncpg.CheckViolationError, match="nodes_kinds_check"):
        await node_by_hand(conn, kinds="{{odd},{healthy}}")


async def test_an_odd_row_of_a_kind_pauses_nothing_else(app: Application, conn: Connection) -> None:
    for name in NAMES:
        try:
            await conn.execute("insert into delayq.kinds (kind, paused) values ($1, true)", name)
        except REFUSED:
            continue
    await conn.execute("update delayq.kinds set updated_at = 'infinity'")
    async with app.node():
        end = await ended(conn, await schedule(conn, "healthy"))
    assert (end.state, end.attempt) == ("succeeded", 1)


async def test_an_odd_row_of_an_idempotency_key_is_told_and_pruned_like_others(
    conn: Connection,
) -> None:
    for n, (task_id, at) in enumerate(zip(BIGINTS * 2, INSTANTS, strict=False)):
        await conn.execute(
            "insert into delayq.idempotency values ('odd', $1, $2, $3::text::timestamptz,"
            " $3::text::timestamptz, $3::text::timestamptz)",
            str(n), task_id, at,
        )  # fmt: skip
        row = await conn.fetchrow("select * from delayq.schedule('odd', idempotency_key => $1)",
                                  str(n))  # fmt: skip
        assert row is not None
        assert (row["id"], row["created"], row["state"]) == (task_id, False, None)
    await conn.fetch(statement("prune_idempotency"), 30, "", "", 1_000)
    left = await conn.fetch("select ended_at::text as at from delayq.idempotency")
    assert {row["at"] for row in left} == {
        "infinity", "8999-12-31 23:59:59.999999+00", "9000-01-01 00:00:00+00",
        "12000-01-01 00:00:00+00", "294276-12-31 23:59:59.999999+00",
    }  # fmt: skip


@pytest.mark.parametrize("isolation", ["read_committed", "serializable"])
@pytest.mark.parametrize("task_id", [0, -5, -(2**63)])
async def test_an_id_that_no_task_can_have_is_not_found_at_every_level(
    conn: Connection, task_id: int, isolation: Any
) -> None:
    for verb in ("cancel($1)", "run_now($1)", "revive($1)", "discard($1)"):
        async with conn.transaction(isolation=isolation):
            assert await conn.fetchval(f"select delayq.{verb}", task_id) == "not_found"
