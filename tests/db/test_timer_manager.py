"""The timers of a node on a real table: what is loaded when, and what is fired when.

The tests own the database's clock: they move it, let the timer manager see it, and look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from delayq.database import Database, parse_dsn
from delayq.listener import Hearers, Listener
from delayq.ranks import Role, bucket_of, ranks
from delayq.store import Cursors, Page
from delayq.timer_heap import Timer
from delayq.window import BEGINNING_US
from tests.helpers import advance_clock, connected, wait_for
from tests.nodes import eventually
from tests.relay import relay
from tests.rooms import ME, PEER, US, Desk, Limits, add_tasks, desk, id_in, swap

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings


async def us_of(conn: Connection, task_id: int) -> int:
    return int(
        await conn.fetchval(
            "select delayq.micros(execute_at) from delayq.tasks where id = $1", task_id
        )
    )


def count_windows(at: Desk) -> list[int]:
    """How many rows each page of the window brings from now on."""
    pages: list[int] = []

    async def counted(*args: Any) -> Page:
        page: Page = await window(*args)
        pages.append(len(page.rows))
        return page

    window = swap(at.commons.store, "window", counted)
    return pages


# --- the window -------------------------------------------------------------------------------


async def test_everything_within_the_horizon_is_loaded_and_nothing_beyond_it(
    conn: Connection, database: Database, settings: Settings
) -> None:
    near = await add_tasks(conn, range(1, 301), after_s=1, step_s=0.04)
    await add_tasks(conn, range(1_001, 1_101), after_s=60)
    async with desk(database, settings) as at:
        await at.rank()
        assert set(at.timers.owned.ids()) == set(near)
        assert at.timers.owned.at_of(7) == await us_of(conn, 7)
        assert len(at.timers.standby) == 0


async def test_a_far_future_task_sends_no_hint_and_is_loaded_by_its_slice(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    heard: list[str] = []
    async with connected(dsn) as listening, desk(database, settings) as at:
        await listening.add_listener("delayq", lambda *args: heard.append(str(args[3])))
        await at.rank()
        await add_tasks(conn, [1], after_s=3600)
        await add_tasks(conn, [2], after_s=5)
        await wait_for(lambda: heard, "the hint of the near one")
        assert len(heard) == 1
        assert heard[0].startswith("due\n2:")
        await at.manager.sweep()
        assert 1 not in at.timers.owned
        await advance_clock(conn, 3590)
        await at.observe()
        await at.manager.sweep()
        assert at.timers.owned.at_of(1) == await us_of(conn, 1)
        await advance_clock(conn, 10)
        await at.observe()
        await wait_for(lambda: 1 in at.firing.offered, "the task fires")


async def test_a_raw_update_of_its_instant_is_found_by_the_next_sweep(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, [1], after_s=3600)
    async with desk(database, settings) as at:
        await at.rank()
        await at.manager.sweep()
        await conn.execute("update delayq.tasks set execute_at = delayq.clock() + interval '5 s'")
        await at.manager.sweep()
        assert at.timers.owned.at_of(1) == await us_of(conn, 1)
        # and once more, when it is in the window already
        await conn.execute("update delayq.tasks set execute_at = delayq.clock() + interval '3 s'")
        await at.manager.sweep()
        assert at.timers.owned.at_of(1) == await us_of(conn, 1)


async def test_an_insert_that_commits_late_is_found_by_the_recheck(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with connected(dsn) as late, desk(database, settings) as at:
        await at.rank()
        transaction = late.transaction()
        await transaction.start()
        await add_tasks(late, [1], after_s=6)
        for _ in range(3):
            await at.manager.sweep()
        assert 1 not in at.timers.owned
        await transaction.commit()
        await at.manager.sweep()
        assert 1 in at.timers.owned


async def test_a_row_that_commits_between_two_pages_of_a_recheck_is_found_by_the_next(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    """The xmin that is remembered must be the one from before the first page."""
    async with connected(dsn) as late, desk(database, settings) as at:
        await at.rank()
        await at.manager.sweep()
        transaction = late.transaction()
        await transaction.start()
        await add_tasks(late, [id_in(0, 1)], after_s=6)
        crowd = await add_tasks(conn, [id_in(1, nr) for nr in range(1, 40)], after_s=6)
        pages: list[int] = []

        async def commits_after_the_first_page(*args: Any) -> Page:
            page: Page = await window(*args)
            pages.append(len(page.rows))
            if len(pages) == 1:
                await transaction.commit()
            return page

        window = swap(at.commons.store, "window", commits_after_the_first_page)
        await at.manager.sweep()
        assert len(pages) > 1
        assert set(crowd) <= set(at.timers.owned.ids())
        assert id_in(0, 1) not in at.timers.owned
        await at.manager.sweep()
        assert id_in(0, 1) in at.timers.owned


async def test_the_recheck_reads_what_is_new_and_not_the_whole_window_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, range(1, 2_001), after_s=8)
    async with desk(database, settings) as at:
        await at.rank()
        await at.manager.sweep()
        pages = count_windows(at)
        ids = count(5_000)

        async def only_the_new_ones() -> bool:
            pair = [next(ids), next(ids)]
            await add_tasks(conn, pair, after_s=8)
            pages.clear()
            await at.manager.sweep()
            assert set(pair) <= set(at.timers.owned.ids())
            return sum(pages) <= 10

        # while a transaction of another test is open on this server, everything counts as new
        await eventually(only_the_new_ones, "the re-check reads what is new")


async def test_ties_and_crowded_buckets_are_loaded_to_the_last_row(
    conn: Connection, database: Database, settings: Settings
) -> None:
    ids = [id_in(7, nr) for nr in range(1, 1_001)]
    await conn.execute(
        "insert into delayq.tasks (id, kind, execute_at) overriding system value"
        " select i, 'mail', $2 from unnest($1::bigint[]) as t(i)",
        ids,
        await conn.fetchval("select delayq.clock() + interval '6 s'"),
    )
    sparse = await add_tasks(conn, [id_in(bucket, 1) for bucket in range(20, 60)], after_s=7)
    async with desk(database, settings) as at:
        pages = count_windows(at)
        await at.rank()
        assert set(at.timers.owned.ids()) == {*ids, *sparse}
        assert sum(pages) == len(ids) + len(sparse)  # and none of them twice


async def test_a_lone_task_far_ahead_costs_nothing(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, range(1, 3_001), after_s=86_400, step_s=60)
    async with desk(database, settings) as at:
        await at.rank()
        pages = count_windows(at)
        for _ in range(5):
            await at.manager.sweep()
        await at.manager.full_scan()
        assert len(at.timers.owned) == len(at.timers.standby) == 0
        assert sum(pages) == 0
        assert len(pages) <= 2 * 5 + 1


async def test_tasks_of_kinds_that_are_not_served_are_not_loaded(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, range(1, 50), after_s=3, kind="other")
    mine = await add_tasks(conn, range(100, 150), after_s=3)
    async with desk(database, settings) as at:
        await at.rank()
        await at.manager.sweep()
        await at.manager.full_scan()
        assert set(at.timers.owned.ids()) == set(mine)
        await advance_clock(conn, 10)
        await at.observe()
        await at.manager.sweep()
        assert set(at.firing.offered) == set(mine)


async def test_a_paused_kind_is_not_loaded_and_all_of_it_is_when_it_is_resumed(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with desk(database, settings, kinds=["mail", "report"]) as at:
        await at.rank(kinds=["mail", "report"])
        await at.manager.serve(frozenset({"report"}))
        assert at.firing.paused == {"report"}
        await add_tasks(conn, [1, 2, 3], after_s=3, kind="report")
        await add_tasks(conn, [4], after_s=3)
        await at.manager.sweep()
        assert set(at.timers.owned.ids()) == {4}
        await advance_clock(conn, 120)
        await at.observe()
        await at.manager.sweep()
        await at.manager.full_scan()
        assert at.firing.offered == [4]
        await at.manager.serve(frozenset())
        assert sorted(at.firing.offered) == [1, 2, 3, 4]


# --- bounded ----------------------------------------------------------------------------------


async def test_a_full_heap_keeps_the_earliest_and_the_rest_is_loaded_as_it_empties(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """3,000 timers and room for 400: at no time is one that is due missing."""
    await add_tasks(conn, range(1, 3_001), after_s=1, step_s=0.004)
    async with desk(database, settings, max_timers=400) as at:
        keeping = asyncio.create_task(at.manager.keep_loaded())
        await at.rank()
        assert len(at.timers.owned) <= 400
        due_us = {row["id"]: row["us"] for row in await conn.fetch(
            "select id, delayq.micros(execute_at) as us from delayq.tasks")}  # fmt: skip
        settled: set[int] = set()
        for _ in range(30):
            await advance_clock(conn, 0.5)
            await at.observe()
            await at.manager.sweep()
            due = {task_id for task_id, us in due_us.items() if us <= at.now_us() - US}
            assert due <= set(at.firing.offered)
            over = set(at.firing.offered) - settled
            await conn.execute("delete from delayq.tasks where id = any($1::bigint[])", list(over))
            settled |= over
            at.holdings.let_go(at.holdings.ids())
            at.firing.ready.take(10_000)
            assert len(at.timers.owned) <= 400
        assert settled == set(due_us)
        keeping.cancel()


async def test_an_earlier_task_gets_room_in_a_full_heap_and_what_it_pushed_out_comes_back(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, range(1, 301), after_s=8, step_s=0.01)
    async with desk(database, settings, max_timers=100) as at:
        await at.rank()
        (urgent,) = await add_tasks(conn, [1_000], after_s=2)
        at.timers.hear([Timer(urgent, await us_of(conn, urgent), "mail", 0)])
        assert urgent in at.timers.owned
        assert len(at.timers.owned) <= 100
        await advance_clock(conn, 20)
        for _ in range(30):
            await at.observe()
            await at.manager.sweep()
            at.firing.ready.take(1_000)
            await conn.execute(
                "delete from delayq.tasks where id = any($1::bigint[])", at.firing.offered
            )
        assert sorted(set(at.firing.offered)) == [*range(1, 301), 1_000]


async def test_a_recheck_that_finds_more_than_there_is_room_for_forgets_nothing(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """Nothing was hinted, the heap is nearly full, and a page is not enough."""
    async with desk(database, settings, max_timers=100, horizon_s=60) as at:
        await add_tasks(conn, range(1, 81), after_s=50)
        await at.rank()
        await at.manager.sweep()
        late = [id_in(3, nr) for nr in range(1, 401)]
        await add_tasks(conn, late, after_s=20)
        await at.manager.sweep()
        await advance_clock(conn, 21)
        for _ in range(12):
            await at.observe()
            await at.manager.sweep()
            at.firing.ready.take(1_000)
            await conn.execute(
                "delete from delayq.tasks where id = any($1::bigint[])", at.firing.offered
            )
            await at.manager._load_window()
        assert set(late) <= set(at.firing.offered)


async def test_a_limited_kind_with_a_long_backlog_holds_up_no_other_kind(
    database: Database, settings: Settings
) -> None:
    limits: Limits = {"report": (("report", 1),)}
    async with desk(database, settings, kinds=["mail", "report"], limits=limits) as at:
        await at.rank(kinds=["mail", "report"])
        now_us = at.now_us()
        for task_id in range(1, 12_001):
            at.timers.arm(Timer(task_id, now_us - 5 * US, "report", 0))
        at.timers.arm(Timer(20_000, now_us - US, "mail", 0))
        taken: list[str] = []
        for _ in range(100):
            at.timers.fire()
            taken += [timer.kind for timer in at.firing.ready.take(50)]
        assert taken.count("report") == 1
        assert "mail" in taken


async def test_overdue_tasks_that_nobody_fires_are_taken_while_workers_are_free(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with desk(database, settings) as at:
        await at.rank(PEER)
        theirs = [
            task_id
            for task_id in range(1, 200)
            if at.timers.roles.role("mail", bucket_of(task_id)) is Role.UNDERSTUDY
        ]
        await at.manager.sweep()
        await add_tasks(conn, theirs, after_s=-10)
        at.firing.free = 0
        await at.manager.sweep()
        assert at.firing.offered == []
        at.firing.free = 1_000
        await at.manager.sweep()
        assert set(theirs) <= set(at.firing.offered)
        assert not any(task_id in at.timers.standby for task_id in theirs)


# --- firing -----------------------------------------------------------------------------------


async def test_a_timer_fires_at_its_instant_and_not_before(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with desk(database, settings) as at:
        await add_tasks(conn, range(1, 30), after_s=0.1, step_s=0.005)
        await at.rank()
        await wait_for(lambda: len(at.firing.offered) == 29, "all of them fire")
        for task_id in at.firing.offered:
            assert at.firing.offered_us[task_id] >= await us_of(conn, task_id)


async def test_a_step_of_the_databases_clock_rearms_the_timers(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with desk(database, settings) as at:
        await add_tasks(conn, [1], after_s=14)  # longer than anybody here is willing to wait
        await at.rank()
        await advance_clock(conn, 15)
        await at.observe()
        await wait_for(lambda: at.firing.offered == [1], "the task fires after the step")
        await add_tasks(conn, [2], after_s=2)
        at.timers.hear([Timer(2, await us_of(conn, 2), "mail", 0)])
        await advance_clock(conn, -3600)
        await at.observe()
        at.timers.fire()
        assert at.firing.offered == [1]
        await advance_clock(conn, 3603)
        await at.observe()
        await wait_for(lambda: at.firing.offered == [1, 2], "the other one fires in its turn")


async def test_after_the_clock_was_set_back_new_tasks_are_still_found_without_a_hint(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """The watermarks lie an hour ahead then: what comes in behind them is what is new."""
    async with desk(database, settings) as at:
        await at.rank()
        await at.manager.sweep()
        await advance_clock(conn, -3600)
        await at.observe()
        await at.manager.sweep()
        await add_tasks(conn, [1], after_s=5)
        await add_tasks(conn, [2], after_s=50)
        await at.manager.sweep()
        assert {1, 2} <= set(at.timers.owned.ids())


async def test_the_cancel_flags_of_running_tasks_are_read_by_the_sweep(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await conn.execute(
        "insert into delayq.tasks (id, kind, state, lease_owner, lease_token, attempt,"
        " cancel_requested) overriding system value"
        " select i, 'mail', 'running', $1, i, 1, i = 2 from generate_series(1, 3) as t(i)",
        ME,
    )
    async with desk(database, settings) as at:
        await at.rank()
        at.running.running = dict.fromkeys([1, 2, 3])
        await at.manager.sweep()
        assert at.running.cancelled == [2]


# --- owner and understudy ---------------------------------------------------------------------


def split(*ids: int) -> tuple[list[int], list[int]]:
    """Those that ME owns and those that it is understudy for, with PEER as the other node."""
    roles = ranks(dict.fromkeys((ME, PEER), frozenset({"mail"})), ["mail"], ME)
    owned = [i for i in ids if roles.role("mail", bucket_of(i)) is Role.OWNER]
    return owned, [i for i in ids if i not in owned]


async def test_the_understudy_looks_after_what_its_owner_left_half_a_second_later(
    conn: Connection, database: Database, settings: Settings
) -> None:
    owned, stood_by = split(*range(1, 101))
    async with desk(database, settings) as at:
        await at.rank(PEER)
        await add_tasks(conn, range(1, 101), after_s=5)
        await at.manager.sweep()
        assert set(at.timers.owned.ids()) == set(owned)
        assert set(at.timers.standby.ids()) == set(stood_by)
        await advance_clock(conn, 5.2)
        await at.observe()
        await wait_for(lambda: set(at.firing.offered) == set(owned), "the owned ones fire")
        assert at.firing.lookout.stood_in == []
        await advance_clock(conn, 0.5)
        await at.observe()
        await wait_for(
            lambda: set(at.firing.lookout.stood_in) == set(stood_by), "the understudy looks"
        )


async def test_what_was_overdue_when_the_understudy_loaded_it_is_given_its_delay_too(
    conn: Connection, database: Database, settings: Settings
) -> None:
    _, stood_by = split(*range(1, 41))
    await add_tasks(conn, stood_by, after_s=-0.5)
    async with desk(database, settings, understudy_delay_ms=60_000) as at:
        before_us = at.now_us()
        await at.rank(PEER)
        assert set(at.timers.standby.ids()) == set(stood_by)
        assert (at.timers.standby.next_at_us() or 0) >= before_us


async def test_when_a_node_leaves_its_timers_are_held_already_and_become_owned(
    conn: Connection, database: Database, settings: Settings
) -> None:
    _, stood_by = split(*range(1, 101))
    async with desk(database, settings) as at:
        await at.rank(PEER)
        await add_tasks(conn, range(1, 101), after_s=5)
        await at.manager.sweep()
        pages = count_windows(at)
        await at.rank()
        assert set(at.timers.owned.ids()) == set(range(1, 101))
        assert len(at.timers.standby) == 0
        assert sum(pages) == 0
        assert at.timers.owned.at_of(stood_by[0]) == await us_of(conn, stood_by[0])


async def test_when_a_node_joins_its_share_is_handed_to_it_and_stood_by_for(
    conn: Connection, database: Database, settings: Settings
) -> None:
    owned, stood_by = split(*range(1, 101))
    async with desk(database, settings) as at:
        await at.rank()
        await add_tasks(conn, range(1, 101), after_s=5)
        await at.manager.sweep()
        assert len(at.timers.owned) == 100
        await at.rank(PEER)
        assert set(at.timers.owned.ids()) == set(owned)
        assert set(at.timers.standby.ids()) == set(stood_by)
        await at.rank(PEER, 3_333, 4_444)
        held = set(at.timers.owned.ids()) | set(at.timers.standby.ids())
        roles = at.timers.roles
        assert held == {i for i in range(1, 101) if roles.role("mail", bucket_of(i)) is not None}


async def test_a_gained_bucket_is_read_from_the_beginning(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with desk(database, settings) as at:
        await at.rank(PEER, 3_333, 4_444)
        before = at.timers.roles
        none_yet = [i for i in range(1, 401) if before.role("mail", bucket_of(i)) is None]
        await add_tasks(conn, none_yet[::2], after_s=-7_200)
        await add_tasks(conn, none_yet[1::2], after_s=5)
        await at.rank()
        assert {*at.timers.owned.ids(), *at.firing.offered} == set(none_yet)


async def test_a_bucket_that_is_gained_for_one_kind_more_is_read_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """It was read already, for the other kind: what this one has in it was passed over."""
    both = frozenset({"mail", "report"})
    others = dict.fromkeys((PEER, 3_333, 4_444), frozenset({"report"}))
    async with desk(database, settings, kinds=both) as at:
        await at.manager.adjust(ranks({ME: both} | others, both, ME))
        before = at.timers.roles
        none_yet = [i for i in range(1, 401) if before.role("report", bucket_of(i)) is None]
        await add_tasks(conn, none_yet[::2], after_s=-7_200, kind="report")
        await add_tasks(conn, none_yet[1::2], after_s=5, kind="report")
        await at.manager.sweep()
        assert {*at.timers.owned.ids(), *at.firing.offered} == set()
        await at.rank(kinds=both)
        assert {*at.timers.owned.ids(), *at.firing.offered} == set(none_yet)


# --- hints ------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(at: Desk, database: Database) -> AsyncIterator[list[str]]:
    """A listener that feeds the timer manager; the list says how often LISTEN was made."""
    made: list[str] = []

    def ignore(*_args: object) -> None:
        return None

    listener = Listener(
        database,
        at.commons.node,
        Hearers(
            due=at.timers.hear,
            scan=ignore,
            garbled=ignore,
            cancel=ignore,
            membership=ignore,
            kind=ignore,
            listening=lambda: made.append("listening"),
        ),
    )
    task = asyncio.create_task(listener.run())
    try:
        await wait_for(lambda: made, "LISTEN")
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_hint_arms_the_timer_long_before_the_next_sweep(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with desk(database, settings) as at:
        await at.rank()
        async with listening(at, database):
            await add_tasks(conn, [1], after_s=5, priority=3)
            await wait_for(lambda: 1 in at.timers.owned, "the hint arms it")
            assert at.timers.owned.get(1) == Timer(1, await us_of(conn, 1), "mail", 3)
            moved = "select delayq.reschedule(1, delay => interval '8 s')"
            assert await conn.fetchval(moved) == "moved"
            at_us = await us_of(conn, 1)
            await wait_for(lambda: at.timers.owned.at_of(1) == at_us, "the move is heard")
            assert await conn.fetchval("select delayq.reschedule(1, delay => '1 hour')") == "moved"
            # out of the hint's reach: the old timer would find nothing, and the sweep leaves it
            assert await conn.fetchval("select delayq.run_now(1)") == "moved"
            await wait_for(lambda: at.firing.offered == [1], "now means now")


async def test_while_listen_is_lost_the_sweeps_find_everything(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    async with relay(dsn) as wire:
        wired = Database(parse_dsn(wire.dsn), settings)
        async with desk(Database(parse_dsn(dsn), settings), settings) as at:
            await at.rank()
            await at.manager.sweep()
            async with listening(at, wired) as made:
                wire.cut()
                await add_tasks(conn, [1], after_s=5)
                await at.manager.sweep()
                assert 1 in at.timers.owned
                wire.resume()
                await wait_for(lambda: len(made) == 2, "LISTEN is made again, and is told of")
                await add_tasks(conn, [2], after_s=5)
                await wait_for(lambda: 2 in at.timers.owned, "hints come again")


@pytest.mark.parametrize(
    "timer",
    [
        Timer(-1, 0, "mail", 0), Timer(1 << 63, 0, "mail", 0), Timer(5, -(10**18), "mail", 0),
        Timer(5, 10**19, "mail", 0), Timer(5, 0, "mail", 10**9), Timer(5, 0, "\0", 0),
        Timer(0, 0, "mail", 0),
    ],
)  # fmt: skip
async def test_nonsense_in_a_hint_harms_nothing(
    database: Database, settings: Settings, timer: Timer
) -> None:
    async with desk(database, settings) as at:
        await at.rank()
        at.timers.hear([timer, Timer(7, at.now_us(), "mail", 0)])
        await wait_for(lambda: 7 in at.firing.offered, "the one beside it fires")


# --- failover ---------------------------------------------------------------------------------


async def test_a_restarted_server_means_that_everything_is_read_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await missed_until(conn, database, settings, lambda page: replace(
        page, server_started_us=page.server_started_us + 1))  # fmt: skip


async def test_transaction_ids_that_went_back_mean_that_everything_is_read_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await missed_until(conn, database, settings, lambda page: replace(page, xmin=1))


async def missed_until(
    conn: Connection, database: Database, settings: Settings, odd: Callable[[Page], Page]
) -> None:
    """A row too old for the re-check is found as soon as the pages look odd."""
    async with desk(database, settings) as at:
        await add_tasks(conn, [1], after_s=8)
        await at.rank()

        async def is_too_old() -> bool:
            at.timers.forget(1)
            await at.manager.sweep()
            return 1 not in at.timers.owned

        # a transaction of another test on this server keeps it young for a while
        await eventually(is_too_old, "too old for the re-check")

        async def oddly(*args: Any) -> Page:
            return odd(await window(*args))

        window = swap(at.commons.store, "window", oddly)
        await at.manager.sweep()
        assert 1 in at.timers.owned


async def test_an_xmin_from_the_future_returns_everything_rather_than_nothing(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """What a promoted standby may be asked: it has not seen that transaction id yet."""
    await add_tasks(conn, [1], after_s=5)
    async with desk(database, settings) as at:
        cursors = Cursors([bucket_of(1)], [BEGINNING_US], [""], [0], [at.now_us() + 10 * US])
        first = await at.commons.store.window(cursors, ["mail"], 5, None)
        again = await at.commons.store.window(cursors, ["mail"], 5, first.xmin + 1_000)
        assert again.xmin < first.xmin + 1_000  # by which the caller sees that it must read anew


# --- backlog ------------------------------------------------------------------------------------


async def test_a_backlog_beyond_all_bounds_does_not_hold_up_what_is_due_soon(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, range(1, 6_001), after_s=-3_600)
    soon = await add_tasks(conn, range(7_001, 7_006), after_s=1)
    async with desk(database, settings, max_timers=400) as at:
        await at.rank()
        await at.manager.sweep()
        assert set(soon) <= set(at.timers.owned.ids())
        assert at.firing.ready.takeable <= 2_000 + 400


async def test_a_kind_with_a_long_line_at_its_limit_is_not_read_on(
    conn: Connection, database: Database, settings: Settings
) -> None:
    await add_tasks(conn, range(1, 5_001), after_s=-3_600, kind="report")
    mails = await add_tasks(conn, range(6_001, 6_101), after_s=-60)
    limits: Limits = {"report": (("report", 1),)}
    async with desk(
        database, settings, kinds=("mail", "report"), limits=limits, max_timers=400
    ) as at:
        await at.rank(kinds=("mail", "report"))
        for _ in range(12):  # a dispatcher that takes whatever it may
            at.firing.take()
            await at.manager.sweep()
        assert set(mails) <= set(at.firing.offered)
        assert len(at.holdings.ids()) < 2_500
        # as the line grows short it is read on, from where it was cut
        seen = len(set(at.firing.offered))
        while not at.firing.ready.reopened:
            at.firing.finish("report")
        at.manager.read_on()
        await at.manager.sweep()
        assert len(set(at.firing.offered)) > seen


async def test_a_line_that_grows_short_while_a_page_is_read_is_read_on_all_the_same(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """The page moves the marks when it is there, past what was let go."""
    await add_tasks(conn, range(1, 5_001), after_s=-3_600, kind="report")
    limits: Limits = {"report": (("report", 1),)}
    async with desk(
        database, settings, kinds=("mail", "report"), limits=limits, max_timers=400
    ) as at:
        await at.rank(kinds=("mail", "report"))
        for _ in range(12):
            at.firing.take()
            await at.manager.sweep()
        seen = len(set(at.firing.offered))
        ready = at.firing.ready
        assert "report" in ready.full_kinds

        async def meanwhile(*args: Any) -> Page:
            page: Page = await window(*args)
            while "report" in ready.full_kinds:
                at.firing.finish("report")
            at.manager.read_on()
            return page

        window = swap(at.commons.store, "window", meanwhile)
        at.manager._backlog_left = True  # what has come due since is read
        await at.manager.sweep()
        assert len(set(at.firing.offered)) > seen


async def test_an_old_backlog_of_others_is_stolen_page_after_page(
    conn: Connection, database: Database, settings: Settings
) -> None:
    _, theirs = split(*range(1, 3_001))
    await add_tasks(conn, theirs, after_s=-3_600)
    async with desk(database, settings) as at:
        await at.rank(PEER)
        await at.manager.full_scan()
        foreign = set(at.firing.offered)
        reading = asyncio.create_task(at.manager.keep_loaded())
        try:
            async with asyncio.timeout(20):
                while set(theirs) - set(at.firing.offered):
                    at.firing.take()
                    at.timers.refill()
                    await asyncio.sleep(0.001)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        assert len(foreign) < len(theirs)


async def test_a_busy_understudy_does_not_even_look(
    conn: Connection, database: Database, settings: Settings
) -> None:
    _, stood_by = split(*range(1, 41))
    await add_tasks(conn, stood_by, after_s=-0.2)
    async with desk(database, settings, understudy_delay_ms=10) as at:
        await at.rank(PEER)
        at.firing.free = 0
        at.timers._fire_standby()
        assert set(at.timers.standby.ids()) == set(stood_by)
        at.firing.free = 100
        await wait_for(lambda: set(at.firing.lookout.stood_in) == set(stood_by), "a free worker")
