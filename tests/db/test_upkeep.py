"""What keeps the tables small: partitions by day, retention, and what must never be pruned."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from delayq.upkeep import Upkeep
from tests.helpers import advance_clock, connected, wait_for, wait_until_blocked
from tests.nodes import Application, ended, eventually, life, schedule
from tests.rooms import ME, add_node, add_tasks, lease, make_commons, swap

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.database import Connection, Database
    from delayq.settings import Settings
    from delayq.store import Store

DAY_S = 86_400.0


@pytest.fixture
async def commons(
    conn: Connection, database: Database, settings: Settings
) -> AsyncIterator[Commons]:
    await add_node(conn, ME, expires_s=10**9)
    commons = await make_commons(database, settings)
    yield commons
    await commons.store.aclose()


@pytest.fixture
def store(commons: Commons) -> Store:
    return commons.store


OLD_KEYS = """
    insert into delayq.idempotency (kind, idempotency_key, task_id, scheduled_at, ended_at)
    select 'mail', lpad(i::text, 5, '0'), -i, '2001-01-01 00:00+00',
           case when i % 2 = 0 then timestamptz '2002-01-01 00:00+00' end
      from generate_series(1, $1::int) as i
"""
_next_id = iter(range(1, 10**9))


async def settle(conn: Connection, commons: Commons, count: int = 1) -> list[int]:
    """Run so many tasks to their end, today."""
    ids = await add_tasks(conn, [next(_next_id) for _ in range(count)], after_s=-1)
    leases = await lease(commons, ids)
    tokens = {one.id: one.token for one in leases}
    assert await commons.store.settle_succeeded(
        list(tokens), list(tokens.values()), [0] * len(tokens)
    ) == count  # fmt: skip
    return ids


async def partitions(conn: Connection) -> list[str]:
    return [row["relname"] for row in await conn.fetch(
        "select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid"
        " where i.inhparent = 'delayq.task_history'::regclass order by 1")]  # fmt: skip


async def home_of(conn: Connection, task_id: int) -> str | None:
    """The partition that a finished task lies in."""
    where = "select tableoid::regclass::text from delayq.task_history where id = $1"
    found: str | None = await conn.fetchval(where, task_id)
    return None if found is None else found.removeprefix("delayq.")


async def today(conn: Connection) -> str:
    name = "select to_char(delayq.clock() at time zone 'UTC', 'YYYYMMDD')"
    return f"task_history_{await conn.fetchval(name)}"


@asynccontextmanager
async def reading(dsn: str, table: str, where: str = "true") -> AsyncIterator[None]:
    """Somebody (a dump, a report) who reads a table in a transaction that stays open."""
    async with connected(dsn) as reader, reader.transaction():
        await reader.fetch(f"select * from delayq.{table} where {where}")
        yield


# --- made ahead -------------------------------------------------------------------------------


async def test_partitions_are_made_a_week_ahead_and_only_once(
    conn: Connection, store: Store
) -> None:
    assert Counter(await store.make_partitions(7)) == {"there": 8}
    await advance_clock(conn, 3 * DAY_S)
    assert Counter(await store.make_partitions(7)) == {"there": 5, "made": 3}
    assert len(await partitions(conn)) == 8 + 3 + 1


async def test_a_task_is_filed_under_the_utc_day_it_finished_whatever_the_zone_of_the_session(
    conn: Connection, commons: Commons
) -> None:
    name = await conn.fetchval("select current_database()")
    await conn.execute(f"alter database \"{name}\" set timezone = 'Pacific/Kiritimati'")
    await advance_clock(conn, 40 * DAY_S)
    async with connected(commons.settings.dsn.get_secret_value()) as kiritimati:  # type: ignore[union-attr]  # tests have a DSN
        assert await kiritimati.fetchval("show timezone") == "Pacific/Kiritimati"
        await kiritimati.fetch("select * from delayq.make_partitions(2)")
    assert Counter(await commons.store.make_partitions(2)) == {"there": 3}
    (task_id,) = await settle(conn, commons)
    assert await home_of(conn, task_id) == await today(conn)


async def test_whoever_reads_the_history_delays_a_new_partition_and_no_settlement(
    conn: Connection, dsn: str, commons: Commons
) -> None:
    await advance_clock(conn, 2 * DAY_S)
    async with reading(dsn, "task_history"):
        making = asyncio.ensure_future(commons.store.make_partitions(7))
        began = time.monotonic()
        await settle_through(conn, commons, making)
        assert Counter(await making) == {"there": 6, "locked": 2}
        assert time.monotonic() - began < 5
    assert Counter(await commons.store.make_partitions(7)) == {"there": 6, "made": 2}


async def settle_through(
    conn: Connection, commons: Commons, making: asyncio.Future[list[str]]
) -> None:
    """Settle while partitions are made on another connection; none of it waits for long."""
    async with connected(commons.settings.dsn.get_secret_value()) as other:  # type: ignore[union-attr]  # tests have a DSN
        await other.execute("set lock_timeout = '1s'")
        while True:
            (task_id,) = await add_tasks(conn, [next(_next_id)], after_s=-1)
            (one,) = await lease(commons, [task_id])
            settled = "select delayq.settle($1, $2)"
            assert await other.fetchval(settled, one.id, one.token) == "settled"
            if making.done():
                return


async def test_two_nodes_that_make_partitions_at_once_do_not_fail(
    conn: Connection, database: Database, settings: Settings, store: Store
) -> None:
    await advance_clock(conn, 20 * DAY_S)
    other = await make_commons(database, settings, 99)
    for _ in range(3):
        answers = await asyncio.gather(store.make_partitions(7), other.store.make_partitions(7))
        assert {*answers[0], *answers[1]} <= {"made", "there", "locked"}
    assert set(await store.make_partitions(7)) == {"there"}
    await other.store.aclose()


async def test_a_deadlock_over_a_partition_is_a_lock_that_was_not_to_be_had(
    conn: Connection, dsn: str
) -> None:
    await advance_clock(conn, 20 * DAY_S)
    async with connected(dsn) as stranger, connected(dsn) as node:
        mine, theirs = node.transaction(), stranger.transaction()
        await theirs.start()
        await stranger.execute("lock table delayq.task_history in access exclusive mode")
        await mine.start()
        await node.execute("set local deadlock_timeout = '1ms'; lock table delayq.kinds")
        crossing = asyncio.ensure_future(stranger.execute("lock table delayq.kinds"))
        await wait_until_blocked(conn, "lock table")
        rows = await node.fetch("select answer from delayq.make_partitions(1)")
        assert {row["answer"] for row in rows} == {"locked"}
        await mine.commit()
        await crossing
        await theirs.rollback()


# --- the net ----------------------------------------------------------------------------------


async def test_without_a_partition_the_default_one_takes_the_row_and_other_days_can_be_made(
    conn: Connection, commons: Commons
) -> None:
    """A system that slept for a month and settles before it looks after its partitions."""
    await advance_clock(conn, 30 * DAY_S)
    (task_id,) = await settle(conn, commons)
    assert await home_of(conn, task_id) == "task_history_default"
    assert Counter(await commons.store.make_partitions(7)) == {"refused": 1, "made": 7}
    (task_id,) = await settle(conn, commons)  # today still falls into the net
    assert await home_of(conn, task_id) == "task_history_default"
    await advance_clock(conn, DAY_S)
    (task_id,) = await settle(conn, commons)
    assert await home_of(conn, task_id) == await today(conn)


async def test_a_node_settles_on_a_day_for_which_it_could_make_no_partition(
    conn: Connection, settings: Settings
) -> None:
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    async with application.node():
        await advance_clock(conn, 30 * DAY_S)
        over = await ended(conn, await schedule(conn, "mail"))
    assert over.state == "succeeded"
    assert await home_of(conn, over.id) == "task_history_default"


async def test_a_node_makes_partitions_before_its_first_settlement(
    conn: Connection, settings: Settings
) -> None:
    await advance_clock(conn, 30 * DAY_S)
    await add_tasks(conn, [1], after_s=-1)
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    async with application.node():
        await eventually(lambda: home_of(conn, 1), "the task is over")
    assert await home_of(conn, 1) == await today(conn)


async def test_the_net_is_emptied_by_age_one_batch_at_a_time(
    conn: Connection, commons: Commons
) -> None:
    await advance_clock(conn, 30 * DAY_S)
    old = await settle(conn, commons, 25)
    await advance_clock(conn, 8 * DAY_S)
    (young,) = await settle(conn, commons)
    assert await commons.store.prune_default(7, 10)
    left = "select count(*) from delayq.task_history_default where id = any($1)"
    assert await conn.fetchval(left, old) == 15
    assert await commons.store.prune_default(7, 10)
    assert not await commons.store.prune_default(7, 10)
    assert await conn.fetchval(left, old) == 0
    assert await home_of(conn, young) == "task_history_default"


# --- past retention ---------------------------------------------------------------------------


async def test_days_past_retention_are_dropped_and_the_others_kept(
    conn: Connection, commons: Commons
) -> None:
    """C083."""
    (old,) = await settle(conn, commons)
    day = await today(conn)
    await advance_clock(conn, 5 * DAY_S)
    (young,) = await settle(conn, commons)
    assert await commons.store.drop_partitions(7) == []
    await advance_clock(conn, 3 * DAY_S)
    assert await commons.store.drop_partitions(7) == ["dropped"]
    assert day not in await partitions(conn)
    assert await home_of(conn, old) is None
    assert await home_of(conn, young) is not None


async def test_a_day_that_somebody_reads_is_left_for_the_next_time_and_no_settlement_waits(
    conn: Connection, dsn: str, commons: Commons
) -> None:
    (old,) = await settle(conn, commons)
    await advance_clock(conn, 6 * DAY_S)
    await commons.store.make_partitions(7)
    await advance_clock(conn, 2 * DAY_S)
    async with reading(dsn, "task_history"):
        dropping = asyncio.ensure_future(commons.store.drop_partitions(7))
        await settle_through(conn, commons, dropping)
        assert await dropping == ["locked"]
        assert await home_of(conn, old) is not None
    assert await commons.store.drop_partitions(7) == ["dropped"]


async def test_a_day_that_cannot_be_dropped_is_emptied_at_least(
    conn: Connection, dsn: str, commons: Commons
) -> None:
    """Emptying locks the leaf only; whoever reads another day holds the parent."""
    (old,) = await settle(conn, commons)
    await advance_clock(conn, 8 * DAY_S)
    await commons.store.make_partitions(7)
    recent = "finished_at >= '{}'".format(
        await conn.fetchval("select (delayq.clock() - interval '1 day')::text")
    )
    async with reading(dsn, "task_history", recent):
        assert await commons.store.drop_partitions(7) == ["emptied"]
        assert await home_of(conn, old) is None
    assert await commons.store.drop_partitions(7) == ["dropped"]


async def test_two_nodes_that_drop_the_same_days_at_once_do_not_fail(
    conn: Connection, database: Database, settings: Settings, store: Store
) -> None:
    other = await make_commons(database, settings, 99)
    await store.make_partitions(40)
    await advance_clock(conn, 60 * DAY_S)
    for _ in range(3):
        answers = await asyncio.gather(store.drop_partitions(7), other.store.drop_partitions(7))
        assert {*answers[0], *answers[1]} <= {"dropped", "locked", "emptied"}
    assert await store.drop_partitions(7) == []
    assert await partitions(conn) == ["task_history_default"]
    await other.store.aclose()


async def test_no_live_and_no_dead_task_is_ever_dropped_by_age(
    conn: Connection, commons: Commons
) -> None:
    """C083. Further ahead than any retention, in retry-wait, running, dead; and long ago."""
    await add_tasks(conn, [1_000_001], after_s=60 * DAY_S)
    await add_tasks(conn, [1_000_002], after_s=120)
    await add_tasks(conn, [1_000_003, 1_000_004], after_s=-1)
    leases = await lease(commons, [1_000_003, 1_000_004])
    dead = next(one for one in leases if one.id == 1_000_004)
    await commons.store.settle([dead.id], [dead.token], [0], ["dead"], [None], [None], 5)
    await conn.execute("update delayq.tasks set attempt = 1 where id = 1000002")
    await conn.execute("update delayq.tasks set created_at = '2001-01-01 00:00+00'")
    await settle(conn, commons)
    await advance_clock(conn, 50 * DAY_S)
    for _ in range(3):
        await commons.store.make_partitions(7)
        await commons.store.drop_partitions(1)
        await commons.store.prune_default(1, 10)
        await commons.store.prune_idempotency(1, ("", ""), 10)
    assert await conn.fetchval("select count(*) from delayq.tasks") == 3
    assert await conn.fetchval("select count(*) from delayq.dead_tasks") == 1
    assert await conn.fetchval("select count(*) from delayq.task_history") == 0


# --- idempotency keys -------------------------------------------------------------------------


async def ask(conn: Connection, key: str, delay: str = "0") -> tuple[int, bool]:
    """Schedule under an idempotency key: the id, and whether it is a new task."""
    row = await conn.fetchrow(
        "select id, created from delayq.schedule('mail', delay => $2::text::interval,"
        " idempotency_key => $1)",
        key,
        delay,
    )
    assert row is not None
    return row["id"], row["created"]


async def prune(store: Store, times: int = 2, days: int = 30) -> None:
    for _ in range(times):
        assert await store.prune_idempotency(days, ("", ""), 1_000) is None


async def remembered(conn: Connection) -> set[str]:
    rows = await conn.fetch("select idempotency_key from delayq.idempotency")
    return {row["idempotency_key"] for row in rows}


async def test_an_idempotency_key_lives_as_long_as_its_task_and_a_retention_longer(
    conn: Connection, commons: Commons
) -> None:
    """60 days ahead, with 30 days of retention: the same request must find the same task."""
    task_id, created = await ask(conn, "k", "60 days")
    assert created
    for _ in range(6):
        await advance_clock(conn, 9.5 * DAY_S)
        await prune(commons.store)
        assert await ask(conn, "k") == (task_id, False)
    await advance_clock(conn, 4 * DAY_S)
    (one,) = await lease(commons, [task_id])
    assert await commons.store.settle_succeeded([one.id], [one.token], [0]) == 1
    await prune(commons.store)  # notices the end: the retention counts from here
    await advance_clock(conn, 29 * DAY_S)
    await prune(commons.store)
    assert await ask(conn, "k") == (task_id, False)
    await advance_clock(conn, 2 * DAY_S)
    await prune(commons.store)
    again, created = await ask(conn, "k")
    assert created
    assert again != task_id


async def test_a_dead_task_keeps_its_idempotency_key_until_it_is_discarded(
    conn: Connection, commons: Commons
) -> None:
    task_id, _ = await ask(conn, "k")
    (one,) = await lease(commons, [task_id])
    await commons.store.settle([one.id], [one.token], [0], ["dead"], [None], [None], 5)
    for _ in range(4):
        await advance_clock(conn, 40 * DAY_S)
        await prune(commons.store)
    assert await ask(conn, "k") == (task_id, False)
    assert await conn.fetchval("select delayq.revive($1)", task_id) == "revived"
    await advance_clock(conn, 40 * DAY_S)
    await prune(commons.store)
    assert await ask(conn, "k") == (task_id, False)
    assert await conn.fetchval("select delayq.cancel($1)", task_id) == "cancelled"
    await prune(commons.store)
    await advance_clock(conn, 31 * DAY_S)
    await prune(commons.store)
    assert await remembered(conn) == set()


async def test_a_successor_that_waits_behind_a_running_task_keeps_its_idempotency_key(
    conn: Connection, commons: Commons
) -> None:
    first = await conn.fetchval("select id from delayq.schedule('mail', key => 'k')")
    await lease(commons, [first])
    follow_up = await conn.fetchval(
        "select follow_up from delayq.schedule('mail', key => 'k', on_conflict => 'replace',"
        " idempotency_key => 'i')"
    )
    await advance_clock(conn, 40 * DAY_S)
    await prune(commons.store)
    await advance_clock(conn, 40 * DAY_S)
    await prune(commons.store)
    assert await ask(conn, "i") == (follow_up, False)


async def test_the_walk_through_the_keys_goes_by_pages_and_passes_over_those_that_live(
    conn: Connection, commons: Commons
) -> None:
    """However many of them still wait: a page reads as many rows as it is long."""
    await conn.execute(OLD_KEYS, 95)
    for nr in (10, 50, 90):
        await add_tasks(conn, [nr], after_s=3_600)
        await conn.execute(
            "update delayq.idempotency set task_id = -task_id where task_id = -$1::int", nr
        )
    pages, after = 0, ("", "")
    while (then := await commons.store.prune_idempotency(30, after, 10)) is not None:
        assert then > after
        pages, after = pages + 1, then
    assert pages == 9
    kept = {nr for nr in range(1, 96) if nr % 2 or nr in (10, 50, 90)}
    assert {int(key) for key in await remembered(conn)} == kept
    unnoticed = "select count(*) from delayq.idempotency where ended_at is null"
    assert await conn.fetchval(unnoticed) == 0


async def test_a_round_is_bounded_in_time_and_the_next_one_goes_on_where_it_ended(
    conn: Connection, commons: Commons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.upkeep._ROWS", 10)
    await conn.execute(OLD_KEYS, 100)
    upkeep = Upkeep(commons)
    walk = commons.store.prune_idempotency

    async def slow(*args: Any) -> Any:
        monkeypatch.setattr("delayq.upkeep._ROUND_US", 0)  # its time is over by then
        now_us = commons.clock.monotonic_us()
        await wait_for(lambda: commons.clock.monotonic_us() > now_us + 20_000, "some time")
        return await walk(*args)

    swap(commons.store, "prune_idempotency", slow)
    for left in (95, 90, 85):
        monkeypatch.setattr("delayq.upkeep._ROUND_US", 20_000)
        await upkeep.run()
        assert len(await remembered(conn)) == left
    monkeypatch.setattr("delayq.upkeep._ROUND_US", 10**9)
    swap(commons.store, "prune_idempotency", walk)
    await upkeep.run()
    assert len(await remembered(conn)) == 50


async def test_a_walk_that_is_over_begins_again_after_an_hour(
    conn: Connection, commons: Commons, monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep, walks = Upkeep(commons), list[int]()
    walk = commons.store.prune_idempotency

    async def counted(*args: Any) -> Any:
        walks.append(1)
        return await walk(*args)

    swap(commons.store, "prune_idempotency", counted)
    await upkeep.run()
    await upkeep.run()
    assert len(walks) == 1
    monkeypatch.setattr("delayq.upkeep._WALK_EVERY_US", 0)
    await upkeep.run()
    assert len(walks) == 2
    assert await remembered(conn) == set()


async def test_upkeep_and_orphans_keep_no_timer_waiting(conn: Connection, commons: Commons) -> None:
    """Whatever takes long there has a connection of its own."""
    store = commons.store
    async with store._upkeep._turn:
        slow = [
            asyncio.ensure_future(call)
            for call in (
                store.make_partitions(1), store.drop_partitions(7), store.prune_default(7, 10),
                store.prune_idempotency(30, ("", ""), 10), store.forget([]), store.adopt([], 0),
                store.running((0, 0), 255, 0, 10),
            )
        ]  # fmt: skip
        await add_tasks(conn, [1], after_s=-1)
        now_us = commons.database_clock.now_us()
        (found,) = await store.overdue([1], 0, now_us, ["mail"], [], 10)
        assert found.id == 1
        assert len(await lease(commons, [1])) == 1
        assert not [call for call in slow if call.done()]
    await asyncio.gather(*slow)


async def test_one_round_of_upkeep_prunes_as_much_as_came_in_since_the_last(
    conn: Connection, settings: Settings
) -> None:
    """A batch is bounded, and a round is as many batches as it takes."""
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    await conn.execute(OLD_KEYS, 12_000)
    async with application.node() as node:
        await life(node)._upkeep.run()
        assert await conn.fetchval(
            "select count(*) filter (where ended_at is null) from delayq.idempotency"
        ) == 0  # fmt: skip
        assert await conn.fetchval("select count(*) from delayq.idempotency") == 6_000
