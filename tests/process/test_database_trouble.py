"""PostgreSQL restarts, refuses, forgets and hangs up: the node recovers by itself.

Nothing is lost and no effect happens twice, whatever happens to its connections.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayq.context import Context
from delayq.embedded import PrivateServer
from delayq.migrate import migrate
from delayq.settings import load_settings
from tests.conftest import SHORT
from tests.helpers import connected, events, wait_for, wait_until_blocked
from tests.nodes import Application, all_ended, ended, eventually, life, row_of, schedule
from tests.process.crew import spread
from tests.relay import relay

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

EFFECTS = "create table effects (task_id bigint, attempt int)"
INSERT = "insert into effects values ($1, $2)"


class OwnServer:
    """A PostgreSQL server that one test has to itself, to restart as it likes."""

    def __init__(self, folder: Path) -> None:
        self._server = PrivateServer(folder, {"fsync": "off"}, allow_system=True)

    @property
    def dsn(self) -> str:
        return self._server.dsn

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def restart(self, mode: str) -> None:
        """`fast` ends the sessions and shuts down; `immediate` is a crash, with a recovery."""
        if mode == "immediate":
            pid = int((self._server.data / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGQUIT)
        await self.stop()
        await self.start()


@pytest.fixture
async def own_server() -> AsyncIterator[OwnServer]:
    folder = Path(tempfile.mkdtemp(prefix="delayq-trouble-"))
    server = OwnServer(folder / "pg")
    try:
        await server.start()
        async with connected(server.dsn) as conn:
            await migrate(conn)
            await conn.execute(EFFECTS)
        yield server
    finally:
        await server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _patient(app: Application) -> None:
    """Handlers with an effect that outlast an outage."""

    @app.task(max_attempts=200)
    async def writes(ctx: Context, ms: int) -> None:
        await asyncio.sleep(ms / 1000)
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt)

    @app.task(max_attempts=200)
    def writes_in_thread(ctx: Context) -> None:
        with ctx.effect() as effect:
            effect.execute(INSERT, ctx.id, ctx.attempt)


def _settings(dsn: str, **changes: Any) -> Settings:
    return load_settings(dsn=dsn, embedded=False, **(SHORT | changes))


async def _each_once(conn: Connection, ids: list[int]) -> None:
    rows = await conn.fetch("select task_id, count(*) as n from effects group by task_id")
    assert {row["task_id"]: row["n"] for row in rows} == dict.fromkeys(ids, 1)
    assert not await conn.fetchval("select count(*) from delayq.dead_tasks")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_the_database_under_running_nodes(
    own_server: OwnServer, mode: str
) -> None:
    """C052."""
    app = Application(_settings(own_server.dsn))
    _patient(app)
    async with app.node() as first, app.node() as second:
        nodes = {first.id, second.id}
        async with connected(own_server.dsn) as conn:
            ids = await spread(conn, "writes", 150, first_s=0.2, every_ms=15, payload='{"ms": 20}')
            ids += await spread(conn, "writes_in_thread", 20, first_s=0.2, every_ms=100,
                                payload="{}")  # fmt: skip
            await ended(conn, ids[20])
        await own_server.restart(mode)
        async with connected(own_server.dsn) as conn:
            after = [await schedule(conn, "writes", {"ms": 0}) for _ in range(5)]
            ends = await all_ended(conn, [*ids, *after], 20)
            assert {end.state for end in ends.values()} == {"succeeded"}
            await _each_once(conn, [*ids, *after])
            # an outage buries nobody
            states = await conn.fetch("select id, state from delayq.nodes")
            assert {tuple(row) for row in states} == {(node, "active") for node in nodes}
            for node in (first, second):
                assert node.counters is not None
                assert node.counters.succeeded


async def test_an_outage_longer_than_the_ttl_fences_and_heals(own_server: OwnServer) -> None:
    app = Application(_settings(own_server.dsn))
    _patient(app)
    cancelled: list[int] = []

    @app.task(max_attempts=200)
    async def long(ctx: Context) -> None:
        if ctx.attempt > 1 or cancelled:
            async with ctx.effect() as effect:
                await effect.execute(INSERT, ctx.id, ctx.attempt)
            return
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(ctx.id)
            raise

    async with app.node() as node:
        first_id = node.id
        async with connected(own_server.dsn) as conn:
            running = await schedule(conn, "long")
            due = await schedule(conn, "writes", {"ms": 0}, delay=timedelta(seconds=1))
            await wait_for(lambda: running in life(node)._executor.running, "it runs")
        await own_server.stop()
        # the node ends by itself what its peers may take over
        await wait_for(lambda: cancelled == [running], "the node is fenced", 8)
        await own_server.start()
        async with connected(own_server.dsn) as conn:
            ends = await all_ended(conn, [running, due], 15)
            assert {end.state for end in ends.values()} == {"succeeded"}
            await _each_once(conn, [running, due])
            assert node.id == first_id


async def test_a_database_that_turns_read_only_and_back(
    own_server: OwnServer, logged: list[Logged]
) -> None:
    """C056. As after a failover to a standby that is promoted later; the sessions stay."""
    app = Application(_settings(own_server.dsn))
    _patient(app)
    async with app.node() as node, connected(own_server.dsn) as conn:
        await conn.execute("set default_transaction_read_only = off")
        ids = await spread(conn, "writes", 60, first_s=0.2, every_ms=20, payload='{"ms": 20}')
        await ended(conn, ids[5])
        await _read_only(conn, True)
        await wait_for(lambda: events(logged, "beat.failed"), "a beat failed", 5)
        ids += [await schedule(conn, "writes", {"ms": 0}) for _ in range(5)]
        await wait_for(lambda: events(logged, "lease.unknown"), "a lease failed", 5)
        await _read_only(conn, False)
        ends = await all_ended(conn, ids, 15)
        assert {end.state for end in ends.values()} == {"succeeded"}
        await _each_once(conn, ids)
        assert node.id == await conn.fetchval("select id from delayq.nodes where state = 'active'")


async def _read_only(conn: Connection, on: bool) -> None:
    await conn.execute(f"alter system set default_transaction_read_only = {on}")
    await conn.execute("select pg_reload_conf()")


# --- single connections -------------------------------------------------------------------------


@pytest.fixture
def app(settings: Settings) -> Application:
    app = Application(settings)
    _patient(app)
    return app


async def _backend(conn: Connection, node: int | None, piece: str) -> int | None:
    """The backend of a node whose last statement contains this."""
    pid: int | None = await conn.fetchval(
        "select pid from pg_stat_activity where application_name = 'delayq/' || $1::bigint"
        " and query ilike '%' || $2 || '%'",
        node, piece,
    )  # fmt: skip
    return pid


async def _kill(conn: Connection, node: int | None, piece: str) -> int:
    """End that backend, and wait until it is gone."""

    async def look() -> int | None:
        return await _backend(conn, node, piece)

    pid: int = await eventually(look, f"a backend for {piece}")
    assert await conn.fetchval("select pg_terminate_backend($1)", pid)

    async def gone() -> bool:
        count = await conn.fetchval("select count(*) from pg_stat_activity where pid = $1", pid)
        return not count

    await eventually(gone, "the backend is gone")
    return pid


async def test_a_lost_listen_connection_comes_back_and_what_fell_between_is_found(
    app: Application, conn: Connection
) -> None:
    """C052."""
    await conn.execute(EFFECTS)
    async with app.node() as node:
        pid = await _kill(conn, node.id, "ping to itself")
        # written while nobody listens: the window is read again once somebody does
        missed = await schedule(conn, "writes", {"ms": 0}, delay=timedelta(milliseconds=300))

        async def listens_again() -> bool:
            again = await _backend(conn, node.id, "ping to itself")
            return again is not None and again != pid

        await eventually(listens_again, "it listens again")
        heard = await schedule(conn, "writes", {"ms": 0})
        ends = await all_ended(conn, [missed, heard])
        late_us = [end.lateness_us for end in ends.values()]
        assert max(late or 0 for late in late_us) < 1_500_000
        await _each_once(conn, [missed, heard])


async def test_a_cut_beat_connection_is_replaced(
    app: Application, conn: Connection, logged: list[Logged]
) -> None:
    await conn.execute(EFFECTS)
    async with app.node() as node:
        before = node.id
        for _ in range(3):
            await _kill(conn, node.id, "The heartbeat")
            seen = await conn.fetchval("select expires_at from delayq.nodes")

            async def beats(seen: object = seen) -> bool:
                return bool(await conn.fetchval("select expires_at > $1 from delayq.nodes", seen))

            await eventually(beats, "it beats again", 3)
        task_id = await schedule(conn, "writes", {"ms": 0})
        assert (await ended(conn, task_id)).attempt == 1
        assert node.id == before
        await _each_once(conn, [task_id])
    assert not events(logged, "node.fenced")


@pytest.mark.parametrize("piece", ["Lease those", "settle a batch", "Overdue tasks that no"])
async def test_any_other_control_connection_may_go(
    app: Application, conn: Connection, piece: str
) -> None:
    @app.task
    async def quick() -> None:
        pass

    async with app.node() as node:
        await ended(conn, await schedule(conn, "quick"))
        await _kill(conn, node.id, piece)
        ids = await spread(conn, "quick", 20, first_s=0, every_ms=20, payload="{}")
        ends = await all_ended(conn, ids)
        assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}


async def test_the_connection_of_looks_may_go_while_a_task_is_locked(
    app: Application, conn: Connection, dsn: str
) -> None:
    @app.task
    async def quick() -> None:
        pass

    async with app.node() as node, connected(dsn) as stranger:
        task_id = await schedule(conn, "quick", delay=timedelta(seconds=0.2))
        async with stranger.transaction():
            await stranger.execute("select from delayq.tasks where id = $1 for update", task_id)
            for _ in range(3):
                await _kill(conn, node.id, "What became")
            assert (await ended(conn, await schedule(conn, "quick"))).attempt == 1
        assert (await ended(conn, task_id)).attempt == 1


async def test_a_lease_that_is_ended_in_mid_statement_is_tried_again(
    app: Application, conn: Connection, dsn: str, logged: list[Logged]
) -> None:
    await conn.execute(EFFECTS)
    async with app.node() as node, connected(dsn) as stranger:
        async with stranger.transaction():
            ids = await spread(conn, "writes", 10, first_s=0.3, every_ms=0, payload='{"ms": 0}')
            await stranger.execute("lock table delayq.tasks in share mode")
            pid = await wait_until_blocked(conn, "Lease those")
            assert await conn.fetchval("select pg_terminate_backend($1)", pid)
            await wait_for(lambda: events(logged, "lease.unknown"), "the answer is lost")
        ends = await all_ended(conn, ids)
        assert {end.attempt for end in ends.values()} == {1}
        await _each_once(conn, ids)
        await wait_for(lambda: not life(node)._holdings.ids(), "the node lets go of them")


async def test_a_lease_that_was_committed_but_whose_answer_is_lost_is_found_and_given_back(
    app: Application, conn: Connection, dsn: str, logged: list[Logged]
) -> None:
    await conn.execute(EFFECTS)

    @app.task
    async def quick() -> None:
        pass

    async with relay(dsn) as wire, app.node(wire.dsn) as node, connected(dsn) as stranger:
        await ended(conn, await schedule(conn, "quick"))  # the statement is prepared
        async with stranger.transaction():
            ids = await spread(conn, "writes", 10, first_s=0.3, every_ms=0, payload='{"ms": 0}')
            await stranger.execute("lock table delayq.tasks in share mode")
            # the one that gives up after 2 ms has been refused; this one waits
            await eventually(lambda: conn.fetchval(WAITING, "%Lease those%"), "the lease waits")
            wire.deafen()  # the statement is at the server; its answer will not come through
        await eventually(lambda: _running(conn, ids), "the lease is committed")
        wire.cut()
        rows = await conn.fetch("select attempt, lease_owner from delayq.tasks")
        assert {tuple(row) for row in rows} == {(1, node.id)}
        wire.resume()
        ends = await all_ended(conn, ids)
        # given back with its attempt: nobody had started them
        assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
        await _each_once(conn, ids)
    assert events(logged, "lease.unknown")
    assert not events(logged, "leases.forgotten")


WAITING = """
    select exists (select from pg_stat_activity
                    where datname = current_database() and query like $1
                      and wait_event_type = 'Lock'
                      and clock_timestamp() - query_start > interval '100 ms')
"""


async def _running(conn: Connection, ids: list[int]) -> bool:
    count = await conn.fetchval(
        "select count(*) from delayq.tasks where id = any($1::bigint[]) and state = 'running'", ids
    )
    return bool(count == len(ids))


async def test_a_settlement_whose_answer_is_lost_is_not_taken_for_a_lost_lease(
    app: Application, conn: Connection, dsn: str, logged: list[Logged]
) -> None:
    runs: list[int] = []
    go_on = asyncio.Event()

    @app.task
    async def counts(ctx: Context) -> None:
        runs.append(ctx.id)
        await go_on.wait()

    @app.task
    async def quick() -> None:
        pass

    async with relay(dsn) as wire, app.node(wire.dsn) as node, connected(dsn) as stranger:
        await ended(conn, await schedule(conn, "quick"))  # the statement is prepared
        ids = await spread(conn, "counts", 5, first_s=0, every_ms=0, payload="{}")
        await wait_for(lambda: len(runs) == 5, "all run")
        async with stranger.transaction():
            await stranger.execute("lock table delayq.task_history in share mode")
            go_on.set()
            await wait_until_blocked(conn, "settle")
            wire.deafen()
        await all_ended(conn, ids)
        wire.cut()
        wire.resume()
        await wait_for(lambda: not life(node)._holdings.ids(), "the node lets go of them")
        assert node.counters is not None
        assert node.counters.leases_lost == 0
    assert sorted(runs) == sorted(ids)
    assert not events(logged, "lease.lost")


async def test_a_commit_of_an_effect_whose_answer_is_lost_is_not_repeated(
    app: Application, conn: Connection, dsn: str
) -> None:
    """The commit got through, the handler does not know: the token in history tells."""
    await conn.execute(EFFECTS)
    starts: list[int] = []

    @app.task
    async def unlucky(ctx: Context) -> None:
        starts.append(ctx.attempt)
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt)

    # the commit waits for this trigger's lock, and its answer goes nowhere
    await conn.execute(
        """
        create table gate (n int);
        create function wait_at_gate() returns trigger language plpgsql as $$
        begin lock table gate in share mode; return null; end $$;
        create constraint trigger gate after insert on effects
            deferrable initially deferred for each row execute function wait_at_gate()
        """
    )
    async with relay(dsn) as wire, app.node(wire.dsn) as node, connected(dsn) as stranger:
        async with stranger.transaction():
            await stranger.execute("lock table gate in exclusive mode")
            task_id = await schedule(conn, "unlucky")
            await wait_until_blocked(conn, "commit")
            wire.deafen()
        end = await ended(conn, task_id)
        wire.cut()
        wire.resume()
        await wait_for(lambda: not life(node)._holdings.ids(), "the node lets go of it")
        assert (end.state, end.attempt, starts) == ("succeeded", 1, [1])
        await _each_once(conn, [task_id])
        assert await row_of(conn, task_id) is None


async def test_a_deaf_wire_fences_the_node_and_its_peers_run_what_it_had(
    app: Application, conn: Connection, dsn: str
) -> None:
    await conn.execute(EFFECTS)
    ended_by: list[str] = []
    started = asyncio.Event()

    @app.task(max_attempts=200)
    async def long(ctx: Context) -> None:
        started.set()
        try:
            if ctx.attempt == 1:
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended_by.append("cancelled")
            raise
        async with ctx.effect() as effect:
            await effect.execute(INSERT, ctx.id, ctx.attempt)

    async with relay(dsn) as wire, app.node(wire.dsn) as cut_off:
        task_id = await schedule(conn, "long")
        await started.wait()
        lost = cut_off.id
        async with app.node() as peer:
            wire.deafen()
            end = await ended(conn, task_id, 15)
            assert (end.state, end.attempt, end.node) == ("succeeded", 2, peer.id)
            assert ended_by == ["cancelled"]  # before anybody else could start it
            wire.cut()
            wire.resume()
            await wait_for(lambda: cut_off.id != lost, "it comes back as another", 10)
        await _each_once(conn, [task_id])
