"""One life of a node: how it joins, what it loads first, and how it leaves whatever fails."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from delayq.context import Context
from delayq.errors import DatabaseTimeout, TransactionConflict
from delayq.listener import Listener
from delayq.membership import Membership
from delayq.statements import statement
from delayq.store import Store
from tests.helpers import advance_clock, wait_for
from tests.nodes import Application, ended, eventually, life, row_of, schedule
from tests.rooms import PEER, add_node, run_by, swap

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.node import Node
    from delayq.settings import Settings
    from tests.conftest import Logged

WEEKS_S = 20 * 86_400.0
LONG: dict[str, Any] = {"lease_ttl_s": 60.0, "beat_interval_s": 0.75}
"""Orphans are looked for by the clock once a minute: what is found earlier was heard of."""
SOON_S = 8.0


@pytest.fixture
def application(settings: Settings) -> Application:
    """One that sends mail."""
    application = Application(settings)

    @application.task
    async def mail() -> None:
        return None

    return application


async def states(conn: Connection) -> dict[int, str]:
    rows = await conn.fetch("select id, state from delayq.nodes")
    return {row["id"]: row["state"] for row in rows}


def beat_thread_of(node: Node) -> Any:
    return life(node)._membership._thread


# --- joining ----------------------------------------------------------------------------------


async def test_nodes_that_start_at_once_after_a_long_sleep_all_start(
    conn: Connection, application: Application
) -> None:
    """None of the partitions exists, and each of them makes them all."""
    await advance_clock(conn, WEEKS_S)
    nodes = [application.node(min_workers=1) for _ in range(6)]
    await asyncio.gather(*(node.start() for node in nodes))
    assert set((await states(conn)).values()) == {"active"}
    for node in nodes:
        node.request_drain()
    await asyncio.gather(*(node.wait() for node in nodes))


@pytest.mark.parametrize("step", ["hint_horizon_us", "make_partitions", "clock_us", "register"])
async def test_what_is_in_the_way_of_a_start_and_passes_does_not_end_it(
    conn: Connection, application: Application, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, failures = getattr(Store, step), [TransactionConflict("deadlock"), DatabaseTimeout("?")]

    async def fails_at_first(self: Store, *args: Any) -> Any:
        if not failures:
            return await real(self, *args)
        failure = failures.pop()
        if isinstance(failure, DatabaseTimeout):
            await real(self, *args)  # it took effect, and the answer is lost
        raise failure

    monkeypatch.setattr(Store, step, fails_at_first)
    async with application.node() as node:
        assert not failures
        assert await states(conn) == {node.id: "active"}


async def test_a_conflict_on_the_way_to_active_is_tried_again(
    conn: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = Store.activate, [TransactionConflict("serialization")]

    async def fails_at_first(self: Store) -> bool:
        if failures:
            raise failures.pop()
        return await real(self)

    monkeypatch.setattr(Store, "activate", fails_at_first)
    async with application.node():
        task_id = await schedule(conn, "mail")
        assert (await ended(conn, task_id)).state == "succeeded"


async def test_a_node_that_comes_back_into_a_conflict_tries_again(
    conn: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.joining._JOIN_S", 0.0)
    monkeypatch.setattr("delayq.node._COME_BACK_S", 0.01)
    real, failures = Store.open, [TransactionConflict("deadlock")]

    async def fails_once(self: Store) -> None:
        if failures:
            raise failures.pop()
        await real(self)

    async with application.node() as node:
        before = node.id
        monkeypatch.setattr(Store, "open", fails_once)
        await conn.execute("update delayq.nodes set state = 'dead'")
        await wait_for(lambda: node.id != before and life(node).active.is_set(), "it is back")
        assert not failures


async def test_what_is_paused_does_not_fire_because_a_node_starts(
    conn: Connection, application: Application
) -> None:
    @application.task
    async def report() -> None:
        return None

    await conn.execute("insert into delayq.kinds (kind, paused) values ('report', true)")
    paused = [await schedule(conn, "report") for _ in range(5)]
    for _ in range(3):
        async with application.node():
            task_id = await schedule(conn, "mail")
            assert (await ended(conn, task_id)).state == "succeeded"
    never_leased = await conn.fetchval(
        "select count(*) from delayq.tasks"
        " where id = any($1) and attempt = 0 and leased_at = '-infinity'",
        paused,
    )
    assert never_leased == len(paused)


async def test_if_listen_becomes_active_late_everything_is_read_again(
    conn: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was hinted between the first load and LISTEN was said to nobody."""
    monkeypatch.setattr("delayq.joining._LISTEN_S", 0.05)
    real, listen, scans = Listener._connect, asyncio.Event(), list[int]()

    async def late(self: Listener) -> Any:
        await listen.wait()
        return await real(self)

    monkeypatch.setattr(Listener, "_connect", late)
    async with application.node() as node:
        scan = life(node)._manager.rescan_from

        async def noted(from_us: int) -> None:
            scans.append(from_us)
            await scan(from_us)

        life(node)._manager.rescan_from = noted  # type: ignore[method-assign]  # to note the call
        assert not scans
        listen.set()
        await wait_for(lambda: scans, "a scan from the beginning")
        assert scans == [0]


# --- hints that cannot be read ----------------------------------------------------------------


async def test_nonsense_on_the_channel_costs_a_short_scan_now_and_then(
    conn: Connection, application: Application
) -> None:
    async with application.node(sweep_interval_s=2.0, understudy_delay_ms=500) as node:
        scans: list[int] = []

        async def noted(from_us: int) -> None:
            scans.append(from_us)

        swap(life(node)._manager, "rescan_from", noted)
        now_us = await conn.fetchval("select delayq.micros(delayq.clock())")
        for _ in range(50):
            await conn.execute("select pg_notify('delayq', e'due\\nnonsense')")
        await conn.execute("select pg_notify('delayq', 'scan 7')")
        await wait_for(lambda: 7 in scans, "what came later was heard")
        assert len(scans) <= 2
        assert all(abs(from_us - now_us) < 10e6 for from_us in scans if from_us != 7)


# --- leaving ----------------------------------------------------------------------------------


async def test_a_node_that_leaves_while_a_lease_is_unresolved_says_so_and_peers_take_it_over(
    conn: Connection, application: Application
) -> None:
    """Its lease committed and the answer does not come: the task is under it when it leaves."""
    leaving, staying = application.node(**LONG), application.node(**LONG)
    await leaving.start()
    store, leased = life(leaving)._store, asyncio.Event()

    async def unanswered(*args: Any) -> Any:
        if await real(*args):
            leased.set()
            await asyncio.Event().wait()

    real = swap(store, "lease", unanswered)
    task_id = await schedule(conn, "mail")
    await leased.wait()
    async with staying:
        leaving.request_stop()
        await leaving.wait()
        over = await ended(conn, task_id, SOON_S)
        assert (over.state, over.attempt, over.node) == ("succeeded", 2, staying.id)


async def test_a_lease_that_comes_back_after_the_drain_began_is_given_back_and_not_started(
    conn: Connection, application: Application
) -> None:
    started: list[int] = []

    @application.task
    async def late(ctx: Context) -> None:
        started.append(ctx.id)

    node = application.node()
    await node.start()
    store, leased, answer = life(node)._store, asyncio.Event(), asyncio.Event()

    async def answered_late(*args: Any) -> Any:
        rows = await real(*args)
        leased.set()
        await answer.wait()
        return rows

    real = swap(store, "lease", answered_late)
    task_id = await schedule(conn, "late")
    await leased.wait()
    node.request_drain()
    await eventually(lambda: conn.fetchval("select state = 'draining' from delayq.nodes"), "so far")
    answer.set()
    await node.wait()
    assert started == []
    row = await row_of(conn, task_id)
    assert row is not None
    assert (row["state"], row["attempt"], row["interruptions"]) == ("pending", 0, 0)
    assert await states(conn) == {}


async def test_a_node_that_hands_over_everything_leaves_no_row(
    conn: Connection, application: Application
) -> None:
    async with application.node():
        task_id = await schedule(conn, "mail")
        await ended(conn, task_id)
    assert await states(conn) == {}


@pytest.mark.parametrize(
    "end",
    [
        "delete from delayq.nodes where id = $1",
        "update delayq.nodes set state = 'dead' where id = $1",
    ],
)
async def test_what_a_node_left_that_died_or_vanished_is_adopted_when_the_news_come(
    conn: Connection, application: Application, end: str
) -> None:
    await add_node(conn, PEER, expires_s=1_000)
    await run_by(conn, PEER, [1])
    async with application.node(**LONG) as node:
        await wait_for(lambda: PEER in life(node)._orphans.alive, "it knows its peer")
        row = await row_of(conn, 1)
        assert row is not None
        assert row["lease_owner"] == PEER
        await conn.execute(end, PEER)
        assert (await ended(conn, 1, SOON_S)).attempt == 2


@pytest.mark.parametrize("it_beat_since", [False, True])
async def test_after_the_clock_was_set_back_a_new_node_finds_what_a_dead_one_ran(
    conn: Connection, application: Application, it_beat_since: bool
) -> None:
    """Its instant lies in the future now; the dead node's row tells how far to look."""
    await add_node(conn, PEER)
    await run_by(conn, PEER, [1])
    latest = await conn.fetchval("select delayq.micros(delayq.clock())")
    await advance_clock(conn, -3_600)
    if it_beat_since:
        await conn.fetch(statement("beat"), PEER, 1_000, "{}", latest)
    await conn.execute("update delayq.nodes set state = 'dead' where id = $1", PEER)

    async def is_pending() -> bool:
        row = await row_of(conn, 1)
        assert row is not None
        return bool(row["state"] == "pending")

    async with application.node(**LONG):
        await eventually(is_pending, "it is adopted", SOON_S)


async def test_a_step_of_leaving_that_fails_keeps_no_other_from_being_taken(
    conn: Connection, application: Application
) -> None:
    node = application.node()
    await node.start()
    thread = beat_thread_of(node)

    async def broken() -> None:
        raise RuntimeError("a bug")

    swap(life(node)._pool, "aclose", broken)
    node.request_drain()
    with pytest.raises(RuntimeError, match="a bug"):
        await node.wait()
    assert not thread.is_alive()
    assert await states(conn) == {}


async def test_a_node_that_is_cancelled_again_and_again_stops_beating_all_the_same(
    conn: Connection, application: Application
) -> None:
    node = application.node()
    await node.start()
    thread, at = beat_thread_of(node), list[str]()

    def hanging(name: str) -> Any:
        async def hangs() -> None:
            at.append(name)
            await asyncio.Event().wait()

        return hangs

    swap(life(node)._maintenance, "stop", hanging("maintenance"))
    swap(life(node)._pool, "aclose", hanging("pool"))
    assert node._task is not None
    for name in ("maintenance", "pool"):
        node._task.cancel()
        await wait_for(lambda name=name: name in at, f"it hangs in the {name}")  # type: ignore[misc]  # a default is no argument
    node._task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await node._task
    assert not thread.is_alive()
    # nothing was handed over, and it says so
    assert await states(conn) == {node.id: "dead"}


# --- the beat ---------------------------------------------------------------------------------


async def test_a_node_whose_beat_ends_by_a_bug_comes_back_as_another(
    conn: Connection, application: Application, monkeypatch: pytest.MonkeyPatch,
    logged: list[Logged],
) -> None:  # fmt: skip
    real, dies, watched = Membership._watch, threading.Event(), list[int]()

    async def watch(self: Membership) -> None:
        watched.append(self._incarnation)
        if self._incarnation != watched[0]:
            await real(self)
        await asyncio.to_thread(dies.wait)
        raise RuntimeError("secret")

    monkeypatch.setattr(Membership, "_watch", watch)
    async with application.node() as node:
        before = node.id
        dies.set()
        await wait_for(lambda: node.id != before and life(node).active.is_set(), "another")
        task_id = await schedule(conn, "mail")
        assert (await ended(conn, task_id)).node == node.id
    (told,) = [event for event in logged if event.event == "beat.ended"]
    assert told.fields["error"] == "RuntimeError"
    assert not [event for event in logged if "secret" in event.text]
    assert set((await states(conn)).values()) <= {"dead"}
