"""Nodes that die, freeze or are hurried: nothing is lost, and no effect happens twice."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.conftest import Databases
from tests.helpers import connected
from tests.nodes import ended, eventually, no_live_tasks, schedule
from tests.process.calm import Run, fresh_crew, keeps
from tests.process.crew import Crew, Process, bare_timer, crew, spread

if TYPE_CHECKING:
    from delayq.database import Connection

NOISE_S = 1.0
"""What a busy machine may add to a promise."""
SHORT_TTL_S, SHORT_BEAT_S, SHORT_SWEEP_S = 3.0, 0.75, 0.5
FROZEN_S = 30.0
TAKEN_OVER_S = 21.0
"""What ran on a node that died runs again within the default TTL, one beat and 2 s."""
PENDING_LATE_US = 700_000
"""The understudy's 0.5 s, and time for it to ask, lease and start."""
BACK_WITHIN_S = 10.0
"""What a woken node may take to find itself buried, join anew, load and fire."""
CALM_US = 50_000
"""A bare timer that is later than this at its worst has a machine that cannot show it."""


_MOST_BRIEF = 10
"""How many of the brief ones one node of three may have leased at a time: two, as a rule."""


async def _one_is_killed(
    them: Crew, *, pending: int, every_ms: float
) -> tuple[list[int], list[int], int]:
    """Kill one of three while it runs some; the ids (pending, running there) and when."""
    nodes = await them.start_many(3)
    long = await spread(them.conn, "once_long", 12, first_s=0, every_ms=0,
                        payload='{"ms": 60000}')  # fmt: skip
    ids = await spread(them.conn, "brief", pending, first_s=1, every_ms=every_ms,
                       payload='{"ms": 50}')  # fmt: skip
    owner = {line.task_id: line.node for line in await them.saw("start", long)}
    victim = max(nodes, key=lambda node: sum(at == node.node for at in owner.values()))
    await them.saw("start", ids[pending // 4 : pending // 4 + 1])
    victim.signal(signal.SIGKILL)
    killed_us = time.time_ns() // 1000
    await victim.exit_status()
    return ids, [task_id for task_id in long if owner[task_id] == victim.node], killed_us


async def _check_kill(
    them: Crew, ids: list[int], running: list[int], killed_us: int, within_s: float
) -> int:
    """How late the latest of the pending ones was. Those that ran are run again in time."""
    assert running
    await eventually(lambda: _ended_all(them, ids), "the pending ones are over", 30 + within_s)
    again = {line.task_id: line.at_us - killed_us for line in them.starts()
             if line.task_id in running and line.attempt == 2}  # fmt: skip

    async def started_again() -> bool:
        again.update({line.task_id: line.at_us - killed_us for line in them.starts()
                      if line.task_id in running and line.attempt == 2})  # fmt: skip
        return again.keys() == set(running)

    await eventually(started_again, "what ran there runs again", within_s + 5)
    assert max(again.values()) / 1e6 < within_s
    for task_id in running:
        assert (await ended(them.conn, task_id)).state == "succeeded"
        assert [line.attempt for line in them.starts(task_id)] == [1, 2]
    effects = await them.effects()
    assert all(effects[task_id] == 1 for task_id in [*ids, *running])
    # the victim may have leased one or two of the brief ones itself: those ran, they were not
    # pending any more, and are held to the other bound
    lateness = await them.lateness_us(ids)
    assert min(lateness.values()) >= 0, "somebody was early"
    leased = await them.conn.fetch(
        "select id from delayq.task_history where id = any($1::bigint[]) and attempt > 1", ids
    )
    taken_over = sorted((row["id"] for row in leased), key=lateness.__getitem__)
    assert all(lateness[task_id] / 1e6 < within_s for task_id in taken_over)
    # more than it can have had count as pending, and as late as they were
    had = taken_over[-_MOST_BRIEF:]
    return max(late_us for task_id, late_us in lateness.items() if task_id not in had)


async def _ended_all(them: Crew, ids: list[int]) -> bool:
    count = await them.conn.fetchval(
        "select count(*) from delayq.task_history where id = any($1::bigint[])", ids
    )
    return bool(count == len(ids))


async def test_a_killed_nodes_tasks_run_elsewhere_soon(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path) as them:
        ids, running, killed_us = await _one_is_killed(them, pending=200, every_ms=15)
        within_s = SHORT_TTL_S + SHORT_BEAT_S + 2 + NOISE_S
        latest_us = await _check_kill(them, ids, running, killed_us, within_s)
    assert latest_us < 1e6 * (0.5 + SHORT_SWEEP_S + NOISE_S)


@pytest.mark.more
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_a_killed_nodes_tasks_run_elsewhere_as_promised(
    databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
) -> None:
    """Default settings: pending ones at most 0.7 s late, running ones again within 21 s."""

    async def run() -> Run:
        folder = tmp_path_factory.mktemp("nodes")
        async with fresh_crew(databases, folder) as them, bare_timer() as bare:
            ids, running, killed_us = await _one_is_killed(them, pending=2000, every_ms=10)
            latest_us = await _check_kill(them, ids, running, killed_us, TAKEN_OVER_S)
            again_us = _again_us(them, running) - killed_us
        told = _told("killed", latest_us, again_us, bare)
        return Run(latest_us, max(bare), told)

    await keeps(run, within_us=PENDING_LATE_US, calm_us=CALM_US, tell=record_property)


def _again_us(them: Crew, running: list[int]) -> int:
    """When the last of them was started for the second time."""
    return max(line.at_us for line in them.starts() if line.task_id in running)


def _told(what: str, latest_us: int, again_us: int, bare: list[int]) -> str:
    return (
        f"{what}: pending at most {latest_us / 1000:.0f} ms late, what ran there again after"
        f" {again_us / 1e6:.1f} s at most; a bare timer: max {max(bare) / 1000:.1f} ms"
    )


class Frozen(NamedTuple):
    """A node that was stopped and woken among others."""

    process: Process
    was: int
    """Its incarnation when it was stopped. It comes back as another."""
    ids: list[int]
    """Tasks that came due one after another before, meanwhile and afterwards."""
    running: list[int]
    """What it ran when it was stopped. When it wakes, some handlers want to go on at once (of
    these, some have run elsewhere, some run there just then), some wait on, one is inside of its
    effect."""
    scheduled: int
    """How many tasks there are in all."""
    stopped_us: int
    woken_us: int


async def _one_freezes_and_wakes(them: Crew) -> Frozen:
    nodes = await them.start_many(3)
    long = await _same_time(them, "once_long", 15, 20_000)
    long += await _same_time(them, "once_long", 15, 45_000)
    long += await _same_time(them, "brief", 15, 20_000)
    inside = await _same_time(them, "inside", 1, 45_000)
    ids = await spread(them.conn, "brief", 2000, first_s=1, every_ms=25, payload='{"ms": 50}')
    [locking] = await them.saw("inside", inside)
    owner = {line.task_id: line.node for line in await them.saw("start", [*long, *inside])}
    victim = next(node for node in nodes if node.node == locking.node)
    await them.saw("start", ids[200:201])
    victim.signal(signal.SIGSTOP)
    stopped_us = time.time_ns() // 1000
    await asyncio.sleep(FROZEN_S)  # its silence is the event
    victim.signal(signal.SIGCONT)
    woken_us = time.time_ns() // 1000
    running = [task_id for task_id, node in owner.items() if node == victim.node]
    scheduled = len(owner) + len(ids)
    return Frozen(victim, victim.node, ids, running, scheduled, stopped_us, woken_us)


async def _same_time(them: Crew, kind: str, count: int, ms: int) -> list[int]:
    payload = json.dumps({"ms": ms})
    return await spread(them.conn, kind, count, first_s=0, every_ms=0, payload=payload)


async def _check_settled(them: Crew, frozen: Frozen) -> None:
    """Whoever was given a task settled it, and the woken node nothing that it had lost."""
    rows = await them.conn.fetch(
        "select id, node, state, delayq.micros(finished_at) as finished_us,"
        "       started_at < execute_at as early from delayq.task_history"
    )
    assert len(rows) == frozen.scheduled
    assert {row["state"] for row in rows} == {"succeeded"}
    assert await them.effects() == dict.fromkeys((row["id"] for row in rows), 1)
    assert not [row for row in rows if row["early"]]
    settler = {row["id"]: row["node"] for row in rows}
    effects = await them.conn.fetch("select task_id, node from public.effects")
    assert {row["task_id"]: row["node"] for row in effects} == settler
    ends = [(line.task_id, line.node) for line in them.lines() if line.event == "end"]
    assert set(ends) <= set(settler.items())
    assert len(ends) == len(set(ends))
    assert frozen.was not in {settler[task_id] for task_id in frozen.running}
    # what it had sent before it was stopped may take the server a moment
    by_it = [row["finished_us"] for row in rows if row["node"] == frozen.was]
    assert max(by_it) < frozen.stopped_us + NOISE_S * 1e6
    assert await them.conn.fetchval("select left_over from public.stock") == 999


async def _check_return(them: Crew, frozen: Frozen) -> None:
    """It is back as another, takes its share of what is left, and leaves like any other."""
    back = await them.conn.fetchval(
        "select id from delayq.nodes where pid = $1 and id <> $2 and state = 'active'",
        frozen.process.popen.pid, frozen.was,
    )  # fmt: skip
    first_us = min(line.at_us for line in them.starts() if line.node == back)
    assert frozen.woken_us < first_us < frozen.woken_us + BACK_WITHIN_S * 1e6
    frozen.process.signal(signal.SIGTERM)
    assert await frozen.process.exit_status() == 0


@pytest.mark.more
@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_a_node_that_is_frozen_for_30_seconds_settles_nothing_that_it_lost_as_promised(
    databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
) -> None:
    """Default settings, under load: twice the TTL, so that it is buried, robbed, and woken."""

    async def run() -> Run:
        folder = tmp_path_factory.mktemp("nodes")
        async with fresh_crew(databases, folder) as them, bare_timer() as bare:
            frozen = await _one_freezes_and_wakes(them)
            latest_us = await _check_kill(
                them, frozen.ids, frozen.running, frozen.stopped_us, TAKEN_OVER_S
            )
            await no_live_tasks(them.conn, 60)
            await _check_settled(them, frozen)
            await _check_return(them, frozen)
            again_us = _again_us(them, frozen.running) - frozen.stopped_us
        told = _told("frozen", latest_us, again_us, bare)
        return Run(latest_us, max(bare), told)

    await keeps(run, within_us=PENDING_LATE_US, calm_us=CALM_US, tell=record_property)


async def test_a_frozen_node_that_wakes_settles_nothing_that_it_lost(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C036."""
    async with crew(conn, dsn, tmp_path) as them:
        frozen = await them.start()
        long = await spread(conn, "once_long", 4, first_s=0, every_ms=0, payload='{"ms": 2000}')
        locked = await schedule(conn, "inside", {"ms": 2000})
        await them.saw("start", long)
        await them.saw("inside", [locked])
        frozen.signal(signal.SIGSTOP)
        await them.start()
        await no_live_tasks(conn, 25)  # adopted, although the frozen one holds rows locked
        assert [line.attempt for line in them.starts(locked)] == [1, 2]
        frozen.signal(signal.SIGCONT)
        # it comes back as another incarnation, and takes its share
        back = await eventually(
            lambda: conn.fetchval(
                "select id from delayq.nodes where pid = $1 and id <> $2 and state = 'active'",
                frozen.popen.pid, frozen.node,
            ),
            "the woken node came back as another", 15,
        )  # fmt: skip
        more = await spread(conn, "brief", 40, first_s=0.2, every_ms=5, payload='{"ms": 5}')
        await no_live_tasks(conn)
        effects = await them.effects()
        assert effects == dict.fromkeys([*long, locked, *more], 1)
        by = await conn.fetch("select task_id, node from public.effects")
        assert frozen.node not in {row["node"] for row in by}
        assert back in {row["node"] for row in by}
        # it ended what it ran: no handler of the old incarnation went on to its end
        assert not [line for line in them.lines()
                    if line.node == frozen.node and line.event == "end"]  # fmt: skip
        assert await conn.fetchval("select left_over from public.stock") == 999
        frozen.signal(signal.SIGTERM)
        assert await frozen.exit_status() == 0


async def test_a_poison_pill_is_dead_after_its_attempts(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """C039."""
    async with crew(conn, dsn, tmp_path) as them:
        nodes = await them.start_many(3)
        pill = await schedule(conn, "poison")
        end = await ended(conn, pill, 25)
        assert (end.state, end.attempt) == ("dead", 2)
        assert [error["error"] for error in end.errors] == ["NodeLost"] * 2
        statuses = sorted(str(node.popen.poll()) for node in nodes)
        assert statuses == ["-9", "-9", "None"]
        assert [line.attempt for line in them.starts(pill)] == [1, 2]
        healthy = await schedule(conn, "brief", {"ms": 1})
        assert (await ended(conn, healthy)).state == "succeeded"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_leaves_at_once_and_gives_back_what_ran(
    conn: Connection, dsn: str, tmp_path: Path, second: signal.Signals
) -> None:
    """C048."""
    async with crew(conn, dsn, tmp_path) as them:
        node = await them.start()
        ids = await spread(conn, "once_long", 3, first_s=0, every_ms=0, payload='{"ms": 60000}')
        ids += await spread(conn, "inside", 1, first_s=0, every_ms=0, payload='{"ms": 60000}')
        await them.saw("start", ids)
        node.signal(signal.SIGTERM)
        await _state_is(conn, node, "draining")
        node.signal(second)
        sent = time.monotonic()
        assert await node.exit_status() == 128 + second
        assert time.monotonic() - sent < 1 + NOISE_S
        rows = await conn.fetch("select state, attempt, interruptions from delayq.tasks")
        assert [tuple(row) for row in rows] == [("pending", 0, 1)] * len(ids)
        assert await conn.fetchval("select count(*) from delayq.nodes") == 0
        assert await them.effects() == {}


async def _state_is(conn: Connection, node: Process, state: str) -> None:
    await eventually(
        lambda: conn.fetchval(
            "select true from delayq.nodes where id = $1 and state = $2", node.node, state
        ),
        f"the node is {state}",
    )


async def test_a_second_signal_does_not_wait_for_a_handler_that_ignores_it(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path) as them:
        node = await them.start()
        task_id = await schedule(conn, "stubborn")
        await them.saw("start", [task_id])
        node.signal(signal.SIGTERM)
        await _state_is(conn, node, "draining")
        node.signal(signal.SIGTERM)
        assert await node.exit_status(20) == 128 + signal.SIGTERM
        row = await conn.fetchrow("select state, lease_owner from delayq.tasks")
        assert row is not None
        assert tuple(row) == ("pending", 0)


async def test_a_signal_during_the_start_is_not_lost(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    """At whatever moment after the handlers of signals are in place: it leaves, with 0."""
    async with crew(conn, dsn, tmp_path) as them:
        for step in range(4):
            process = them.launch()
            await eventually(lambda: _sessions(conn), "it connects", 20)
            await asyncio.sleep(step * 0.02)  # a different moment each time: no event to wait for
            process.signal(signal.SIGTERM)
            assert await process.exit_status(10) == 0, process.said()
            assert await conn.fetchval("select count(*) from delayq.nodes") == 0
            assert "Traceback" not in process.said()


async def _sessions(conn: Connection) -> bool:
    return bool(
        await conn.fetchval(
            "select exists (select from pg_stat_activity where application_name like 'delayq/%'"
            " and datname = current_database())"
        )
    )


async def test_a_signal_while_the_database_does_not_answer_ends_the_start(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf_dsn = f"postgresql://postgres@127.0.0.1:{deaf.getsockname()[1]}/x?sslmode=disable"
        async with crew(conn, dsn, tmp_path, connect_timeout_s=60) as them:
            process = them.launch(dsn=deaf_dsn)
            accepted, _ = await asyncio.to_thread(deaf.accept)
            with accepted:
                process.signal(signal.SIGTERM)
                await process.exit_status(5)


async def test_the_first_node_after_a_crash_of_all_runs_what_they_left(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path) as them:
        node = await them.start()
        ids = await spread(conn, "once_long", 3, first_s=0, every_ms=0, payload='{"ms": 60000}')
        later = await spread(conn, "brief", 30, first_s=0.5, every_ms=1, payload='{"ms": 1}')
        await them.saw("start", ids)
        node.signal(signal.SIGKILL)
        await node.exit_status()
        async with connected(dsn) as other:
            await eventually(lambda: other.fetchval(
                "select min(execute_at) < clock_timestamp() from delayq.tasks where id = $1",
                later[0]), "something is overdue")  # fmt: skip
        restarted = time.monotonic()
        await them.start()
        ends = [await ended(conn, task_id, 15) for task_id in [*ids, *later]]
        assert time.monotonic() - restarted < SHORT_TTL_S + SHORT_BEAT_S + 2 + 2 * NOISE_S
        assert {end.state for end in ends} == {"succeeded"}
        assert {(end.attempt, json.dumps(end.errors)[:0]) for end in ends[3:]} == {(1, "")}
        assert [end.attempt for end in ends[:3]] == [2] * 3
        assert await them.effects() == dict.fromkeys([*ids, *later], 1)
