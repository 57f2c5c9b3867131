"""Who is alive, and who says so: beats and burials on a real node table.

The judge's own clock is the test's: a TTL passes when the test says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from delayq.clock import Clock, DatabaseClock
from delayq.commons import Commons
from delayq.control import set_instant_codec
from delayq.database import Database, parse_dsn
from delayq.membership import Membership, News, Witnesses
from delayq.metrics import Counters
from delayq.model import NodeState
from delayq.statements import statement
from delayq.store import Store
from tests.helpers import advance_clock, connected, wait_for, wait_until_blocked
from tests.nodes import Application, ended, life, row_of, schedule
from tests.relay import relay
from tests.rooms import ME, PEER, THIRD, add_node, run_by

if TYPE_CHECKING:
    from delayq.database import Connection
    from delayq.settings import Settings
    from tests.conftest import Logged

TTL_S = 15.0
ROOT = Path(__file__).parents[2]


class OwnClock(Clock):
    """The machine's clock, ahead by what the test added."""

    ahead_us = 0

    def boottime_us(self) -> int:
        return super().boottime_us() + self.ahead_us


@dataclass
class Seat:
    """One node's membership, its clock, and everything that it told."""

    clock: OwnClock
    membership: Membership
    news: list[News] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    burials: list[int] = field(default_factory=list)

    def pass_time(self, seconds: float) -> None:
        self.clock.ahead_us += round(seconds * 1e6)

    async def beat(self, after_s: float = 0.0) -> News:
        """Let time pass, beat, and return what the beat brought."""
        self.pass_time(after_s)
        heard = len(self.news)
        self.membership.beat_soon()
        await wait_for(lambda: len(self.news) > heard, "a beat gets through")
        return self.news[-1]

    async def sit_out(self, seconds: float, step_s: float = 5.0) -> None:
        """Beat through so much time."""
        for _ in range(round(seconds / step_s)):
            await self.beat(step_s)


@asynccontextmanager
async def seat(
    dsn: str, settings: Settings, node: int = ME, *, start: bool = True, **changes: Any
) -> AsyncIterator[Seat]:
    """A node's membership with the usual TTL, beating when told to (and once a minute)."""
    changed = {"lease_ttl_s": TTL_S, "beat_interval_s": 60.0, **changes}
    settings = settings.model_copy(update=changed)
    database, clock = Database(parse_dsn(dsn), settings), OwnClock()
    commons = Commons(Store(database, node), clock, DatabaseClock(clock), Counters(), settings)
    news: list[News] = []
    told: list[str] = []
    burials: list[int] = []
    membership = Membership(
        commons,
        database,
        Witnesses(
            news.append,
            lambda: told.append("buried"),
            lambda: told.append("fenced"),
            burials.extend,
            lambda _: {},
        ),
    )
    subject = Seat(clock, membership, news, told, burials)
    if start:
        membership.start()
        await wait_for(lambda: news or told, "the first beat")
    yield subject
    await membership.stop()


async def state_of(conn: Connection, node: int) -> str | None:
    found: str | None = await conn.fetchval("select state from delayq.nodes where id = $1", node)
    return found


@asynccontextmanager
async def speaking(dsn: str, **options: Any) -> AsyncIterator[Connection]:
    """A connection on which delayq's own statements can be sent by hand."""
    async with connected(dsn, **options) as conn:
        await set_instant_codec(conn)
        yield conn


async def beat_by_hand(conn: Connection, node: int) -> asyncpg.Record:
    (row,) = await conn.fetch(statement("beat"), node, 15_000, "{}", 0)
    return row


async def test_a_beat_tells_the_latest_reading_of_the_clock_also_after_it_was_set_back(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    """What this node leased before was due by then: whoever looks for it must look that far."""
    await add_node(conn, ME)
    async with seat(dsn, settings) as me:
        await me.beat()
        await advance_clock(conn, -3_600)
        await me.beat()
        row = await conn.fetchrow(
            "select delayq.micros(latest_at) as latest_us,"
            " latest_at > expires_at + '30 min' as later from delayq.nodes"
        )
        assert row is not None
        assert row["later"]
        assert (await me.beat()).latest_us == row["latest_us"]  # as whoever comes now hears it


# --- beats ------------------------------------------------------------------------------------


async def test_a_beat_extends_the_row_and_brings_the_news(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME, expires_s=1)
    await add_node(conn, PEER, kinds=["mail", "report"])
    await add_node(conn, THIRD, "dead")
    await add_node(conn, 4_444, "joining")
    await conn.execute("insert into delayq.kinds (kind, paused) values ('x', true), ('y', false)")
    async with seat(dsn, settings) as me:
        news = await me.beat()
        assert news.state is NodeState.ACTIVE
        assert news.active == {ME: {"mail"}, PEER: {"mail", "report"}}
        assert news.nodes == {ME, PEER, 4_444}
        assert news.dead == (THIRD,)
        assert news.paused == {"x"}
        left = (
            "select expires_at - delayq.clock() > interval '14 s' from delayq.nodes where id = $1"
        )
        assert await conn.fetchval(left, ME)


async def test_the_beat_goes_on_while_a_handler_blocks_the_loop(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME)
    async with seat(dsn, settings, beat_interval_s=0.05) as me:
        time.sleep(0.5)  # noqa: ASYNC251 - to block the loop is the point
        me.pass_time(TTL_S * 0.9 - 0.3)  # what was sent before that is not enough to fire now
        assert me.membership.may_fire()


async def test_it_can_be_stopped_at_once_after_it_was_started(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME)
    for _ in range(20):
        async with seat(dsn, settings, start=False) as me:
            me.membership.start()
            async with asyncio.timeout(10):
                await me.membership.stop()


def test_its_thread_ends_when_the_loop_of_the_node_is_gone(
    server: object, dsn: str, settings: Settings
) -> None:
    """Else it would take the closed loop for one that stands still, and end the process."""

    async def start() -> Membership:
        commons_clock = OwnClock()
        changed = settings.model_copy(update={"loop_stall_limit_s": 0.8})
        database = Database(parse_dsn(dsn), changed)
        store = Store(database, ME)
        commons = Commons(store, commons_clock, DatabaseClock(commons_clock), Counters(), changed)
        membership = Membership(
            commons,
            database,
            Witnesses(lambda _: None, lambda: None, lambda: None, lambda _: None, lambda _: {}),
        )
        membership.start()
        return membership

    loop = asyncio.new_event_loop()
    membership = loop.run_until_complete(start())
    loop.close()
    assert membership._thread is not None
    membership._thread.join(10)
    assert not membership._thread.is_alive()


async def test_a_beat_that_fails_by_a_bug_is_a_failed_beat_and_the_next_one_goes_out(
    conn: Connection, dsn: str, settings: Settings, monkeypatch: pytest.MonkeyPatch,
    logged: list[Logged],
) -> None:  # fmt: skip
    await add_node(conn, ME)
    async with seat(dsn, settings) as me:
        heard = len(me.news)
        with monkeypatch.context() as patched:
            patched.setattr("delayq.membership._news", lambda *_args: json.loads("secret"))
            me.membership.beat_soon()
            await wait_for(lambda: _failures(logged), "a failed beat")
            assert len(me.news) == heard
        await wait_for(lambda: len(me.news) > heard, "the next one")
    assert {event.fields["error"] for event in _failures(logged)} == {"JSONDecodeError"}


async def test_a_thread_that_ends_by_itself_ends_the_incarnation(
    conn: Connection, dsn: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_self: Membership) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Membership, "_watch", broken)
    await add_node(conn, ME)
    async with seat(dsn, settings) as me:
        await wait_for(lambda: "buried" in me.told, "the end of the incarnation")
        assert not me.membership.may_fire()


def _failures(logged: list[Logged]) -> list[Logged]:
    return [event for event in logged if event.event == "beat.failed"]


# --- burials ----------------------------------------------------------------------------------


async def test_a_silent_peer_is_buried_after_one_ttl_and_its_burial_is_told(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    for node in (ME, PEER):
        await add_node(conn, node)
    async with seat(dsn, settings) as me:
        await me.sit_out(14, step_s=3.5)
        assert await state_of(conn, PEER) == "active"
        await me.beat(1.5)
        await wait_for(lambda: me.burials == [PEER], "the burial")
        assert await state_of(conn, PEER) == "dead"
        assert PEER in (await me.beat()).dead


async def test_a_peer_that_beats_is_never_buried(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    for node in (ME, PEER):
        await add_node(conn, node)
    async with seat(dsn, settings) as me, speaking(dsn) as peer:
        for _ in range(12):
            await beat_by_hand(peer, PEER)
            await me.beat(5)
        assert (me.burials, await state_of(conn, PEER)) == ([], "active")


async def test_a_burial_waits_for_a_beat_in_flight_and_then_finds_the_peer_alive(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    for node in (ME, PEER):
        await add_node(conn, node)
    await run_by(conn, PEER, [1, 2, 3])
    async with seat(dsn, settings) as me, speaking(dsn) as peer:
        await me.sit_out(14, step_s=3.5)
        transaction = peer.transaction()
        await transaction.start()
        await beat_by_hand(peer, PEER)
        me.pass_time(1.5)
        me.membership.beat_soon()
        await wait_until_blocked(conn, "set state = 'dead'")
        # whoever adopts in this very moment must not believe that the peer is dead either
        adopted = await conn.fetch("select * from delayq.adopt(array[1, 2, 3]::bigint[], 0)")
        assert adopted == []
        await transaction.commit()
        await me.beat()
        assert (me.burials, await state_of(conn, PEER)) == ([], "active")


async def test_a_beat_that_waits_for_a_burial_finds_itself_buried(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME)
    async with seat(dsn, settings) as me, speaking(dsn) as judge:
        expires = await judge.fetchval("select expires_at from delayq.nodes where id = $1", ME)
        transaction = judge.transaction()
        await transaction.start()
        assert await judge.fetch(statement("bury"), ME, expires)
        me.membership.beat_soon()
        await wait_until_blocked(conn, "update delayq.nodes n")
        await transaction.commit()
        await wait_for(lambda: me.told == ["buried"], "the news of its own burial")
        assert not me.membership.may_fire()
        assert await state_of(conn, ME) == "dead"


async def test_a_late_beat_of_a_node_that_nobody_buried_revives_it(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, PEER, expires_s=-3_600)
    async with speaking(dsn) as peer:
        assert (await beat_by_hand(peer, PEER))["state"] == "active"
    alive = "select expires_at > delayq.clock() from delayq.nodes where id = $1"
    assert await conn.fetchval(alive, PEER)


async def test_an_outage_longer_than_the_ttl_buries_nobody(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    """A failover of a minute: every row is out of date, and every judge knows why."""
    for node in (ME, PEER):
        await add_node(conn, node)
    async with relay(dsn) as wire, seat(wire.dsn, settings) as me, speaking(dsn) as peer:
        await me.sit_out(10)
        wire.cut()
        await wait_for(lambda: wire.connections > 0, "it was connected")
        for _ in range(12):
            me.pass_time(5)
            me.membership.beat_soon()
            await asyncio.sleep(0.02)
        wire.resume()
        await me.beat()
        await me.sit_out(10)  # and then the peer has a whole TTL to come back in
        assert (me.burials, await state_of(conn, PEER)) == ([], "active")
        await beat_by_hand(peer, PEER)
        await me.sit_out(10)
        assert (me.burials, await state_of(conn, PEER)) == ([], "active")
        await me.sit_out(10)
        await wait_for(lambda: me.burials == [PEER], "silent for a TTL, it is buried after all")


async def test_a_judge_that_was_itself_frozen_buries_nobody(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    for node in (ME, PEER):
        await add_node(conn, node)
    async with seat(dsn, settings) as me:
        await me.beat(3_600)  # suspended for an hour: its own beats did not get through meanwhile
        await me.sit_out(10)
        assert (me.burials, await state_of(conn, PEER)) == ([], "active")


@pytest.mark.parametrize("step_s", [3_600, -3_600])
async def test_a_step_of_the_databases_clock_buries_nobody_and_hides_no_corpse(
    conn: Connection, dsn: str, settings: Settings, step_s: int
) -> None:
    for node in (ME, PEER, THIRD):
        await add_node(conn, node)
    async with seat(dsn, settings) as me, speaking(dsn) as peer:
        await me.sit_out(10)
        await advance_clock(conn, step_s)
        for _ in range(3):
            await beat_by_hand(peer, PEER)
            await me.beat(3)
        await wait_for(lambda: me.burials == [THIRD], "the silent one is buried in its time")
        assert await state_of(conn, PEER) == "active"
        assert me.membership.may_fire()


async def test_a_row_dated_in_the_future_hides_no_corpse(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME)
    await add_node(conn, PEER, expires_s=10**7)
    async with seat(dsn, settings) as me:
        await me.sit_out(20)
        await wait_for(lambda: me.burials == [PEER], "the burial")


async def test_whoever_buries_a_node_ends_its_sessions_and_their_locks(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    """A frozen client keeps its transaction open, and in it the row of a task."""
    for node in (ME, PEER):
        await add_node(conn, node)
    await run_by(conn, PEER, [1])
    name = {"application_name": f"delayq/{PEER}"}
    frozen = await asyncpg.connect(**parse_dsn(dsn).connect_arguments(), server_settings=name)
    await frozen.execute("begin")
    await frozen.execute("select 1 from delayq.tasks where id = 1 for update")
    async with seat(dsn, settings) as me:
        await me.sit_out(20)
        await wait_for(lambda: me.burials == [PEER], "the burial")
        await wait_for(frozen.is_closed, "the session has ended")
        await conn.execute("set lock_timeout = '5s'")
        await conn.execute("select 1 from delayq.tasks where id = 1 for update")


async def test_the_sessions_of_others_are_left_alone(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    for node in (ME, PEER):
        await add_node(conn, node)
    name = {"application_name": f"delayq/{PEER}0"}
    other = await asyncpg.connect(**parse_dsn(dsn).connect_arguments(), server_settings=name)
    async with seat(dsn, settings) as me:
        await me.sit_out(20)
        await wait_for(lambda: me.burials == [PEER], "the burial")
        assert await other.fetchval("select 1") == 1
    await other.close()


# --- the fence --------------------------------------------------------------------------------


async def test_a_node_whose_beats_fail_fences_itself_before_its_ttl_is_over(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME)
    async with relay(dsn) as wire, seat(wire.dsn, settings) as me:
        assert me.membership.may_fire()
        wire.cut()
        me.pass_time(TTL_S * 0.85)
        assert me.membership.may_fire()
        me.pass_time(TTL_S * 0.1)
        assert not me.membership.may_fire()
        await wait_for(lambda: me.told == ["fenced"], "the fence is told of")
        wire.resume()
        await me.beat()
        assert me.membership.may_fire()
        assert me.told == ["fenced"]


async def test_the_trust_in_a_beat_counts_from_when_it_was_sent(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    await add_node(conn, ME)
    async with connected(dsn) as locker, seat(dsn, settings) as me:
        transaction = locker.transaction()
        await transaction.start()
        await locker.execute("select from delayq.nodes where id = $1 for update", ME)
        sent_us = me.clock.boottime_us()
        me.membership.beat_soon()
        await wait_until_blocked(conn, "update delayq.nodes n")
        me.pass_time(8)  # it is on its way for so long
        heard = len(me.news)
        await transaction.commit()
        await wait_for(lambda: len(me.news) > heard, "the beat gets through")
        me.pass_time((sent_us - me.clock.boottime_us()) / 1e6 + TTL_S * 0.9 - 0.01)
        assert me.membership.may_fire()
        me.pass_time(3)
        assert not me.membership.may_fire()


async def test_a_fenced_node_ends_what_runs_gives_it_back_and_fires_again_when_it_is_trusted(
    conn: Connection, dsn: str, settings: Settings
) -> None:
    application, clock = Application(settings), OwnClock()
    started: list[float] = []

    @application.task
    async def mail() -> None:
        started.append(time.monotonic())
        if len(started) == 1:
            await asyncio.sleep(3_600)

    async with relay(dsn) as wire, application.node(wire.dsn, clock=clock) as node:
        task_id = await schedule(conn, "mail")
        await wait_for(lambda: started, "the handler runs")
        wire.cut()
        clock.ahead_us += round(settings.lease_ttl_s * 0.95 * 1e6)
        executor = life(node)._executor
        await wait_for(lambda: not executor.running, "the fence ends the handler")
        wire.resume()
        over = await ended(conn, task_id)
        assert (over.state, over.attempt, over.interruptions) == ("succeeded", 1, 1)
        assert len(started) == 2


async def test_a_buried_node_comes_back_as_another_and_writes_nothing_of_its_old_life(
    conn: Connection, settings: Settings
) -> None:
    application = Application(settings)
    started: list[int] = []

    @application.task
    async def mail() -> None:
        started.append(1)
        if len(started) == 1:
            await asyncio.sleep(3_600)

    async with application.node() as node:
        before = node.id
        task_id = await schedule(conn, "mail")
        await wait_for(lambda: started, "the handler runs")
        await conn.execute("update delayq.nodes set state = 'dead'")
        await wait_for(lambda: node.id != before, "it notices, and is another")
        await wait_for(life(node).active.is_set, "which takes its share")
        row = await row_of(conn, task_id)
        assert row is None or (row["interruptions"], row["attempt"] >= 1) == (0, True)
        # the old life's task is adopted like any other orphan, the attempt counted
        await life(node)._orphans.check()
        over = await ended(conn, task_id)
        assert (over.state, over.attempt, over.node) == ("succeeded", 2, node.id)
        assert await state_of(conn, before or 0) in (None, "dead")  # removed once nothing is left


# --- a loop that stands still -----------------------------------------------------------------

STALLED = """
import asyncio, sys, time
from delayq.clock import Clock, DatabaseClock
from delayq.commons import Commons
from delayq.database import Database, parse_dsn
from delayq.membership import Membership, Witnesses
from delayq.metrics import Counters
from delayq.settings import load_settings
from delayq.store import Store

async def main():
    settings = load_settings(dsn=sys.argv[1], embedded=False).model_copy(
        update={"loop_stall_limit_s": float(sys.argv[2])})
    database, clock = Database(parse_dsn(sys.argv[1]), settings), Clock()
    commons = Commons(Store(database, 7), clock, DatabaseClock(clock), Counters(), settings)
    news = asyncio.Event()
    membership = Membership(commons, database, Witnesses(
        lambda _: news.set(), lambda: None, lambda: None, lambda _: None, lambda _: {}))
    membership.start()
    await news.wait()
    print("beating", flush=True)
    time.sleep(float(sys.argv[3]))
    await membership.stop()
    print("left", flush=True)

asyncio.run(main())
"""


async def run_stalled(
    dsn: str, limit_s: float, stalls_s: float
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DELAYQ_")}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", STALLED, dsn, str(limit_s), str(stalls_s)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


async def test_a_process_whose_loop_stands_still_for_too_long_says_so_and_exits(
    conn: Connection, dsn: str
) -> None:
    await add_node(conn, 7)
    began = time.monotonic()
    done = await run_stalled(dsn, limit_s=1.0, stalls_s=30)
    assert (done.returncode, done.stdout) == (70, "beating\n")
    assert "loop.stalled" in done.stderr
    assert time.monotonic() - began < 20


async def test_a_shorter_stall_is_nothing(conn: Connection, dsn: str) -> None:
    await add_node(conn, 7)
    done = await run_stalled(dsn, limit_s=20, stalls_s=0.7)
    assert (done.returncode, done.stdout) == (0, "beating\nleft\n")


async def test_a_machine_that_was_suspended_is_no_loop_that_stands_still(
    conn: Connection, dsn: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr("delayq.membership.os._exit", exits.append)
    await add_node(conn, ME)
    async with seat(dsn, settings) as me:
        me.pass_time(3_600)
        await wait_for(lambda: "fenced" in me.told, "it notices")
        await me.beat()
        assert exits == []
