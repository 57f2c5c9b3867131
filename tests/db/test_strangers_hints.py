"""What strangers say on the channel while a node runs: a hint is a hint, and never the truth.

Everybody who may connect to a database may NOTIFY in it. So whatever is said there must not stop a
node, start what must not start, end what runs, or delay a task by more than a sweep.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import SHORT
from tests.helpers import wait_for
from tests.nodes import Application, all_ended, ended, life, row_of, schedule
from tests.process.crew import spread

if TYPE_CHECKING:
    from delayq.context import Context
    from delayq.database import Connection
    from delayq.node import Node
    from delayq.settings import Settings
    from tests.conftest import Logged

MARKER = "Stranger-3b71"
SWEEP_S = SHORT["sweep_interval_s"]
NOISE_S = 2.0
FAR_US = 12_000_000


@pytest.fixture
def app(settings: Settings) -> Application:
    return Application(settings)


async def say(stranger: Connection, *messages: str) -> None:
    await stranger.executemany("select pg_notify('delayq', $1)", [(m,) for m in messages])


@asynccontextmanager
async def nothing_raised() -> AsyncIterator[None]:
    """No callback of the block raises into the loop, where nobody would see it."""
    loop = asyncio.get_running_loop()
    raised: list[dict[str, Any]] = []
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: raised.append(context))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
    assert not raised


class Crowd:
    """Counts how many are inside at once."""

    inside = most = 0

    async def visit(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.01)
        self.inside -= 1


class Babble:
    """Messages that look like those of the schema, and are wrong in every field now and then."""

    def __init__(self, seed: int, now_us: int, own: int) -> None:
        self.random = random.Random(seed)
        self.now_us = now_us
        self.own = own

    def message(self) -> str:
        verb = self.random.choice(["due", "due", "due", "scan", "join", "leave", "drain", "cancel",
                                   "kind", "ping", "noise"])  # fmt: skip
        if verb == "noise":
            return self.noise()
        if verb == "due":
            lines = [self.line() for _ in range(self.random.choice([1, 2, 5, 300]))]
            return ("due\n" + "\n".join(lines)).encode()[:7_900].decode(errors="ignore")
        if verb == "drain":
            return f"drain {self.other()}"
        return f"{verb} {self.random.choice([self.number(), self.number(), self.noise()])}"

    def line(self) -> str:
        kind = self.random.choice(["tick", "tick", "tock", "", ":", MARKER, "日本", "\t"])
        at = self.random.choice(
            [self.now_us + self.random.randrange(-(10**7), 10**7), self.number()]
        )
        priority = self.random.choice([0, 5, -100, 100, 101, -32_769, self.number()])
        # not the ids of real tasks: those have tests of their own
        task_id = self.random.choice([10**9 + self.random.randrange(10**6), self.other()])
        return f"{task_id}:{at}:{priority}:{kind}"

    def number(self) -> int | str:
        big = self.random.choice([1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**19, self.now_us])
        plain = self.random.choice([big, -big, self.random.getrandbits(62), 0])
        odd: list[int | str] = [plain, plain, plain, f" {plain}", "1_000", "٣", "-0"]
        return self.random.choice(odd)

    def other(self) -> int:
        """A number that is neither a task's nor this node's."""
        number = self.random.choice([-1, 0, 2**63 - 1, 2**63, self.random.getrandbits(62) + 10**9])
        return number if number != self.own else number + 1

    def noise(self) -> str:
        alphabet = "\n :-\tdue0123456789\x01\x7f" + MARKER
        return "".join(self.random.choices(alphabet, k=self.random.randrange(1, 60)))


async def test_thousands_of_messages_from_strangers_delay_nothing_and_stop_nobody(
    app: Application, conn: Connection, stranger: Connection, logged: list[Logged]
) -> None:
    seed = random.randrange(2**32)
    ran: list[int] = []

    @app.task
    async def tick(ctx: Context) -> None:
        ran.append(ctx.id)

    async with nothing_raised(), app.node(max_timers=1_000) as node:
        before = node.id
        babble = Babble(seed, await _now_us(conn), before or 0)
        ids = await spread(conn, "tick", 100, first_s=0.3, every_ms=20, payload="{}")
        messages = [babble.message() for _ in range(2_000)]
        ends, _ = await asyncio.gather(all_ended(conn, ids), say(stranger, *messages))
        after = await schedule(conn, "tick")
        await ended(conn, after)
        assert node.id == before, f"seed {seed}"
        assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
        assert sorted(ran) == sorted([*ids, after]), f"seed {seed}"
        late_s = max(end.lateness_us or 0 for end in ends.values()) / 1e6
        assert late_s < 5, f"seed {seed}"  # for a noisy machine: they are not stopped
        holdings = life(node)._holdings
        await wait_for(lambda: not holdings.ids(), "what was made up is let go of")
    assert not [e for e in logged if e.level in ("ERROR", "CRITICAL")], f"seed {seed}"
    assert not [e for e in logged if MARKER in e.text], f"seed {seed}"


async def test_a_stranger_who_asks_for_scans_without_end_delays_nothing(
    app: Application, conn: Connection, stranger: Connection
) -> None:
    @app.task
    async def tick() -> None:
        pass

    await conn.execute(
        "insert into delayq.tasks (kind, execute_at)"
        " select 'tick', delayq.clock() + interval '8 s' from generate_series(1, 2000)"
    )
    async with app.node():
        ids = await spread(conn, "tick", 50, first_s=0.3, every_ms=20, payload="{}")
        messages = [f"scan {n}" for n in range(2_000)]
        ends, _ = await asyncio.gather(all_ended(conn, ids), say(stranger, *messages))
    assert max(end.lateness_us or 0 for end in ends.values()) / 1e6 < SWEEP_S + NOISE_S


async def _now_us(conn: Connection) -> int:
    now_us: int = await conn.fetchval("select delayq.micros(delayq.clock())")
    return now_us


# --- what they say about real tasks and nodes ---------------------------------------------------


async def test_a_stranger_who_says_cancel_ends_no_attempt(
    app: Application, conn: Connection, stranger: Connection
) -> None:
    started, go_on, attempts = asyncio.Event(), asyncio.Event(), list[int]()

    @app.task(max_attempts=1)
    async def works(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        started.set()
        await go_on.wait()

    async with app.node() as node:
        task_id = await schedule(conn, "works")
        await started.wait()
        await say(stranger, f"cancel {task_id}")
        await _heard_everything(node, stranger)
        go_on.set()
        end = await ended(conn, task_id)
    assert (end.state, attempts, end.errors) == ("succeeded", [1], [])


async def test_a_stranger_who_says_drain_ends_no_node(
    app: Application, conn: Connection, stranger: Connection
) -> None:
    @app.task
    async def tick() -> None:
        pass

    async with app.node() as node:
        await say(stranger, f"drain {node.id}")
        await _heard_everything(node, stranger)
        end = await ended(conn, await schedule(conn, "tick"), 3)
        assert end.node == node.id
        assert await conn.fetchval("select state from delayq.nodes") == "active"


async def test_a_stranger_who_gives_a_task_another_kind_does_not_run_what_is_paused(
    app: Application, conn: Connection, stranger: Connection
) -> None:
    ran: list[str] = []

    @app.task
    async def halted() -> None:
        ran.append("halted")

    @app.task
    async def free() -> None:
        ran.append("free")

    await conn.execute("insert into delayq.kinds (kind, paused) values ('halted', true)")
    async with app.node() as node:
        paused = await schedule(conn, "halted")
        await say(stranger, f"due\n{paused}:{await _now_us(conn)}:0:free")
        await _heard_everything(node, stranger)
        await ended(conn, await schedule(conn, "free", delay=timedelta(seconds=0.3)))
    assert ran == ["free"]


async def test_a_stranger_who_gives_a_task_another_kind_breaks_no_limit_and_no_node(
    app: Application, conn: Connection, stranger: Connection
) -> None:
    crowd = Crowd()

    @app.task(max_concurrency=1)
    async def narrow() -> None:
        await crowd.visit()

    @app.task
    async def free() -> None:
        pass

    async with app.node() as node:
        before = node.id
        ids = await spread(conn, "narrow", 10, first_s=0.3, every_ms=0, payload="{}")
        at_us = await conn.fetchval("select delayq.micros(min(execute_at)) from delayq.tasks")
        await say(stranger, *(f"due\n{task_id}:{at_us}:0:free" for task_id in ids))
        ends = await all_ended(conn, ids)
        assert node.id == before
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert crowd.most == 1


@pytest.mark.parametrize(("before", "after"), [("free", "narrow"), ("narrow", "free")])
async def test_a_kind_that_is_changed_by_hand_breaks_no_limit_and_holds_up_nobody(
    app: Application, conn: Connection, before: str, after: str
) -> None:
    """The timers were loaded under the old kind; a raw UPDATE sends no hint."""
    crowd = Crowd()

    @app.task(max_concurrency=1)
    async def narrow() -> None:
        await crowd.visit()

    @app.task
    async def free() -> None:
        pass

    ids = await spread(conn, before, 10, first_s=1.5, every_ms=0, payload="{}")
    async with app.node(sweep_interval_s=5.0) as node:  # active: it has loaded its window
        same = node.id
        await conn.execute("update delayq.tasks set kind = $1", after)
        ends = await all_ended(conn, ids, 3)
        again = await spread(conn, "narrow", 10, first_s=0, every_ms=0, payload="{}")
        ends |= await all_ended(conn, again, 3)
        assert node.id == same
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert crowd.most == 1


async def test_a_stranger_who_moves_tasks_about_delays_them_by_a_sweep_at_the_most(
    app: Application, conn: Connection, stranger: Connection
) -> None:
    """Later, earlier, far away: what is overdue and fired by nobody is found by the sweep."""

    @app.task
    async def tick() -> None:
        pass

    async with app.node() as node:
        ids = await spread(conn, "tick", 30, first_s=0.6, every_ms=5, payload="{}")
        now_us = await _now_us(conn)
        places = [now_us + FAR_US, now_us, now_us + 10**15, 0, -(10**18), now_us + 900_000]
        await say(stranger, *(
            f"due\n{task_id}:{places[n % len(places)]}:0:tick" for n, task_id in enumerate(ids)
        ))  # fmt: skip
        await _heard_everything(node, stranger)
        ends = await all_ended(conn, ids)
    assert {(end.state, end.attempt) for end in ends.values()} == {("succeeded", 1)}
    assert all(0 <= (end.lateness_us or 0) / 1e6 < 2 * SWEEP_S + 1 + NOISE_S
               for end in ends.values())  # fmt: skip
    rows = [await row_of(conn, task_id) for task_id in ids]
    assert not any(rows)


async def _heard_everything(node: Node, stranger: Connection) -> None:
    """Messages come in their order: once the scan that is said last was heard, all were."""
    last = life(node)
    heard = asyncio.Event()
    real = last._listener._hearers.kind

    def kind() -> None:
        heard.set()
        real()

    last._listener._hearers.kind = kind
    await say(stranger, "kind marker")
    async with asyncio.timeout(5):
        await heard.wait()
    # and acted upon: whatever was set going by it had its turns
    for _ in range(20):
        await asyncio.sleep(0.005)
