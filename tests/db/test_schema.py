"""Rules of the schema that somebody will want to simplify away one day."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq.errors import InvalidSettings
from delayq.ranks import BUCKETS, bucket_of
from tests.helpers import connected, wait_for
from tests.nodes import Application, ended
from tests.rooms import ME, PEER, add_node, add_tasks, lease, make_commons, run_by

if TYPE_CHECKING:
    from delayq.database import Connection, Database
    from delayq.settings import Settings


async def test_the_clock_is_inlined_into_statements(conn: Connection) -> None:
    """With a pinned search_path it would be called for every row: a lease costs twice as much."""
    plan = await conn.fetch("explain (verbose) select delayq.clock() from generate_series(1, 3)")
    text = "\n".join(row[0] for row in plan)
    assert "clock_timestamp()" in text
    assert "delayq.clock()" not in text
    settings_of_it = "select proconfig from pg_proc where oid = 'delayq.clock()'::regprocedure"
    assert await conn.fetchval(settings_of_it) is None


async def test_all_time_in_the_schema_comes_from_its_clock(conn: Connection) -> None:
    """Frozen or local readings: now(), current_timestamp, localtimestamp and their like."""
    rows = await conn.fetch(
        "select p.proname, p.prosrc from pg_proc p"
        " where p.pronamespace = 'delayq'::regnamespace and p.proname <> 'clock'"
    )
    readings = re.compile(
        r"\b(now|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday)\s*\("
        r"|\b(current_timestamp|current_date|current_time|localtime|localtimestamp)\b",
        re.IGNORECASE,
    )
    assert [row["proname"] for row in rows if readings.search(row["prosrc"])] == []


INLINED = (
    "bucket clock errors_that_fit errors_with hint_horizon hint_line hint_text instant micros"
    " notify verdict".split()
)
"""Plain SQL that must be inlined into statements, which a SET clause forbids. Each is called by
statements of ours, or by functions that pin the path for it."""


async def test_every_other_function_pins_its_search_path_and_looks_into_temporary_things_last(
    conn: Connection,
) -> None:
    rows = await conn.fetch(
        "select p.proname as name, l.lanname as language, p.prosecdef as definer,"
        "       coalesce(p.proconfig, '{}') as settings"
        "  from pg_proc p join pg_language l on l.oid = p.prolang"
        " where p.pronamespace = 'delayq'::regnamespace order by 1"
    )
    pinned = "search_path=pg_catalog, pg_temp"
    assert [row["name"] for row in rows if pinned not in row["settings"]] == INLINED
    for row in rows:
        if row["name"] in INLINED:
            how = (row["language"], row["definer"], row["settings"])
            assert how == ("sql", False, []), row["name"]  # with the caller's own rights


async def test_no_index_knows_of_states_or_leases(conn: Connection) -> None:
    """Any index or predicate on a column that a lease changes makes it five times slower."""
    rows = await conn.fetch(
        "select indexdef from pg_indexes where schemaname = 'delayq' and tablename = 'tasks'"
    )
    indexes = [row["indexdef"] for row in rows]
    changed = (
        "state lease_owner lease_token leased_at deadline_at attempt attempt_limit"
        " cancel_requested interruptions errors"
    ).split()
    assert len(indexes) == 4
    for column in changed:
        assert not [index for index in indexes if re.search(rf"\b{column}\b", index)]


async def test_a_lease_does_not_lengthen_its_row(conn: Connection, database: Database) -> None:
    """Lease columns have defaults of full width: a row that grows may not fit its page."""
    nullable = await conn.fetch(
        "select column_name from information_schema.columns"
        " where table_schema = 'delayq' and table_name = 'tasks' and is_nullable = 'YES'"
        "   and (column_name like 'lease%' or column_name in ('deadline_at', 'attempt_limit'))"
    )
    assert nullable == []


async def test_live_tasks_are_one_plain_table_with_unique_keys(conn: Connection) -> None:
    """Partitioned by bucket it could hold neither the primary key nor the unique key."""
    kind = "select relkind from pg_class where oid = 'delayq.tasks'::regclass"
    assert await conn.fetchval(kind) == b"r"
    unique = await conn.fetch(
        "select indexdef from pg_indexes where tablename = 'tasks' and indexdef like '%UNIQUE%'"
    )
    assert any("(kind, key)" in row["indexdef"] for row in unique)


async def test_hand_written_ids_are_refused_since_they_would_collide_later(
    conn: Connection,
) -> None:
    with pytest.raises(asyncpg.GeneratedAlwaysError):
        await conn.execute("insert into delayq.tasks (id, kind) values (1, 'mail')")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("timeout_ms", "0"),
        ("timeout_ms", "252288000000000"),
        ("misfire_grace_ms", "-1"),
        ("max_attempts", "0"),
        ("max_attempts", "10001"),
        ("attempt", "-1"),
        ("priority", "101"),
        ("execute_at", "'infinity'"),
        ("execute_at", "'9000-01-01 00:00+00'"),
        ("due_at", "'-infinity'"),
        ("kind", "''"),
        ("key", "repeat('x', 501)"),
        ("state", "'done'"),
        ("state", "'running'"),
        ("lease_owner", "5"),
    ],
)
async def test_a_row_that_could_fail_a_batch_later_is_refused_when_it_is_written(
    conn: Connection, column: str, value: str
) -> None:
    columns, values = f"kind, {column}", f"'mail', {value}"
    if column == "kind":
        columns, values = column, value
    with pytest.raises(asyncpg.CheckViolationError):
        await conn.execute(f"insert into delayq.tasks ({columns}) values ({values})")


async def test_a_plain_insert_leaves_the_policy_to_the_handler(
    conn: Connection, settings: Settings
) -> None:
    """A default of 5 attempts in the table would overrule what the handler says."""
    application, runs = Application(settings), list[int]()

    @application.task(max_attempts=2)
    async def mail() -> None:
        runs.append(1)
        raise ValueError("boom")

    async with application.node():
        task_id = await conn.fetchval(
            "insert into delayq.tasks (kind) values ('mail') returning id"
        )
        over = await ended(conn, task_id)
    assert (over.state, over.attempt, len(runs)) == ("dead", 2, 2)


async def test_the_instant_that_was_asked_for_is_the_one_of_the_insert_unless_it_is_given(
    conn: Connection,
) -> None:
    await conn.execute("insert into delayq.tasks (kind) values ('mail')")
    assert await conn.fetchval("select due_at is null from delayq.tasks")


async def test_a_token_is_not_to_be_guessed_from_another_one(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    await add_tasks(conn, [1, 2, 3], after_s=-1)
    tokens = [one.token for one in await lease(commons, [1, 2, 3], nonce=123_456_789)]
    gaps = {abs(a - b) for a in tokens for b in tokens if a != b}
    assert min(gaps) > 2**32
    assert all(token != 0 for token in tokens)
    await commons.store.aclose()


# --- hints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["retry", "snooze", "release", "unstarted"])
async def test_whatever_goes_back_within_the_horizon_is_hinted_with_its_priority(
    conn: Connection, dsn: str, database: Database, settings: Settings, outcome: str
) -> None:
    """Its owner may be another node, which would find it a sweep later."""
    heard: list[str] = []
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    await add_tasks(conn, [1, 2], after_s=-1, priority=9)
    leases = {one.id: one for one in await lease(commons, [1, 2])}
    async with connected(dsn) as listening:
        await listening.add_listener("delayq", lambda *args: heard.append(str(args[3])))
        for task_id, delay_us in ((1, 5_000_000), (2, 3_600_000_000)):
            token = leases[task_id].token
            await commons.store.settle([task_id], [token], [0], [outcome], [delay_us], [None], 5)
        await conn.execute("select pg_notify('delayq', 'the end')")
        await wait_for(lambda: "the end" in heard, "everything was heard")
    at_us = await conn.fetchval("select delayq.micros(execute_at) from delayq.tasks where id = 1")
    assert heard == [f"due\n1:{at_us}:9:mail", "the end"]
    await commons.store.aclose()


async def test_an_adopted_task_is_hinted(conn: Connection, dsn: str) -> None:
    heard: list[str] = []
    await run_by(conn, PEER, [1])
    async with connected(dsn) as listening:
        await listening.add_listener("delayq", lambda *args: heard.append(str(args[3])))
        await conn.execute("select * from delayq.adopt(array[1]::bigint[], 0)")
        await wait_for(lambda: heard, "the hint")
    assert heard[0].startswith("due\n1:")


async def test_a_node_that_would_sweep_too_slowly_for_the_hints_does_not_start(
    conn: Connection, settings: Settings
) -> None:
    """Tasks between its own horizon and that of the hints would be found by nobody in time."""
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    with pytest.raises(InvalidSettings, match="DELAYQ_SWEEP_INTERVAL_S must be at most 10"):
        await application.node(sweep_interval_s=10.1, horizon_s=60.0).start()
    async with application.node(sweep_interval_s=10.0, horizon_s=60.0):
        pass


# --- history -----------------------------------------------------------------------------------


async def test_history_keeps_the_token_so_that_settled_and_lost_can_be_told_apart(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    await add_tasks(conn, [1, 2, 3, 4], after_s=-1)
    tokens = {one.id: one.token for one in await lease(commons, [1, 2, 3, 4])}
    await commons.store.settle_succeeded([1], [tokens[1]], [0])
    await commons.store.settle([2], [tokens[2]], [0], ["dead"], [None], [None], 5)
    await conn.execute("update delayq.tasks set lease_token = 5 where id = 3")
    found = await commons.store.tell_apart(list(tokens), list(tokens.values()))
    assert found == {1: "succeeded", 2: "dead", 3: "lost", 4: "running"}
    stale = await commons.store.tell_apart([1], [tokens[1] + 1])
    assert stale == {1: "lost"}
    await commons.store.aclose()


async def test_errors_are_kept_a_few_at_the_most_and_the_last_ones(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    await add_tasks(conn, [1], after_s=-1)
    for number in range(8):
        (one,) = await lease(commons, [1], nonce=number + 1, max_attempts=[100])
        error = json.dumps({"n": number})
        await commons.store.settle([1], [one.token], [0], ["retry"], [0], [error], 5)
    errors: list[Any] = json.loads(await conn.fetchval("select errors::text from delayq.tasks"))
    assert [error["n"] for error in errors] == [3, 4, 5, 6, 7]
    await commons.store.aclose()


async def test_a_node_and_the_database_put_a_task_into_the_same_bucket(conn: Connection) -> None:
    """A node that reckons otherwise would stand by for what it owns, or leave it to nobody."""
    ids = [*range(1, 2_000), 2**31, 2**53 + 1, 2**63 - 1]
    ids += [random.getrandbits(62) + 1 for _ in range(2_000)]
    found = await conn.fetch("select delayq.bucket(id) from unnest($1::bigint[]) as id", ids)
    buckets = [row[0] for row in found]
    assert buckets == [bucket_of(task_id) for task_id in ids]
    assert set(buckets) == set(range(BUCKETS))
