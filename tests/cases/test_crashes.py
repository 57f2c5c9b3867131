"""Nodes that die, sleep, stand still or are asked to leave: what becomes of their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delayq.context import Context
from tests.cases.case_app import case_crew
from tests.helpers import advance_clock, connected, wait_for
from tests.nodes import (
    Application,
    all_ended,
    ended,
    eventually,
    life,
    no_live_tasks,
    row_of,
    schedule,
)
from tests.process.crew import REPOSITORY, Crew, crew, spread
from tests.rooms import PEER, add_node, id_in, run_by

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

NOISE_S = 2.0


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


# --- zombies ------------------------------------------------------------------------------------


class Rivals:
    """Two attempts of one task, the first of which goes on after its node was buried."""

    def __init__(self, app: Application, loser: str) -> None:
        self.started: dict[int, int | None] = {}
        self.may_end = {1: asyncio.Event(), 2: asyncio.Event()}
        self.refusals: list[str] = []

        @app.task
        async def writes(ctx: Context) -> None:
            await self._runs(ctx)
            if ctx.attempt == 1 and loser == "raises":
                raise ValueError("the loser's own error")
            if ctx.attempt == 2 or loser == "commits":
                await self._commits(ctx)

    async def _runs(self, ctx: Context) -> None:
        self.started[ctx.attempt] = ctx._attempt.node
        while not self.may_end[ctx.attempt].is_set():
            with contextlib.suppress(asyncio.CancelledError):  # it does not take a hint
                await self.may_end[ctx.attempt].wait()

    async def _commits(self, ctx: Context) -> None:
        try:
            async with ctx.effect() as effect:
                await effect.execute("insert into effects values ($1, $2)", ctx.id, ctx.attempt)
        except BaseException as error:
            self.refusals.append(type(error).__name__)
            raise


@pytest.mark.parametrize("winner", ["runs still", "has finished"])
@pytest.mark.parametrize("loser", ["commits", "returns", "raises"])
async def test_a_zombie_that_goes_on_changes_nothing_of_the_winners_task(
    app: Application, conn: Connection, loser: str, winner: str, logged: list[Logged]
) -> None:
    """C036. It was buried while its handler ran, and the handler ignores its cancellation."""
    await conn.execute("create table effects (task_id bigint, attempt integer)")
    rivals = Rivals(app, loser)
    started = rivals.started
    async with app.node(), app.node():
        task_id = await schedule(conn, "writes")
        await wait_for(lambda: started, "it runs")
        await conn.execute("update delayq.nodes set state = 'dead' where id = $1", started[1])
        await wait_for(lambda: 2 in started, "it runs once more, under another incarnation")
        if winner == "has finished":
            rivals.may_end[2].set()
            await ended(conn, task_id)
        rivals.may_end[1].set()
        await wait_for(lambda: [e for e in logged if e.event == "lease.lost"], "the loser ends")
        if winner == "runs still":
            row = await row_of(conn, task_id)
            assert row is not None
            assert (row["state"], row["attempt"], row["lease_owner"]) == ("running", 2, started[2])
            rivals.may_end[2].set()
        end = await ended(conn, task_id)
    assert started[1] != started[2]
    assert (end.state, end.attempt, end.node) == ("succeeded", 2, started[2])
    assert [error["error"] for error in end.errors] == ["NodeLost"]  # and not the loser's
    effects = await conn.fetch("select task_id, attempt from effects")
    assert [tuple(row) for row in effects] == [(task_id, 2)]
    if loser == "commits":  # told by the token, or by the cancel that came at this very moment
        assert rivals.refusals in (["LeaseLost"], ["CancelledError"])


@pytest.mark.slow
async def test_a_frozen_node_whose_attempt_fails_on_waking_leaves_the_task_to_the_winner(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C036. With SIGSTOP, and the winner still at work when the loser wakes up."""
    async with case_crew(conn, dsn, tmp_path) as them:
        frozen = await them.start()
        task_id = await schedule(conn, "fails_late", {"ms": 2_500})
        await them.saw("start", [task_id])
        frozen.signal(signal.SIGSTOP)
        await them.start()
        await eventually(lambda: _started(them, task_id, 2), "it runs elsewhere", 15)
        frozen.signal(signal.SIGCONT)
        end = await ended(conn, task_id, 15)
        assert (end.state, end.attempt) == ("succeeded", 2)
        assert [error["error"] for error in end.errors] == ["NodeLost"]
        assert await them.effects() == {task_id: 1}


async def _started(them: Crew, task_id: int, count: int) -> bool:
    return len(them.starts(task_id)) == count


@pytest.mark.slow
async def test_a_loop_that_stands_still_longer_than_a_lease_loses_neither_its_task_nor_others(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C038. The beat has a thread and a connection of its own; a second node looks on."""
    async with case_crew(conn, dsn, tmp_path, max_workers=20) as them:
        await them.start()
        others = await spread(conn, "brief", 5, first_s=0, every_ms=0, payload='{"ms": 1500}')
        await them.saw("start", others)
        await them.start()
        blocked = await spread(conn, "blocks", 2, first_s=0, every_ms=0, payload='{"ms": 4500}')
        await no_live_tasks(conn, 20)
        assert await them.effects() == dict.fromkeys([*others, *blocked], 1)
        assert sorted(line.task_id for line in them.starts()) == sorted([*others, *blocked])
        rows = await conn.fetch("select distinct state, attempt from delayq.task_history")
        assert [tuple(row) for row in rows] == [("succeeded", 1)]
        assert await conn.fetchval("select count(*) from delayq.nodes where state = 'active'") == 2


# --- what kills its process ---------------------------------------------------------------------


@pytest.mark.slow
async def test_a_task_that_kills_its_process_at_its_only_attempt_is_dead_and_its_key_free(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C039. And twenty others finish; with more attempts see the poison pill in tests/process."""
    async with crew(conn, dsn, tmp_path) as them:
        nodes = await them.start_many(2)
        others = await spread(conn, "brief", 20, first_s=0.2, every_ms=100, payload='{"ms": 1}')
        pill = await schedule(conn, "poison", max_attempts=1, key="pill")
        end = await ended(conn, pill, 20)
        assert (end.state, end.attempt) == ("dead", 1)
        assert [error["error"] for error in end.errors] == ["NodeLost"]
        assert len(them.starts(pill)) == 1
        assert [node.popen.poll() for node in nodes].count(-signal.SIGKILL) == 1
        row = await conn.fetchrow(
            "select created from delayq.schedule('poison', key => 'pill', delay => '1 hour')"
        )
        assert row is not None
        assert row["created"] is True
        await all_ended(conn, others)
        assert await them.effects() == dict.fromkeys(others, 1)


async def test_what_dead_nodes_ran_counts_against_no_limit(
    app: Application, conn: Connection
) -> None:
    """C041. A limit of two, two rows of a dead node, and ten that wait."""
    inside = most = 0

    @app.task(max_concurrency=2)
    async def narrow() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1

    await add_node(conn, PEER, "dead")
    ids = [*await run_by(conn, PEER, [1_001, 1_002], kind="narrow")]
    ids += await spread(conn, "narrow", 10, first_s=0, every_ms=0, payload="{}")
    async with app.node():
        ends = await all_ended(conn, ids)
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert most == 2


async def test_phantoms_of_killed_nodes_are_gone_from_every_figure_once_they_are_adopted(
    app: Application, conn: Connection
) -> None:
    """C122. Five nodes died with four running each; they vanish once nothing refers to them."""

    @app.task
    async def mail() -> None:
        pass

    for n in range(5):
        await add_node(conn, PEER + n, "dead")
        await run_by(conn, PEER + n, range(100 * n + 1, 100 * n + 5))
    count = "select count(*) from delayq.tasks where state = 'running'"
    assert await conn.fetchval(count) == 20
    async with app.node() as node:
        await no_live_tasks(conn)
        assert await conn.fetchval(count) == 0
        life(node)._maintenance.run_now("orphans")

        async def forgotten() -> bool:
            return int(await conn.fetchval("select count(*) from delayq.nodes")) == 1

        await eventually(forgotten, "the dead nodes are forgotten")
        assert node.counters is not None
        assert node.counters.adopted == 20


async def test_a_page_of_orphans_that_cannot_be_adopted_hides_none_of_those_behind_it(
    app: Application, conn: Connection, dsn: str
) -> None:
    """C035. More than a page of rows that a stranger holds locked come first."""
    locked = [id_in(0, n) for n in range(1, 1_101)]
    free = [id_in(255, n) for n in range(2_001, 2_011)]  # behind them, in whatever order

    @app.task
    async def mail() -> None:
        pass

    await add_node(conn, PEER, "dead")
    await run_by(conn, PEER, [*locked, *free])
    async with connected(dsn) as stranger, stranger.transaction():
        await stranger.execute(
            "select from delayq.tasks where id = any($1::bigint[]) for update", locked
        )
        async with app.node():
            ends = await all_ended(conn, free, 5)
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 2)}
    await conn.execute("delete from delayq.tasks")


async def test_duties_that_all_nodes_do_at_once_harm_nothing(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    """C042. There is no leader: every node sweeps, adopts and prunes, whenever it likes."""
    runs: Counter[int] = Counter()

    @app.task
    async def mail(ctx: Context) -> None:
        runs[ctx.id] += 1

    await add_node(conn, PEER, "dead")
    orphans = [*await run_by(conn, PEER, range(1_001, 1_101))]
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(app.node()) for _ in range(3)]
        ids = await spread(conn, "mail", 200, first_s=0.1, every_ms=5, payload="{}")
        for _ in range(5):
            for node in nodes:
                for duty in ("sweep", "orphans", "full_scan", "upkeep"):
                    life(node)._maintenance.run_now(duty)
            await asyncio.sleep(0.1)  # they are started together, again and again
        ends = await all_ended(conn, [*ids, *orphans])
    assert runs == Counter(dict.fromkeys([*ids, *orphans], 1))
    assert {end.state for end in ends.values()} == {"succeeded"}
    assert not [e for e in logged if e.event in ("job.crashed", "job.failed", "adopt.refused")]


# --- leaving ------------------------------------------------------------------------------------


async def test_what_was_armed_when_every_node_left_runs_once_when_one_is_back(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C045. Its first half, one node leaving, is in tests/process/test_handoff.py."""
    async with crew(conn, dsn, tmp_path) as them:
        nodes = await them.start_many(2)
        ids = await spread(conn, "brief", 100, first_s=9, every_ms=1, payload='{"ms": 1}')
        for node in nodes:
            node.signal(signal.SIGTERM)
        assert [await node.exit_status() for node in nodes] == [0, 0]
        await advance_clock(conn, 12)
        await them.start()
        await no_live_tasks(conn)
        assert await them.effects() == dict.fromkeys(ids, 1)
        assert len(them.starts()) == len(ids)
        rows = await conn.fetch("select distinct attempt from delayq.task_history")
        assert [row["attempt"] for row in rows] == [1]


async def test_a_task_that_every_deploy_interrupts_still_has_all_its_attempts(
    app: Application, conn: Connection
) -> None:
    """C046."""
    undisturbed = False
    started = asyncio.Event()

    @app.task(max_attempts=3)
    async def long() -> None:
        started.set()
        if not undisturbed:
            await asyncio.sleep(3_600)

    task_id = await schedule(conn, "long")
    for deploys in range(1, 6):
        async with app.node(drain_timeout_s=0.0):
            await started.wait()
        started.clear()
        row = await row_of(conn, task_id)
        assert row is not None
        assert (row["state"], row["attempt"], row["interruptions"]) == ("pending", 0, deploys)
    undisturbed = True
    async with app.node():
        end = await ended(conn, task_id)
    assert (end.state, end.attempt, end.interruptions, end.errors) == ("succeeded", 1, 5, [])


@pytest.mark.parametrize("signals", [pytest.param(2, marks=pytest.mark.slow), 5])
async def test_however_often_interrupt_is_pressed_the_node_leaves_at_once_and_in_order(
    conn: Connection, dsn: str, tmp_path: Path, signals: int
) -> None:
    """C048. Ctrl-C twice, and five times within a moment."""
    async with crew(conn, dsn, tmp_path, drain_timeout_s=20) as them:
        node = await them.start()
        ids = await spread(conn, "once_long", 3, first_s=0, every_ms=0, payload='{"ms": 30000}')
        await them.saw("start", ids)
        for _ in range(signals):
            node.signal(signal.SIGINT)
            await asyncio.sleep(0.01 if signals > 2 else 0.3)  # as fast as fingers are
        pressed = time.monotonic()
        assert await node.exit_status() == 128 + signal.SIGINT
        assert time.monotonic() - pressed < 1 + NOISE_S
        assert "Traceback" not in node.said()
        rows = await conn.fetch("select state, attempt, lease_owner from delayq.tasks")
        assert [tuple(row) for row in rows] == [("pending", 0, 0)] * len(ids)
        assert await them.effects() == {}


async def test_a_migration_that_sigterm_meets_at_any_moment_is_whole_or_nothing(
    empty_dsn: str, tmp_path: Path
) -> None:
    """C049. The rest of it, PID 1 and signals to nodes, is in tests/process/test_cli.py."""
    async with connected(empty_dsn) as conn:
        for delay_ms in (250, 400, 500):  # a different moment each time
            status, err = await asyncio.to_thread(_migrate, empty_dsn, tmp_path, delay_ms)
            assert status in (0, 143, -signal.SIGTERM)
            assert b"Traceback" not in err
            steps = 0
            if await conn.fetchval("select to_regclass('delayq.migrations') is not null"):
                steps = await conn.fetchval("select count(*) from delayq.migrations")
            functions = await conn.fetchval("select to_regproc('delayq.grant_node') is not null")
            assert functions is (steps == _STEPS)
        assert await asyncio.to_thread(_migrate, empty_dsn, tmp_path, None) == (0, b"")
        assert await conn.fetchval("select count(*) from delayq.migrations") == _STEPS


def _migrate(dsn: str, folder: Path, delay_ms: int | None) -> tuple[int, bytes]:
    """Start `delayq migrate` and end it after a while; its status and what it complained of."""
    process = subprocess.Popen(
        [sys.executable, "-m", "delayq", "migrate"], cwd=folder,
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(REPOSITORY),
             "DELAYQ_DSN": dsn, "DELAYQ_EMBEDDED": "0"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    if delay_ms is not None:
        time.sleep(delay_ms / 1000)
        process.terminate()
    _, err = process.communicate(timeout=30)
    return process.returncode, err


_STEPS = len(list((REPOSITORY / "schema" / "migrations").glob("*.sql")))


async def test_a_thread_that_does_not_end_keeps_no_process_from_leaving(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C118. Its task is given back, and its effect, if it comes to one, goes nowhere."""
    async with crew(conn, dsn, tmp_path, drain_timeout_s=0.3) as them:
        node = await them.start()
        task_id = await schedule(conn, "plain", {"ms": 60_000}, timeout=timedelta(seconds=1))
        await them.saw("start", [task_id])
        node.signal(signal.SIGTERM)
        assert await node.exit_status(20) == 0, node.said()
        row = await row_of(conn, task_id)
        assert row is not None
        assert (row["state"], row["lease_owner"]) == ("pending", 0)
        assert await them.effects() == {}
        assert len(them.starts(task_id)) == 1
