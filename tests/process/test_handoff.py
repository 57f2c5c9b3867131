"""Nodes come and go, and nobody notices: nothing lost, early, twice, or late."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delayq.statements import statement
from tests.conftest import Databases
from tests.nodes import eventually, no_live_tasks
from tests.process.calm import Run, fresh_crew, keeps
from tests.process.crew import Crew, Process, bare_timer, crew, percentile, spread

if TYPE_CHECKING:
    from delayq.database import Connection

LATE_US = 250_000
"""For a noisy machine; what is promised is asked of `test_the_whole_promise`."""
CALM_US = 2_000
"""The 99th percentile of a bare timer on a machine that has time for us is 1 to 2 ms. A task waits
for a processor several times (node, server, node), so it is late by several times as much."""


async def _leave(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert await process.exit_status() == 0, process.said()


async def _one_leaves(them: Crew, nodes: list[Process], ids: list[int]) -> None:
    await them.saw("start", ids[len(ids) // 3 : len(ids) // 3 + 1])
    await _leave(nodes[0])


async def _all_are_replaced(them: Crew, nodes: list[Process], ids: list[int]) -> None:
    await them.saw("start", ids[:1])
    for node in nodes:
        await them.start()
        await _leave(node)


async def _check(them: Crew, ids: list[int]) -> dict[int, int]:
    """Every effect once, every attempt the first, nothing early; lateness by task."""
    assert await them.effects() == dict.fromkeys(ids, 1)
    assert sorted(line.task_id for line in them.starts()) == sorted(ids)
    rows = await them.conn.fetch("select state, attempt from delayq.task_history")
    assert {tuple(row) for row in rows} == {("succeeded", 1)}
    lateness = await them.lateness_us(ids)
    assert min(lateness.values()) >= 0, "somebody was early"
    early = await them.conn.fetchval(
        "select count(*) from delayq.task_history where started_at < execute_at"
    )
    assert early == 0
    return lateness


@pytest.mark.parametrize("kind", ["brief", "plain"])
async def test_the_tasks_of_a_node_that_leaves_fire_on_time_elsewhere(
    conn: Connection, dsn: str, tmp_path: Path, kind: str
) -> None:
    """C045."""
    async with crew(conn, dsn, tmp_path) as them:
        nodes = await them.start_many(3)
        ids = await spread(conn, kind, 200, first_s=0.5, every_ms=15, payload='{"ms": 50}')
        async with bare_timer() as bare:
            await _one_leaves(them, nodes, ids)
            await no_live_tasks(conn)
        lateness = await _check(them, ids)
    assert percentile(lateness.values(), 0.99) < LATE_US + percentile(bare, 0.99)


async def test_all_nodes_are_replaced_one_after_another(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path) as them:
        nodes = await them.start_many(3)
        ids = await spread(conn, "brief", 300, first_s=0.5, every_ms=20, payload='{"ms": 50}')
        async with bare_timer() as bare:
            await _all_are_replaced(them, nodes, ids)
            await no_live_tasks(conn, 20)
        lateness = await _check(them, ids)
        assert await conn.fetchval("select count(*) from delayq.nodes") == 3
    assert percentile(lateness.values(), 0.99) < LATE_US + percentile(bare, 0.99)


@pytest.mark.more
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["nothing", "one_leaves", "all_are_replaced"])
async def test_the_whole_promise(
    databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
    what: str,
) -> None:
    """2,000 tasks over 20 s, three nodes, default settings: the 99th percentile under 10 ms."""

    async def run() -> Run:
        async with fresh_crew(databases, tmp_path_factory.mktemp("nodes")) as them:
            lateness, bare = await _two_thousand(them, what)
        told = f"{what}: {_figures(lateness)}; a bare timer: {_figures(bare)}"
        return Run(percentile(lateness, 0.99), percentile(bare, 0.99), told)

    await keeps(run, within_us=10_000, calm_us=CALM_US, tell=record_property)


async def _two_thousand(them: Crew, what: str) -> tuple[list[int], list[int]]:
    """The lateness of each, and of a bare timer meanwhile; that nothing else was wrong."""
    nodes = await them.start_many(3)
    ids = await spread(them.conn, "brief", 2000, first_s=1, every_ms=10, payload='{"ms": 50}')
    async with bare_timer() as bare:
        if what == "one_leaves":
            await _one_leaves(them, nodes, ids)
        elif what == "all_are_replaced":
            await _all_are_replaced(them, nodes, ids)
        await no_live_tasks(them.conn, 60)
    return list((await _check(them, ids)).values()), bare


def _figures(values: Iterable[int]) -> str:
    ordered = sorted(values)
    half, high = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return f"p50 {half / 1000:.1f} ms, p99 {high / 1000:.1f} ms, max {ordered[-1] / 1000:.1f} ms"


async def test_what_runs_when_a_node_leaves_is_finished_first(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path) as them:
        node = await them.start()
        ids = await spread(conn, "brief", 5, first_s=0, every_ms=0, payload='{"ms": 800}')
        later = await spread(conn, "brief", 5, first_s=0.4, every_ms=0, payload='{"ms": 1}')
        await them.saw("start", ids)
        await _leave(node)
        assert await them.effects() == dict.fromkeys(ids, 1)
        # nothing starts after the first signal
        assert {line.task_id for line in them.starts()} == set(ids)
        rows = await conn.fetch("select id, state, attempt from delayq.tasks order by id")
        assert [tuple(row) for row in rows] == [(task_id, "pending", 0) for task_id in later]


async def test_what_does_not_end_in_time_is_given_back_and_runs_elsewhere_at_once(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path, drain_timeout_s=0.3) as them:
        first = await them.start()
        ids = await spread(conn, "once_long", 3, first_s=0, every_ms=0, payload='{"ms": 60000}')
        await them.saw("start", ids)
        await them.start()
        await _leave(first)
        rows = await conn.fetch(
            "select attempt, interruptions from delayq.tasks union all"
            " select attempt, interruptions from delayq.task_history"
        )
        assert {row["interruptions"] for row in rows} == {1}
        # the attempt was given back, so the second start is a first attempt too: and is long
        await _started_twice(them, ids)
    assert {line.attempt for line in them.starts()} == {1}


async def _started_twice(them: Crew, ids: list[int]) -> None:
    async def look() -> bool:
        return all(len(them.starts(task_id)) == 2 for task_id in ids)

    await eventually(look, "each of them was started again")


async def test_a_node_asked_to_drain_from_afar_leaves_with_0(
    conn: Connection, dsn: str, tmp_path: Path
) -> None:
    async with crew(conn, dsn, tmp_path) as them:
        node = await them.start()
        assert await conn.fetchrow(statement("ask_drain"), node.node)
        assert await node.exit_status() == 0
        assert await conn.fetchval("select count(*) from delayq.nodes") == 0
