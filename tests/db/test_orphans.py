"""Running tasks that nobody runs: those of dead nodes, and leases that nobody remembers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from delayq.orphans import Orphanage
from delayq.store import Settled
from tests.helpers import advance_clock, connected, wait_for
from tests.rooms import ME, PEER, THIRD, add_node, id_in, make_commons, observe, run_by, swap

if TYPE_CHECKING:
    from delayq.commons import Commons
    from delayq.database import Connection, Database
    from delayq.settings import Settings


@dataclass
class Home:
    """The orphanage of a node, what the node holds, and whom it took in."""

    commons: Commons
    orphans: Orphanage
    held: set[int]
    adopted: list[Settled] = field(default_factory=list)

    def knows(self, *, alive: Iterable[int] = (ME,), dead: Iterable[int] = ()) -> None:
        """What the last beat brought."""
        self.orphans.alive = frozenset(alive)
        self.orphans.dead = tuple(dead)

    async def check(self) -> list[int]:
        """One pass; the ids that were taken in by it."""
        before = len(self.adopted)
        await self.orphans.check()
        return sorted(row.id for row in self.adopted[before:])


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were left are not come back for by themselves, unless the test says so."""
    monkeypatch.setattr("delayq.orphans._COME_BACK_S", ())


@asynccontextmanager
async def home(conn: Connection, database: Database, settings: Settings) -> AsyncIterator[Home]:
    await add_node(conn, ME)
    commons = await make_commons(database, settings)
    held: set[int] = set()
    adopted: list[Settled] = []
    orphans = Orphanage(commons, held.__contains__, adopted.extend)
    subject = Home(commons, orphans, held, adopted)
    subject.knows()
    yield subject
    await commons.store.aclose()


async def rows(conn: Connection) -> dict[int, dict[str, Any]]:
    """The live tasks by id; `wait_s`: until they fire."""
    found = await conn.fetch(
        "select id, state, attempt, interruptions, lease_owner, errors::text as errors,"
        " extract(epoch from execute_at - delayq.clock())::float8 as wait_s from delayq.tasks"
    )
    return {row["id"]: dict(row) | {"errors": json.loads(row["errors"])} for row in found}


# --- tasks of dead nodes ----------------------------------------------------------------------


async def test_what_a_dead_or_a_missing_node_ran_is_pending_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await add_node(conn, PEER, "dead")
        await run_by(conn, PEER, [1, 2])
        await run_by(conn, THIRD, [3])  # it never had a row, or its row is gone
        me.knows(dead=[PEER])
        assert await me.check() == [1, 2, 3]
        found = await rows(conn)
        assert {row["state"] for row in found.values()} == {"pending"}
        assert {row["lease_owner"] for row in found.values()} == {0}
        assert me.commons.counters.adopted == 3


@pytest.mark.parametrize("state", ["joining", "active", "draining"])
async def test_what_a_node_runs_that_nobody_buried_is_left_to_it_however_silent_it_is(
    conn: Connection, database: Database, settings: Settings, state: str
) -> None:
    async with home(conn, database, settings) as me:
        await add_node(conn, PEER, state, expires_s=-3_600)
        await run_by(conn, PEER, [1])
        assert await me.check() == []  # even though the last beat did not bring this node
        assert (await rows(conn))[1]["lease_owner"] == PEER


async def test_a_crash_counts_as_an_attempt_and_is_told_in_the_errors(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, [1], attempt=2)
        await me.check()
        row = (await rows(conn))[1]
        assert (row["attempt"], row["interruptions"]) == (2, 0)
        (error,) = row["errors"]
        assert (error["error"], error["attempt"]) == ("NodeLost", 2)
        assert "died" in error["message"]


@pytest.mark.parametrize(
    ("attempt", "wait_s"), [(1, 0), (2, 2), (3, 4), (4, 8), (11, 1024), (60, 3600), (10_000, 3600)]
)
async def test_a_first_adoption_fires_at_once_and_later_ones_wait_longer_and_longer(
    conn: Connection, database: Database, settings: Settings, attempt: int, wait_s: int
) -> None:
    """A task that kills its node must not kill one after the other."""
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, [1], attempt=attempt, limit=20_000)
        await me.check()
        assert (await rows(conn))[1]["wait_s"] == pytest.approx(wait_s, abs=5)


async def test_an_exhausted_task_is_dead_with_the_reason(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, [1], attempt=5, limit=5)
        await me.check()
        assert await rows(conn) == {}
        dead = await conn.fetchrow(
            "select attempt, node, errors::text as errors from delayq.dead_tasks where id = 1"
        )
        assert dead is not None
        assert (dead["attempt"], dead["node"]) == (5, PEER)
        assert json.loads(dead["errors"])[-1]["error"] == "NodeLost"


async def test_a_requested_cancel_survives_the_crash_and_ends_it_as_cancelled(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, [1, 2])
        assert await conn.fetchval("select delayq.cancel(1)") == "cancel_requested"
        await me.check()
        assert set(await rows(conn)) == {2}
        ended = "select state from delayq.task_history where id = 1"
        assert await conn.fetchval(ended) == "cancelled"


async def test_a_successor_that_waits_takes_the_place_of_the_second_run(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await conn.fetch("select * from delayq.schedule('mail', key => 'k')")
        await conn.execute(
            "update delayq.tasks set state = 'running', lease_owner = $1, lease_token = 5,"
            " attempt = 1, attempt_limit = 5",
            PEER,
        )
        again = (
            "select follow_up from delayq.schedule('mail', key => 'k', on_conflict => 'replace')"
        )
        follow_up = await conn.fetchval(again)
        assert follow_up is not None
        await me.check()
        assert list(await rows(conn)) == [follow_up]


async def test_thousands_of_orphans_are_all_taken_in(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, range(1, 2_501))
        assert len(await me.check()) == 2_500


# --- rows that somebody holds locked ----------------------------------------------------------


async def test_a_locked_row_is_skipped_and_taken_in_by_a_later_pass(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me, connected(dsn) as stranger:
        await run_by(conn, PEER, range(1, 21))
        transaction = stranger.transaction()
        await transaction.start()
        await stranger.execute("select from delayq.tasks where id = 7 for update")
        async with asyncio.timeout(5):
            assert await me.check() == [i for i in range(1, 21) if i != 7]
        await transaction.rollback()
        assert await me.check() == [7]


async def test_a_lock_that_is_let_go_a_moment_later_costs_a_moment_and_not_a_minute(
    conn: Connection, dsn: str, database: Database, settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The session of the dead node that holds it has just been told to end."""
    monkeypatch.setattr("delayq.orphans._COME_BACK_S", (0.05,) * 100)
    async with home(conn, database, settings) as me, connected(dsn) as stranger:
        await run_by(conn, PEER, [1, 2])
        transaction = stranger.transaction()
        await transaction.start()
        await stranger.execute("select from delayq.tasks where id = 1 for update")
        checking = asyncio.ensure_future(me.orphans.check())
        await wait_for(lambda: [row.id for row in me.adopted] == [2], "the other one")
        await transaction.rollback()
        async with asyncio.timeout(5):
            await checking
        assert sorted(row.id for row in me.adopted) == [1, 2]


async def test_a_row_that_cannot_be_taken_in_does_not_keep_the_others_out(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, range(1, 11))
        await conn.execute(
            "alter table delayq.tasks add constraint stuck check (id <> 4 or state = 'running')"
        )
        assert await me.check() == [1, 2, 3, 5, 6, 7, 8, 9, 10]
        assert (await rows(conn))[4]["state"] == "running"


async def test_a_row_whose_errors_are_full_is_taken_in_like_any_other(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """Filled by hand to the brim: what does not fit beside the new one makes room for it."""
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, [1, 2])
        await conn.execute(
            "update delayq.tasks set errors = ("
            " select jsonb_build_array(string_agg(md5(i::text), ''))"
            "   from generate_series(1, 8191) as i)"
            " where id = 1"
        )
        assert await me.check() == [1, 2]
        for row in (await rows(conn)).values():
            (error,) = row["errors"]
            assert (row["state"], error["error"]) == ("pending", "NodeLost")


# --- deadlines of nodes that live -------------------------------------------------------------


async def test_a_task_of_a_live_node_is_taken_only_two_beats_after_its_deadline(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await add_node(conn, PEER, expires_s=1_000)
        me.knows(alive=[ME, PEER])
        soon = await conn.fetchval("select (delayq.clock() + interval '10 s')::text")
        await run_by(conn, PEER, [1], deadline=soon)
        await run_by(conn, PEER, [2])  # no time-out: never
        await advance_clock(conn, 10.1)
        await observe(me.commons)
        assert await me.check() == []  # it may be writing its own outcome just now
        await advance_clock(conn, 2 * settings.beat_interval_s)
        await observe(me.commons)
        assert await me.check() == [1]
        row = (await rows(conn))[1]
        assert "deadline" in row["errors"][0]["message"]


async def test_an_own_task_that_is_held_is_never_taken_by_the_node_itself(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, ME, [1], deadline="2001-01-01 00:00+00")
        me.held.add(1)
        assert [await me.check() for _ in range(3)] == [[], [], []]


# --- leases that nobody remembers -------------------------------------------------------------


async def test_a_lease_of_ours_that_we_do_not_hold_is_released_when_it_is_seen_twice(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """The lease committed and its answer was lost; its node is alive, so nobody adopts it."""
    async with home(conn, database, settings) as me:
        await run_by(conn, ME, [1, 2])
        me.held.add(2)
        assert await me.check() == []  # its answer may be on its way
        assert (await rows(conn))[1]["state"] == "running"
        assert await me.check() == [1]
        row = (await rows(conn))[1]
        assert (row["state"], row["attempt"], row["interruptions"]) == ("pending", 0, 0)
        assert (await rows(conn))[2]["state"] == "running"


async def test_a_lease_that_is_held_by_the_second_look_is_kept(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, ME, [1])
        await me.check()
        me.held.add(1)
        assert await me.check() == []


async def test_another_lease_of_the_same_task_is_looked_at_twice_again(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await run_by(conn, ME, [1])
        await me.check()
        await conn.execute("update delayq.tasks set lease_token = 99")
        assert await me.check() == []
        assert await me.check() == [1]


# --- rows of dead nodes -----------------------------------------------------------------------


async def exists(conn: Connection, node: int) -> bool:
    found: bool = await conn.fetchval(
        "select exists (select from delayq.nodes where id = $1)", node
    )
    return found


async def test_the_row_of_a_dead_node_goes_once_nothing_refers_to_it(
    conn: Connection, dsn: str, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me, connected(dsn) as stranger:
        await add_node(conn, PEER, "dead")
        await add_node(conn, THIRD, "dead")
        await run_by(conn, PEER, [1, 2])
        me.knows(dead=[PEER, THIRD])
        transaction = stranger.transaction()
        await transaction.start()
        await stranger.execute("select from delayq.tasks where id = 1 for update")
        assert await me.check() == [2]
        assert await exists(conn, PEER)
        await transaction.rollback()
        assert await me.check() == [1]
        await me.check()
        assert not await exists(conn, PEER)
        assert not await exists(conn, THIRD)


async def test_a_node_that_lives_keeps_its_row_whatever_somebody_believes(
    conn: Connection, database: Database, settings: Settings
) -> None:
    async with home(conn, database, settings) as me:
        await add_node(conn, PEER)
        me.knows(alive=[ME], dead=[PEER, ME])
        await me.check()
        assert await exists(conn, PEER)
        assert await exists(conn, ME)


# --- how they are looked for ------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 7, 1_000])
async def test_a_pass_misses_nothing_whatever_the_size_of_its_pages(
    conn: Connection, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch,
    page: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("delayq.orphans._PAGE", page)
    monkeypatch.setattr("delayq.orphans._SLOW_US", 0)  # every page is slow: fewer buckets each
    ids = [id_in(bucket, nr) for bucket in (0, 1, 128, 255) for nr in range(1, 6)]
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, ids)
        assert await me.check() == sorted(ids)


async def test_with_a_backlog_each_page_of_a_pass_reads_few_buckets_and_without_one_it_is_one(
    conn: Connection, database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    async with home(conn, database, settings) as me:
        store = me.commons.store

        async def counted(after: tuple[int, int], until_bucket: int, *rest: int) -> Any:
            asked.append(until_bucket - after[0] + 1)
            return await real(after, until_bucket, *rest)

        real = swap(store, "running", counted)
        monkeypatch.setattr("delayq.orphans._SLOW_US", 0)
        await me.check()
        assert asked[:3] == [16, 1, 1]
        assert sum(asked) == 256
        monkeypatch.setattr("delayq.orphans._SLOW_US", 10**9)
        monkeypatch.setattr("delayq.orphans._QUICK_US", 10**9)
        asked.clear()
        await me.check()
        assert asked[:3] == [1, 2, 4]
        asked.clear()
        await me.check()
        assert asked == [256]


async def test_after_the_clock_was_set_back_orphans_are_found_at_once_and_fire_when_they_are_due(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """Their instants lie in the future then, and the promise not to be early holds for them."""
    async with home(conn, database, settings) as me:
        await run_by(conn, PEER, [1])
        await add_node(conn, PEER, "dead")
        me.knows(dead=[PEER])
        await advance_clock(conn, -3_600)
        await observe(me.commons)
        assert await me.check() == [1]
        assert (await rows(conn))[1]["wait_s"] == pytest.approx(3_600, abs=60)
        assert await exists(conn, PEER)  # a task referred to it
        await me.check()
        assert not await exists(conn, PEER)


async def test_a_node_that_came_after_the_clock_was_set_back_finds_them_too(
    conn: Connection, database: Database, settings: Settings
) -> None:
    """By the rows of the other nodes: whatever they ran was due before they would expire."""
    await run_by(conn, PEER, [1])
    await advance_clock(conn, -3_600)
    async with home(conn, database, settings) as me:
        assert await me.check() == []
        due = "select max(delayq.micros(execute_at)) from delayq.tasks"
        me.orphans.reach(await conn.fetchval(due))
        assert await me.check() == [1]
        # what runs is due by now again: no need to look further than that any more
        await me.check()
        assert me.orphans._latest_us == 0
